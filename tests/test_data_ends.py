"""No document contains the id that ends documents, whatever its text and its tokenizer; and no encoding is random."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pe_lab.data.chat import encode_chat
from pe_lab.data.shards import SPLITS, open_prepared
from pe_lab.data.tokenizers import export_tokenizer, load_saved_tokenizer, load_tokenizer, save_tokenizer
from pe_lab.data.tokenizers.companions import Companions
from pe_lab.data.tokenizers.gguf import gguf_tokenizer
from pe_lab.data.tokenizers.sentencepiece import SentencePieceTokenizer
from pe_lab.errors import DataError
from pe_lab.prepare import main

LETTERS = {c: i for i, c in enumerate(["<unk>", "<|end|>", *"abcdefghijklmnopqrstuvwxyz<>| \n"])}
TEXT = "say <|end|> now\n<|end|><|end|>"


def characters(**options):
    return Tokenizer(models.BPE({**LETTERS, **options.pop("more", {})}, options.pop("merges", []), **options))


def merged(pieces):
    """Merges that build a text from its characters, and their results."""
    whole, merges, more = pieces[0], [], {}
    for piece in pieces[1:]:
        merges.append((whole, piece))
        whole += piece
        more[whole] = LETTERS.get(whole, len(LETTERS) + len(more))
    return {"merges": merges, "more": more}


def added(tokenizer, content="<|end|>", **flags):
    tokenizer.add_tokens([AddedToken(content, **{"special": False, "normalized": False, **flags})])
    return tokenizer


def lower(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def words():
    vocabulary = {"<unk>": 0, "<|end|>": 1, "say": 2, "now": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def unigrams():
    pieces = [("<unk>", 0.0), ("<|end|>", -1.0), *((c, -5.0) for c in LETTERS if len(c) == 1)]
    return Tokenizer(models.Unigram(pieces, unk_id=0))


def bytes_of(merges):
    """A byte-level tokenizer with ends in characters of several bytes."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = "".join(t for t, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("<｜é｜>"))
    vocabulary = {c: i for i, c in enumerate(symbols)}
    pairs, whole = [], end[0]
    for c in end[1:] if merges else ():
        pairs.append((whole, c))
        whole += c
        vocabulary[whole] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    return tokenizer, end


def found_in_file():
    """A tokenizer.json with two contents for the id of the end."""
    content = json.loads(added(characters(unk_token="<unk>")).to_str())
    content["added_tokens"].append({**content["added_tokens"][0], "content": "now"})
    return Tokenizer.from_str(json.dumps(content))


CASES = {
    "added, not special": (added(characters(unk_token="<unk>")), "<|end|>"),
    "absorbs spaces": (added(characters(unk_token="<unk>"), rstrip=True, lstrip=True), "<|end|>"),
    "normalized": (lower(added(characters(unk_token="<unk>"), "<|END|>", normalized=True)), "<|END|>"),
    "another content": (found_in_file(), "<|end|>"),
    "merged": (characters(unk_token="<unk>", **merged(list("<|end|>"))), "<|end|>"),
    "merged and special": (
        added(characters(unk_token="<unk>", **merged(list("<|end|>"))), special=True),
        "<|end|>",
    ),
    "a whole word": (characters(unk_token="<unk>", ignore_merges=True), "<|end|>"),
    "a word": (words(), "<|end|>"),
    "a unigram": (unigrams(), "<|end|>"),
    "one character": (characters(unk_token="<unk>"), "\n"),
    "byte level": bytes_of(merges=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_document_does_not_contain_its_end(name, tmp_path):
    original, end = CASES[name]
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    save_tokenizer(tokenizer, tmp_path / "saved")
    again = load_saved_tokenizer(tmp_path / "saved")
    readable = "<｜é｜>" if name == "byte level" else end
    assert tokenizer.eos_id in original.encode(readable).ids
    for text in (TEXT, f"a{readable}b{readable.lower()}", readable, "now"):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids and len(ids)
        np.testing.assert_array_equal(again.encode(text), ids)
        if name in ("added, not special", "absorbs spaces", "merged", "merged and special", "a unigram"):
            assert "".join(original.id_to_token(i) for i in ids) == text
    assert tokenizer.encode("say").tolist() == original.encode("say").ids


def test_an_end_that_stands_for_unknown_characters_is_refused_where_it_occurs(tmp_path):
    characters(unk_token="<|end|>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.eos_id not in tokenizer.encode("say <|end|> now")
    with pytest.raises(DataError, match="as the end of a document .*: 'ünd'. Give it an unknown token"):
        tokenizer.encode("ünd")


def test_a_prepared_corpus_has_an_end_for_each_document(tmp_path, capsys):
    CASES["added, not special"][0].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "c.jsonl").write_text('{"text": "say <|end|> now"}\n{"text": "bye"}\n')
    given = [f"--source=jsonl:{tmp_path}/c.jsonl", f"--tokenizer=hf:{tmp_path}", f"--out={tmp_path}/out", "--workers=1"]
    assert main(given) == 0
    prepared = open_prepared(tmp_path / "out")
    tokens = np.concatenate([prepared.tokens(split, 0, 10**6) for split in SPLITS])
    assert (tokens == prepared.tokenizer.eos_id).sum() == sum(prepared.metadata.documents.values()) == 2


def gguf_fields(kind, end_type):
    from test_data_gguf_tokenizer import fields

    given = fields(kind)
    types, eos = given["tokenizer.ggml.token_type"], given["tokenizer.ggml.eos_token_id"]
    given["tokenizer.ggml.tokens"][eos] = "<end"  # no name that llama.cpp makes a control token
    types[eos] = end_type
    return given


@pytest.mark.parametrize("kind", ["byte_pairs", "pieces"])
@pytest.mark.parametrize("end_type", [1, 4])  # normal, user-defined
def test_the_end_in_a_gguf_file_may_be_of_any_type(kind, end_type):
    tokenizer = gguf_tokenizer(gguf_fields(kind, end_type), "tiny.gguf")
    ids = tokenizer.encode("some <end of <end")
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "some <end of <end"
    assert tokenizer.encode_prompt("<end").tolist().count(tokenizer.eos_id) == 1


def test_a_fingerprint_has_whether_the_end_of_a_document_was_special(tmp_path):
    """Tokens that the files alone give, in which the end may be, are not those of `encode`."""
    found = {}
    for special in (False, True):
        directory = tmp_path / str(special)
        directory.mkdir()
        added(characters(unk_token="<unk>"), special=special).save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        found[special] = load_tokenizer(f"hf:{directory}").fingerprint
    assert found[False].endswith("-text") and not found[True].endswith("-text")
    settings = {"tokenizer_config.json": b'{"eos_token": "<end>"}'}
    for options, normal in (({"user_defined_symbols": ["<end>"]}, True), ({"control_symbols": ["<end>"]}, False)):
        piece = SentencePieceTokenizer(sentencepiece_model(**options), Companions("sp", settings))
        assert piece.fingerprint.endswith("-text") == normal


def sentencepiece_model(**options):
    import io

    import sentencepiece

    model = io.BytesIO()
    corpus = ["hello world foo<end> bar", "the quick brown<end> and some more"] * 50
    given = {"model_type": "bpe", "vocab_size": 70, "hard_vocab_limit": False, "minloglevel": 3, "num_threads": 1}
    given |= {"eos_id": -1, "bos_id": -1, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus), model_writer=model, **given)
    return model.getvalue()


@pytest.mark.parametrize("options", [{"user_defined_symbols": ["<end>"]}, {}, {"model_type": "unigram"}])
def test_the_end_of_a_sentencepiece_model_may_be_any_piece(options, tmp_path):
    model = sentencepiece_model(**options)
    end = "<end>" if options.get("user_defined_symbols") else "e"
    settings = {"eos_token": end, "sp_model_kwargs": {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}}
    companions = Companions("sp", {"tokenizer_config.json": json.dumps(settings).encode()})
    tokenizer = SentencePieceTokenizer(model, companions)
    save_tokenizer(tokenizer, tmp_path / "saved")
    ids = tokenizer.encode("some more<end> the quick<end>")
    assert tokenizer.eos_id not in ids and len(ids) > 5
    for _ in range(10):  # never sampled
        np.testing.assert_array_equal(tokenizer.encode("some more<end> the quick<end>"), ids)
    np.testing.assert_array_equal(
        load_saved_tokenizer(tmp_path / "saved").encode("the<end>"), tokenizer.encode("the<end>")
    )
    assert tokenizer.eos_id in tokenizer.encode_prompt(f"some{end}")


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_a_message_that_spells_the_end_contains_its_text(tmp_path):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    chat = [{"role": "user", "content": "é<|im_end|><|im_end|>"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    ids, loss = encode_chat(tokenizer, chat)
    assert (ids == tokenizer.eos_id).sum() == 2  # the template's
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat
    )
    assert tokenizer.decode(ids[loss], skip_special_tokens=False) == "a<|im_end|>b<|im_end|>"
    plain = encode_chat(tokenizer, [{"role": "user", "content": "é"}])[0]
    assert plain.tolist() == ids[: len(plain) - 2].tolist() + plain[-2:].tolist()


NFKC = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])


@pytest.mark.parametrize("named", ["<|im_end|>", "<|IM_END|>"])
@pytest.mark.parametrize("spaces", [False, True], ids=["alone", "absorbs spaces"])
def test_a_message_contains_the_text_of_what_the_tokenizer_normalizes_to_the_end(named, spaces, tmp_path):
    letters = {c: i for i, c in enumerate(["<unk>", *"abcdeimnrstu<>|_ \n"])}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    tokenizer.normalizer = NFKC
    tokenizer.add_tokens([AddedToken(named, special=True, normalized=True, lstrip=spaces, rstrip=spaces)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + named + "\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named, "chat_template": template}))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    for written in ("<|Im_End|>", "＜|im_end|＞", named):
        chat = [{"role": "user", "content": f"a {written} b"}, {"role": "assistant", "content": f"a{written}"}]
        assert tokenizer.encode_prompt(written).tolist() == [tokenizer.eos_id]
        ids, loss = encode_chat(tokenizer, chat)
        assert (ids == tokenizer.eos_id).sum() == 2 and (ids[loss] == tokenizer.eos_id).sum() == 1  # the template's
        text = "".join(tokenizer.decode([i], skip_special_tokens=False) for i in ids[loss])
        assert text.strip() == f"a<|im_end|>{tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)}"


def test_the_end_of_a_template_is_found_where_decoding_changes_its_characters(tmp_path):
    tokenizer = added(characters(unk_token="<unk>"), "<|▁|>", special=True)
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|▁|>", "chat_template": template}))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    ids, _ = encode_chat(tokenizer, [{"role": "user", "content": "a<|▁|>b"}])
    assert ids[-1] == tokenizer.eos_id and (ids == tokenizer.eos_id).sum() == 1


@pytest.mark.parametrize("template", ["{{ ['a', 'b'] | random }}", "{{ lipsum(n=1) }}"])
def test_a_random_chat_template_is_refused(template, tmp_path):
    companions = Companions("t", {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()})
    with pytest.raises(DataError, match="does not accept"):
        companions.marked_chat([{"role": "user", "content": "a"}], False)


def test_byte_pairs_are_not_dropped_at_random(tmp_path):
    """`dropout` of tokenizer.json leaves out merges at random, another choice for each call."""
    whole = characters(unk_token="<unk>", **merged(list("abcdefgh")))
    for dropout, name in ((None, "plain"), (0.5, "random")):
        whole.model.dropout = dropout
        (tmp_path / name).mkdir()
        added(whole, special=True).save(str(tmp_path / name / "tokenizer.json"))
    plain, random = (load_tokenizer(f"hf:{tmp_path / name}") for name in ("plain", "random"))
    export_tokenizer(random, tmp_path / "exported")
    exported = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    save_tokenizer(random, tmp_path / "saved")
    assert load_saved_tokenizer(tmp_path / "saved").fingerprint == random.fingerprint
    text = "abcdefghabcdefgh"
    for _ in range(20):
        for ids in (random.encode(text), random.encode_prompt(text), exported.encode(text).ids):
            np.testing.assert_array_equal(ids, plain.encode(text))

"""The tokenizer of a GGUF file gives the ids of llama.cpp, and inconsistent metadata are refused."""

import copy
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from real_material import smollm2_gguf

from pe_lab.data.tokenizers import export_tokenizer, load_saved_tokenizer, load_tokenizer, save_tokenizer
from pe_lab.data.tokenizers.gguf import PRE_TOKENIZERS, gguf_tokenizer
from pe_lab.data.tokenizers.to_gguf import gguf_metadata
from pe_lab.errors import UserError

GOLDEN = json.loads((Path(__file__).parent / "data" / "tokenizer_gguf_golden.json").read_text())
TEXTS, BYTE_PAIRS, PIECES = GOLDEN["texts"], GOLDEN["byte_pairs"], GOLDEN["pieces"]


def fields(kind="byte_pairs", **changes):
    return {f"tokenizer.ggml.{k}": v for k, v in {**copy.deepcopy(GOLDEN[kind]), **changes}.items()}


def digest(ids):
    return hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()[:12]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_splits_as_llama_cpp(pre):
    tokenizer = gguf_tokenizer(fields(pre=pre), "tiny.gguf")
    golden = GOLDEN["pre"][pre]
    for text, prompt, document in zip(TEXTS, golden["prompts"], golden["documents"], strict=True):
        if text:  # the golden file has no ids of llama.cpp for it
            assert digest(tokenizer.encode_prompt(text)) == prompt, text
            assert digest(tokenizer.encode(text)) == document, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode_prompt(text, add_special_tokens=False), False) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores_give_the_ids_of_llama_cpp(prefix):
    changes = {"add_space_prefix": prefix, "add_bos_token": prefix, "add_eos_token": not prefix}
    tokenizer = gguf_tokenizer(fields("pieces", **changes), "tiny.gguf")
    golden = GOLDEN["spm"][str(prefix).lower()]
    for text, prompt, document in zip(TEXTS, golden["prompts"], golden["documents"], strict=True):
        if text:
            assert tokenizer.encode_prompt(text).tolist() == prompt, text
            assert tokenizer.encode(text).tolist() == document, text
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")  # the sign for a space


def test_a_saved_and_an_exported_one_give_the_same_ids(tmp_path):
    for kind, stops in (("byte_pairs", ("<|im_end|>", "<|endoftext|>", "</s>")), ("pieces", ("</s>", "<|im_end|>"))):
        changes = {"pre": "smollm", "add_bos_token": True, "eot_token_id": 2}
        given = fields(kind, **changes) | {"tokenizer.chat_template": "{{ messages[0].content }}"}
        tokenizer = gguf_tokenizer(given, "tiny.gguf")
        save_tokenizer(tokenizer, tmp_path / kind)
        again = load_saved_tokenizer(tmp_path / kind)
        for it in (tokenizer, again):
            assert it.stop_ids == tuple(GOLDEN[kind]["tokens"].index(name) for name in stops)
            assert it.chat([{"role": "user", "content": "Hi"}]) == "Hi"
        export_tokenizer(tokenizer, tmp_path / f"{kind}-out")
        exported = load_tokenizer(f"hf:{tmp_path}/{kind}-out")
        for text in TEXTS:
            np.testing.assert_array_equal(again.encode_prompt(text), tokenizer.encode_prompt(text))
            np.testing.assert_array_equal(exported.encode_prompt(text), tokenizer.encode_prompt(text))


def test_a_control_token_with_the_type_of_text_is_found_in_prompts_only():
    tokens = BYTE_PAIRS["tokens"]
    types = [1 if token == "<|im_end|>" else kind for token, kind in zip(tokens, BYTE_PAIRS["token_type"], strict=True)]
    tokenizer = gguf_tokenizer(fields(token_type=types), "tiny.gguf")
    assert tokenizer.encode_prompt("<|im_end|>").tolist() == [2]
    assert len(tokenizer.encode("<|im_end|>")) > 1


def test_added_tokens_of_phi_3_absorb_spaces():
    given = fields("pieces", add_bos_token=False)
    plain = gguf_tokenizer(given, "tiny.gguf").encode_prompt("<|im_end|>  \n Hi").tolist()
    eaten = gguf_tokenizer(given | {"general.name": "Phi-3 mini"}, "tiny.gguf").encode_prompt("<|im_end|>  \n Hi")
    assert eaten.tolist() == gguf_tokenizer(given, "tiny.gguf").encode_prompt("<|im_end|>Hi").tolist() != plain


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("byte_pairs", {"model": None}, "tokenizer.ggml.model is missing"),
        ("byte_pairs", {"model": "bert"}, "kind 'bert'. Known are gpt2"),
        ("byte_pairs", {"pre": "runes"}, "'runes' .*not known here. Known are .*smollm"),
        ("byte_pairs", {"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ("byte_pairs", {"tokens": "abc"}, "tokenizer.ggml.tokens is a str"),
        ("byte_pairs", {"token_type": BYTE_PAIRS["token_type"][:-1]}, "but .* token types"),
        ("byte_pairs", {"token_type": [9, *BYTE_PAIRS["token_type"][1:]]}, "of type 9"),
        ("byte_pairs", {"tokens": [*BYTE_PAIRS["tokens"][:-1], "<s>"]}, "'<s>' is listed twice"),
        ("byte_pairs", {"merges": None}, "tokenizer.ggml.merges is missing"),
        ("byte_pairs", {"merges": ["a never"]}, "the merge 'a never' names 'never'"),
        ("byte_pairs", {"merges": ["ab"]}, "the merge 'ab' is not two symbols"),
        ("byte_pairs", {"eos_token_id": None}, "eos_token_id is missing"),
        ("byte_pairs", {"eos_token_id": 10**6}, "eos_token_id is 1000000, and there are"),
        ("byte_pairs", {"bos_token_id": None, "add_bos_token": True}, "there is no bos_token_id"),
        ("pieces", {"scores": PIECES["scores"][:-1]}, "but .* scores"),
        ("byte_pairs", {"tokens": [1, *BYTE_PAIRS["tokens"][1:]]}, "a token is not a string"),
        ("byte_pairs", {"bos_token_id": "<s>"}, "bos_token_id is <s>"),
        (
            "pieces",
            {"token_type": [1 if t == 6 else t for t in PIECES["token_type"][:9]] + PIECES["token_type"][9:]},
            "are bytes",
        ),
        ("pieces", {"scores": None}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_inconsistent_metadata_are_refused(kind, changes, says):
    given = {k: v for k, v in fields(kind, **changes).items() if v is not None}
    with pytest.raises(UserError, match=f"tiny.gguf.*(?:{says})"):
        gguf_tokenizer(given, "tiny.gguf")


def write_gguf(path, given):
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in given.items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_file_is_read_and_a_damaged_one_refused(tmp_path):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, fields(pre="smollm"))
    ids = load_tokenizer(f"gguf:{whole}").encode_prompt(TEXTS[5])
    np.testing.assert_array_equal(ids, gguf_tokenizer(fields(pre="smollm"), "tiny.gguf").encode_prompt(TEXTS[5]))
    for keep in (0, 3, 20, 300, whole.stat().st_size - 5):
        (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:keep])
        with pytest.raises(UserError, match="cut.gguf"):
            load_tokenizer(f"gguf:{tmp_path}/cut.gguf")
    with pytest.raises(UserError, match="There is no GGUF file .*none.gguf"):
        load_tokenizer(f"gguf:{tmp_path}/none.gguf")


@pytest.mark.slow
def test_smollm2_gives_the_ids_of_llama_cpp(tmp_path):
    tokenizer = load_tokenizer(f"gguf:{smollm2_gguf()}")
    golden = GOLDEN["smollm2"]
    for text, prompt, document in zip(TEXTS, golden["prompts"], golden["documents"], strict=True):
        assert tokenizer.encode_prompt(text).tolist() == prompt, text
        assert tokenizer.encode(text).tolist() == document, text
        assert tokenizer.decode(document) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.stop_ids) == (49152, 2, (2, 0))
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_saved_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint
    chat = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_prompt(chat)[0] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Written (tests/test_gguf_out.py has llama.cpp read what is written)

HF = json.loads((Path(__file__).parent / "data" / "tokenizer_hf_golden.json").read_text())
SPLITS = {  # as tokenizer.json of published models have them
    "gpt-2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
    "qwen2": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                    r"\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    },
}


def tokenizer_of(directory, name="llama3", **changes):
    """A tokenizer.json of the golden file, with other parts; `ignore_merges` is its model's."""
    directory.mkdir()
    for file, text in HF[name]["files"].items():
        (directory / file).write_text(text, encoding="utf-8")
    content = json.loads(HF[name]["files"]["tokenizer.json"])
    content["model"]["ignore_merges"] = changes.pop("ignore_merges", content["model"].get("ignore_merges", False))
    (directory / "tokenizer.json").write_text(json.dumps(content | changes))
    return load_tokenizer(f"hf:{directory}")


@pytest.mark.parametrize("pre", SPLITS)
def test_the_name_of_the_splits_is_found_by_what_they_split(pre, tmp_path):
    tokenizer = tokenizer_of(tmp_path / "in", pre_tokenizer=SPLITS[pre], ignore_merges=False)
    metadata, notes = gguf_metadata(tokenizer, tokenizer.vocab_size + 5, "model")
    assert metadata["tokenizer.ggml.pre"] == pre and not notes
    assert len(metadata["tokenizer.ggml.tokens"]) == tokenizer.vocab_size + 5
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{tokenizer.vocab_size + 4}]"
    read = gguf_tokenizer(metadata, "tiny.gguf")
    for text in TEXTS:
        assert read.encode(text).tolist() == tokenizer.encode(text).tolist(), text
        assert read.encode_prompt(text).tolist() == tokenizer.encode_prompt(text).tolist(), text


def test_a_normal_form_is_a_message_and_other_forms_are_refused(tmp_path):
    changes = {"pre_tokenizer": SPLITS["qwen2"], "ignore_merges": False}
    tokenizer = tokenizer_of(tmp_path / "nfc", normalizer={"type": "NFC"}, **changes)
    _, notes = gguf_metadata(tokenizer, tokenizer.vocab_size, "model")
    assert notes == ("llama.cpp does not normalize a text to NFC: one in another form gets other ids there.",)
    tokenizer = tokenizer_of(tmp_path / "lower", normalizer={"type": "Lowercase"}, **changes)
    with pytest.raises(UserError, match="it normalizes a text .Lowercase., which llama.cpp does not.*--tokenizer=none"):
        gguf_metadata(tokenizer, tokenizer.vocab_size, "model")


def test_what_llama_cpp_would_split_or_merge_otherwise_is_refused(tmp_path):
    refused = {
        "whitespace": ({"pre_tokenizer": {"type": "Whitespace"}}, "splits a text before it merges as none of"),
        "unigram": ({"name": "unigram"}, "no tokenizer of kind Unigram"),
        "prefix": ({"pre_tokenizer": SPLITS["gpt-2"] | {"add_prefix_space": True}}, "as none of the pre-tokenizers"),
    }
    for name, (changes, message) in refused.items():
        tokenizer = tokenizer_of(tmp_path / name, **changes)
        with pytest.raises(UserError, match=f"{name}.* cannot be written into a GGUF file: .*{message}"):
            gguf_metadata(tokenizer, tokenizer.vocab_size, "model")


def test_the_tokenizer_of_a_gguf_file_goes_back_as_it_was():
    for kind in ("byte_pairs", "pieces"):
        given = fields(kind, add_bos_token=True) | ({"tokenizer.ggml.pre": "smollm"} if kind == "byte_pairs" else {})
        given["tokenizer.chat_template"] = "{{ messages[0].content }}"
        tokenizer = gguf_tokenizer(given, "tiny.gguf")
        written, _ = gguf_metadata(tokenizer, len(GOLDEN[kind]["tokens"]), "model")
        for key in ("model", "tokens", "merges", "scores", "pre", "eos_token_id", "bos_token_id", "add_bos_token"):
            if f"tokenizer.ggml.{key}" in given:
                assert written[f"tokenizer.ggml.{key}"] == given[f"tokenizer.ggml.{key}"], (kind, key)
        assert written["tokenizer.chat_template"] == "{{ messages[0].content }}"
        assert gguf_tokenizer(written, "tiny.gguf").fingerprint == tokenizer.fingerprint


def test_bytes_are_written_where_an_embedding_is_left():
    metadata, _ = gguf_metadata(load_tokenizer("bytes"), 384, "model")
    read = gguf_tokenizer(metadata, "tiny.gguf")
    for text in TEXTS:
        assert read.encode(text).tolist() == list(text.encode())
    with pytest.raises(UserError, match="no embedding is left for its result"):
        gguf_metadata(load_tokenizer("bytes"), 257, "model")

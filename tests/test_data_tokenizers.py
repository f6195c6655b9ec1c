"""Every tokenizer gives a text back, knows its end of document, and survives being saved."""

import json
import shutil

import numpy as np
import pytest

from pe_lab.config import UserError
from pe_lab.data.tokenizers import (
    KIND_FILE,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)

TEXT = "def f(x):\n\treturn  x  # naïve ☃\n\n    äöü 12345\n  "
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"]
CORPUS = [
    f"def {a}_{b}({c}):\n    return {a} + {i}  # número {b} {c}\n"
    for i, (a, b, c) in enumerate((a, b, c) for a in WORDS for b in WORDS[:7] for c in WORDS[-5:])
]


def hugging_face(path, special=("<|endoftext|>",), configuration=None):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    if configuration is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(configuration))
    return f"hf:{path}/tokenizer.json"


@pytest.fixture(scope="module", params=["bytes", "hf", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    if request.param == "hf":
        return load_tokenizer(hugging_face(tmp_path_factory.mktemp("hf")))
    if request.param == "sentencepiece":
        return train_sentencepiece(CORPUS, 400, "corpus")
    return load_tokenizer("bytes")


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n", "a\0b", "<|endoftext|></s>", "日本語"])
def test_a_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids  # no document can end itself
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_a_batch_encodes_as_its_texts_do(tokenizer):
    texts = [TEXT, "", *CORPUS[:3]]
    for together, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(together, tokenizer.encode(text))


def test_a_saved_tokenizer_can_be_copied_and_read_again(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "checkpoint" / "tokenizer")
    again = load_saved_tokenizer(tmp_path / "checkpoint" / "tokenizer")
    assert (again.fingerprint, again.vocab_size, again.eos_id) == (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eos_id,
    )
    np.testing.assert_array_equal(again.encode(TEXT), tokenizer.encode(TEXT))


def test_another_tokenizer_in_its_place_is_noticed(tmp_path):
    save_tokenizer(train_sentencepiece(CORPUS, 400, "corpus"), tmp_path / "a")
    save_tokenizer(train_sentencepiece(CORPUS, 380, "corpus"), tmp_path / "b")
    (tmp_path / "a" / "tokenizer.model").write_bytes((tmp_path / "b" / "tokenizer.model").read_bytes())
    with pytest.raises(UserError, match="not the one that was saved"):
        load_saved_tokenizer(tmp_path / "a")


def test_training_is_deterministic_and_keeps_to_its_size():
    first, second = (train_sentencepiece(iter(CORPUS), 400, "corpus") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 400
    assert len(first.encode(CORPUS[0])) < len(CORPUS[0]) / 3  # it did learn something
    assert first.fingerprint != train_sentencepiece(CORPUS, 401, "corpus").fingerprint


def test_the_end_of_document_of_a_hugging_face_tokenizer(tmp_path):
    special = ("<pad>", "<stop>", "</s>")
    for name, configuration, eos in [
        ("named", {"eos_token": "<stop>"}, "<stop>"),
        ("spelled", {"eos_token": {"content": "<stop>", "lstrip": False}}, "<stop>"),
        ("common", None, "</s>"),
        ("silent", {"model_max_length": 3}, "</s>"),
    ]:
        found = load_tokenizer(hugging_face(tmp_path / name, special, configuration))
        assert found.eos_id == special.index(eos), name
    assert load_tokenizer(hugging_face(tmp_path / "only", ("<the-end>",))).eos_id == 0
    assert load_tokenizer(f"hf:{tmp_path / 'only'}").eos_id == 0  # a directory holds a tokenizer.json


@pytest.mark.parametrize(
    ("special", "configuration", "says"),
    [
        (("<pad>", "<unk>"), None, "<pad>, <unk>"),
        (("<pad>",), {"eos_token": "<gone>"}, "'<gone>'"),
        (("</s>",), ["not an object"], "tokenizer_config.json"),
    ],
)
def test_no_end_of_document_is_an_error(tmp_path, special, configuration, says):
    with pytest.raises(UserError, match=says):
        load_tokenizer(hugging_face(tmp_path / "t", special, configuration))


def test_bad_tokenizers_are_named(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    for specification, says in [
        (f"hf:{tmp_path}/bad.json", "bad.json is not a Hugging Face"),
        (f"hf:{tmp_path}/none.json", "none.json"),
        (f"sentencepiece:{tmp_path}/bad.model", "bad.model is not a SentencePiece"),
        (f"sentencepiece:{tmp_path}/none.model", "none.model"),
        ("word", "'word' is not a tokenizer"),
        ("hf:", "'hf:' is not a tokenizer"),
    ]:
        with pytest.raises(UserError, match=says):
            load_tokenizer(specification)
    for size in ("big", "12", "-400", ""):
        with pytest.raises(UserError, match="SIZE"):
            training_size(f"sentencepiece:train:{size}")
    with pytest.raises(UserError, match="'few' has too little text .* at most"):
        train_sentencepiece(["only this"], 5000, "few")
    with pytest.raises(UserError, match="'none' is empty"):
        train_sentencepiece([], 400, "none")


def test_a_saved_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no saved tokenizer"):
        load_saved_tokenizer(tmp_path)
    (tmp_path / KIND_FILE).write_text(json.dumps({"kind": "runes", "fingerprint": "x"}))
    with pytest.raises(UserError, match="'runes'"):
        load_saved_tokenizer(tmp_path)


def test_a_sentencepiece_model_without_an_end(tmp_path):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=100, eos_id=-1, minloglevel=3
    )
    (tmp_path / "endless.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match="endless.model has no end-of-sentence"):
        load_tokenizer(f"sentencepiece:{tmp_path}/endless.model")

"""Tokenizers: decoding inverts encoding, special tokens, saving, export, and the ids of the originals."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_material import smollm2_gguf
from transformers_environments import environment

from pe_lab.data.tokenizers import (
    KIND_FILE,
    check_vocabulary,
    export_tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)
from pe_lab.data.tokenizers.companions import AddedToken, Companions, split_at_tokens
from pe_lab.data.tokenizers.tokenizer import DIFFICULT
from pe_lab.errors import DataError, UserError

TEXT = "def f(x):\n\treturn  x  # naïve ☃\n\n    äöü 12345\n  "
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda"]
DATA = Path(__file__).parent / "data"
HF_GOLDEN = json.loads((DATA / "tokenizer_hf_golden.json").read_text())
SP_GOLDEN = json.loads((DATA / "tokenizer_sentencepiece_golden.json").read_text())
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
def test_decoding_inverts_encoding(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids  # a document cannot contain the end of a document
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


def test_the_fingerprints_in_prepared_data_stay(tmp_path):
    (tmp_path / "llama.model").write_bytes(base64.b64decode(SP_GOLDEN["llama"]["model"]))
    # Made by the code that prepared the first data (a85be67).
    assert load_tokenizer("bytes").fingerprint == "bytes-257"
    assert load_tokenizer(f"sentencepiece:{tmp_path}/llama.model").fingerprint == "sentencepiece-ad35c81153027f38"
    assert style(tmp_path, "llama3").fingerprint == "hf-1-c154545b4eb82e0f"


def test_a_replaced_tokenizer_is_refused(tmp_path):
    save_tokenizer(train_sentencepiece(CORPUS, 400, "corpus"), tmp_path / "a")
    save_tokenizer(train_sentencepiece(CORPUS, 380, "corpus"), tmp_path / "b")
    (tmp_path / "a" / "tokenizer.model").write_bytes((tmp_path / "b" / "tokenizer.model").read_bytes())
    with pytest.raises(UserError, match="not the one that was saved"):
        load_saved_tokenizer(tmp_path / "a")


def test_training_is_deterministic_and_keeps_to_its_size():
    first, second = (train_sentencepiece(iter(CORPUS), 400, "corpus") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 400
    assert len(first.encode(CORPUS[0])) < len(CORPUS[0]) / 3  # it has learned merges
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
    with pytest.raises(UserError, match="tokenizer on 'few': .*Vocabulary size is smaller than required_chars. 12 vs"):
        train_sentencepiece(["only this"], 12, "few")
    with pytest.raises(UserError, match="'none' is empty"):
        train_sentencepiece([], 400, "none")


def test_a_missing_saved_tokenizer(tmp_path):
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


STYLES = [name for name in HF_GOLDEN if name != "texts"]


def style(directory, name, **configuration):
    """A tokenizer of the golden file, as a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in HF_GOLDEN[name]["files"].items():
        (directory / file).write_text(text, encoding="utf-8")
    if configuration:
        written = {**json.loads(HF_GOLDEN[name]["files"]["tokenizer_config.json"]), **configuration}
        (directory / "tokenizer_config.json").write_text(json.dumps(written))
    return load_tokenizer(f"hf:{directory}")


@pytest.mark.parametrize("name", STYLES)
def test_prompts_have_the_ids_of_transformers(name, tmp_path):
    tokenizer = style(tmp_path / "in", name)
    save_tokenizer(tokenizer, tmp_path / "saved")
    export_tokenizer(tokenizer, tmp_path / "out")
    again, exported = load_saved_tokenizer(tmp_path / "saved"), load_tokenizer(f"hf:{tmp_path / 'out'}")
    for text, ids in zip(HF_GOLDEN["texts"], HF_GOLDEN[name]["prompts"], strict=True):
        for it in (tokenizer, again, exported) if ids is not None else ():  # None: transformers 4 and 5 differ
            assert it.encode_prompt(text).tolist() == ids, text
        if name in ("llama3", "flags"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        elif name == "llama2":  # for which the sign is a space
            assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")
        assert tokenizer.eos_id not in tokenizer.encode(text)  # though the model of unigrams would find it


@pytest.mark.parametrize("name", [name for name in SP_GOLDEN if name != "texts"])
def test_a_sentencepiece_model_has_the_ids_of_sentencepiece_and_of_the_slow_tokenizer(name, tmp_path):
    golden, tokenizers = SP_GOLDEN[name], {}
    for label, slow in golden["slow"].items():
        directory = tmp_path / label
        directory.mkdir()
        (directory / "tokenizer.model").write_bytes(base64.b64decode(golden["model"]))
        (directory / "tokenizer_config.json").write_text(json.dumps(slow["configuration"]))
        tokenizers[label] = load_tokenizer(f"hf:{directory}")
        save_tokenizer(tokenizers[label], tmp_path / "saved" / label)
    for i, text in enumerate(SP_GOLDEN["texts"]):
        for label, tokenizer in tokenizers.items():
            again = load_saved_tokenizer(tmp_path / "saved" / label) if i == 5 else tokenizer
            assert again.encode(text).tolist() == golden["documents"][i], text
            assert again.encode_prompt(text).tolist() == golden["slow"][label]["prompts"][i], (label, text)


def test_a_sentencepiece_model_is_exported_only_if_the_ids_stay(tmp_path, monkeypatch):
    ours = train_sentencepiece(CORPUS, 400, "corpus")
    export_tokenizer(ours, tmp_path / "ours")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "tokenizer.model").write_bytes(base64.b64decode(SP_GOLDEN["llama"]["model"]))
    (tmp_path / "llama" / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    llama = load_tokenizer(f"hf:{tmp_path / 'llama'}")
    export_tokenizer(llama, tmp_path / "llama-out")
    for tokenizer, directory in ((ours, "ours"), (llama, "llama-out")):
        copy = load_tokenizer(f"hf:{tmp_path / directory}/tokenizer.json")
        for text in (*DIFFICULT, *CORPUS[:20]):
            np.testing.assert_array_equal(copy.encode_prompt(text), tokenizer.encode_prompt(text))
    # With the merges in another order the ids differ: nothing is written.
    from pe_lab.data.tokenizers import tokenizer_json

    right = tokenizer_json._merges
    monkeypatch.setattr(tokenizer_json, "_merges", lambda *given: right(*given)[::-1])
    with pytest.raises(UserError, match="cannot be written as a tokenizer.json: on .* sentencepiece"):
        export_tokenizer(ours, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@given(st.text())
@settings(max_examples=200)
def test_byte_level_tokenizers_lose_no_byte(text):
    for tokenizer in BYTE_LEVEL:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode_prompt(text, add_special_tokens=False), False) == text


@pytest.fixture(scope="module", autouse=True)
def byte_level(tmp_path_factory):
    BYTE_LEVEL[:] = [load_tokenizer("bytes"), style(tmp_path_factory.mktemp("style"), "llama3")]


BYTE_LEVEL: list = []


def test_the_end_is_found_in_a_prompt_and_not_in_a_document(tokenizer):
    end = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    assert end in ("<|endoftext|>", "</s>")
    text = f"a{end}b"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    ids = tokenizer.encode_prompt(text).tolist()
    assert ids.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text and tokenizer.decode(ids) == "ab"
    assert tokenizer.stop_ids == (tokenizer.eos_id,)


def test_bos_ids(tmp_path):
    assert [style(tmp_path / name, name).bos_id for name in STYLES] == [1, 1, None, 0, 1, None, 1]
    assert train_sentencepiece(CORPUS, 400, "corpus").bos_id is None and load_tokenizer("bytes").bos_id is None
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(SP_GOLDEN["llama"]["model"]))
    assert load_tokenizer(f"hf:{tmp_path}").bos_id == 1


def test_stop_ids(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    tokenizer = style(tmp_path, "llama3")
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (1, (1, 2))
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_saved_tokenizer(tmp_path / "saved").stop_ids == (1, 2)
    for bad in ('{"eos_token_id": "x"}', '{"eos_token_id": [-1]}', "[]", "{"):
        (tmp_path / "generation_config.json").write_text(bad)
        with pytest.raises(UserError, match="generation_config.json"):
            load_tokenizer(f"hf:{tmp_path}")


def test_a_named_token_without_an_embedding_is_text(tmp_path):
    tokenizer = style(tmp_path, "llama3", pad_token="[PAD]", additional_special_tokens=["[X]"])
    plain = style(tmp_path / "plain", "llama3")
    assert tokenizer.vocab_size == plain.vocab_size
    np.testing.assert_array_equal(tokenizer.encode_prompt("a[PAD][X]b"), plain.encode_prompt("a[PAD][X]b"))
    named = style(tmp_path / "named", "llama3", added_tokens_decoder={str(plain.vocab_size): {"content": "[PAD]"}})
    assert named.vocab_size == plain.vocab_size + 1
    assert named.encode_prompt("[PAD]").tolist() == [0, plain.vocab_size]
    assert named.decode([plain.vocab_size], skip_special_tokens=False) == "[PAD]"
    assert named.fingerprint == plain.fingerprint  # documents are encoded alike
    np.testing.assert_array_equal(named.encode("a[PAD]b"), plain.encode("a[PAD]b"))


@pytest.mark.parametrize(
    "configuration",
    [{"eos_token": 3}, {"added_tokens_decoder": {"x": {"content": "a"}}}, {"added_tokens_decoder": {"9": {}}}],
)
def test_a_configuration_that_cannot_be_read(tmp_path, configuration):
    with pytest.raises(UserError, match="tokenizer_config.json .*beside .*tokenizer.json"):
        style(tmp_path, "llama3", **configuration)


def test_a_bos_token_without_an_id(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(SP_GOLDEN["llama"]["model"]))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<gone>"}')
    with pytest.raises(UserError, match="add_bos_token, but its bos_token .*<gone>"):
        load_tokenizer(f"hf:{tmp_path}").encode_prompt("a")


def test_a_tokenizer_json_without_the_keys_that_may_be_left_out(tmp_path):
    """transformers sets add_prefix_space of a GPT-2 in the pre_tokenizer, if there is one."""
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.encode_prompt("aa").tolist() == [0, 0]
    assert "add_prefix_space" not in json.loads(tokenizer.exported_files()["tokenizer_config.json"])
    assert tokenizer.encode("a</s>").tolist() == [0]


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer.json and no tokenizer.model"):
        load_tokenizer(f"hf:{tmp_path}")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="holds vocab.json, which is not read"):
        load_tokenizer(f"hf:{tmp_path}")


def test_every_companion_file_is_saved_and_exported(tmp_path):
    files = {"special_tokens_map.json": "{}", "added_tokens.json": "{}", "generation_config.json": "{}",
             "chat_template.jinja": "x", "vocab.json": "{}", "merges.txt": "#\n", "tokenizer.model": "m"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_text("weights do not")
    tokenizer = style(tmp_path, "llama3")
    save_tokenizer(tokenizer, tmp_path / "saved")
    save_tokenizer(load_saved_tokenizer(tmp_path / "saved"), tmp_path / "again")
    export_tokenizer(tokenizer, tmp_path / "out")
    expected = {*files, "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in (tmp_path / "again").iterdir()} == {*expected, KIND_FILE}
    assert {p.name for p in (tmp_path / "out").iterdir()} == expected
    for name in [*files, "tokenizer.json"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_flags_of_tokens_in_pieces_of_text():
    tokens = {
        "<a>": AddedToken("<a>", 1),
        "<ab>": AddedToken("<ab>", 2, lstrip=True, rstrip=True),
        "w": AddedToken("w", 3, single_word=True),
    }

    def split(text):
        return [part if isinstance(part, str) else part.id for part in split_at_tokens(text, tokens)]

    assert split("x <ab> y<a> z") == ["x", 2, "y", 1, " z"]
    assert split("w ww xw wx w") == [3, " ", "ww", " xw", " ", "wx ", 3]
    assert split("") == [] and split("<a><a>") == [1, 1]


MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi <é>"}]


def test_a_chat_as_transformers_renders_it(tmp_path):
    template = """{%- if tools %}no{% endif -%}
    {% for m in messages %}
        {% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}
        {% if loop.first %}{% continue %}{% endif %}
{{ bos_token }}[{{ m.role }}]{% generation %}{{ m.content | tojson }}{% endgeneration %}
    {% endfor %}
{% if add_generation_prompt %}[assistant]{{ extra or '' }}{% endif %}{{ strftime_now('%%') }}"""
    tokenizer = style(tmp_path, "llama3", chat_template=template)
    # The line end after a block goes, the one after a value stays (trim_blocks).
    assert tokenizer.chat(MESSAGES) == '<|begin_of_text|>[user]"Hi <é>"[assistant]%'
    assert tokenizer.chat(MESSAGES, False) == '<|begin_of_text|>[user]"Hi <é>"%'
    assert tokenizer.chat(MESSAGES, extra="!").endswith("[assistant]!%")
    with pytest.raises(UserError, match="no bad"):
        tokenizer.chat([{"role": "bad", "content": ""}])
    for bad in ([{"content": "a"}], [{}]):
        with pytest.raises(UserError, match="Message 0 of the chat"):
            tokenizer.chat(bad)
    (tmp_path / "chat_template.jinja").write_text("from the file")  # comes before the configuration's
    assert load_tokenizer(f"hf:{tmp_path}").chat(MESSAGES) == "from the file"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert style(tmp_path / "several", "llama3", chat_template=several).chat(MESSAGES) == "d"
    with pytest.raises(UserError, match="has no chat template"):
        style(tmp_path / "none", "llama3").chat(MESSAGES)
    with pytest.raises(UserError, match="bytes has no chat template"):
        load_tokenizer("bytes").chat(MESSAGES)


def rendered(template):
    return Companions("x", {"chat_template.jinja": template.encode()}).marked_chat(MESSAGES, False)[0]


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ a.b.c }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_refused(template):
    with pytest.raises(UserError, match="The chat template of x"):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ '(' * 3 }}{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "Error"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**11 }}", "it needs more than 1024 MiB"),
        ("{{ [1] * 10**11 }}", "it needs more than 1024 MiB"),
        ("{{ 'a'.center(10**11) }}", "it needs more than 1024 MiB"),
        ("{{ 'a' * 10**8 }}", "it renders 100,000,000 characters"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% break %}", "SyntaxError"),
        pytest.param(  # 5 s of a processor each
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "it does not end within 5 seconds",
            marks=pytest.mark.slow,
        ),
        pytest.param("{{ 7 ** (9 ** 9) }}", "it does not end within 5 seconds", marks=pytest.mark.slow),
    ],
)
def test_a_template_is_bounded_in_time_and_memory(template, why):
    with pytest.raises(DataError, match=f"The chat template of x does not accept these messages: .*{why}"):
        rendered(template)
    # The next one is rendered.
    assert rendered("{{ messages[0].role }}") == MESSAGES[0]["role"]


IGNORED = """
import signal

signal.signal(signal.SIGPROF, signal.SIG_IGN)
from pe_lab.data.tokenizers.chat_templates import render

render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {})
"""


@pytest.mark.slow
def test_a_template_is_bounded_where_the_signal_is_ignored_by_the_parent():
    """10 s. A worker of pytest that has loaded a TPU's compiler ignores SIGPROF, and gets it."""
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True)
    assert "it does not end within 5 seconds" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "value", [[1], ["a"], [{"name": "rag", "template": "t"}], [{"name": "default", "template": 1}]]
)
def test_lists_of_templates_without_a_default_are_refused(tmp_path, value):
    with pytest.raises(DataError, match="tokenizer_config.json beside"):
        style(tmp_path, "llama3", chat_template=value).chat(MESSAGES)


def test_without_jinja2_the_message_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"pip install 'pe-lab\[chat\]'"):
        rendered("x")


def test_a_tokenizer_with_another_vocabulary(tokenizer):
    check_vocabulary(tokenizer, tokenizer.vocab_size, "m")
    check_vocabulary(tokenizer, tokenizer.vocab_size + 100, "m")  # padded
    with pytest.raises(UserError, match=f"m has {tokenizer.vocab_size - 1} embeddings"):
        check_vocabulary(tokenizer, tokenizer.vocab_size - 1, "m")


READ = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps([transformers.__version__, [tokenizer(text)["input_ids"] for text in json.load(sys.stdin)]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.56", "5"])
def test_transformers_gives_the_ids_of_an_exported_tokenizer(version, tmp_path):
    python = environment(version)
    made = {
        "bytes": load_tokenizer("bytes"),
        "trained": train_sentencepiece(CORPUS, 400, "corpus"),
        "smollm2": load_tokenizer(f"gguf:{smollm2_gguf()}"),
        **{name: style(tmp_path / "in" / name, name) for name in STYLES},
    }
    for name, tokenizer in made.items():
        export_tokenizer(tokenizer, tmp_path / name)
        command = [str(python), "-c", READ, str(tmp_path / name)]
        done = subprocess.run(command, input=json.dumps(DIFFICULT), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        read_by, ids = json.loads(done.stdout.strip().splitlines()[-1])
        assert read_by.startswith(version)
        for text, theirs in zip(DIFFICULT, ids, strict=True):
            assert tokenizer.encode_prompt(text).tolist() == theirs, (name, text)

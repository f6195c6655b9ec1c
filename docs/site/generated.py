"""Generated pages of the site: the commands with their help, the keys of a config, the Python functions and classes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
from pathlib import Path
from types import ModuleType

from pages import ROOT

# The Python interface: a page for each, of the packages and modules that define what is documented.
API = {
    "pe_lab": ("Models", ["pe_lab.language_model"]),
    "positional": ("Positional encodings", ["pe_lab.positional"]),
    "attention": ("Attention", ["pe_lab.attention"]),
    "model": ("The decoder", ["pe_lab.model"]),
    "data": (
        "Data",
        ["pe_lab.data.sources", "pe_lab.data.tokenizers", "pe_lab.data.preparation", "pe_lab.data.shards",
         "pe_lab.data.grain_data", "pe_lab.data.windows", "pe_lab.data.mixture", "pe_lab.data.pipeline"],
    ),
    "training": (
        "Training",
        ["pe_lab.training.fit", "pe_lab.training.plan", "pe_lab.training.run", "pe_lab.training.loop",
         "pe_lab.training.evaluators", "pe_lab.training.step", "pe_lab.training.optimizer", "pe_lab.recipes"],
    ),
    "checkpoints": ("Checkpoints", ["pe_lab.checkpoints", "pe_lab.checkpoints.surgery"]),
    "evaluation": (
        "Evaluation",
        ["pe_lab.evaluation.suite", "pe_lab.evaluation.measure", "pe_lab.evaluation.variants",
         "pe_lab.evaluation.generation.tasks", "pe_lab.evaluation.live"],
    ),
    "analysis": (
        "Analysis",
        ["pe_lab.analysis.frequency_use", "pe_lab.analysis.heads", "pe_lab.analysis.logit_bounds",
         "pe_lab.analysis.head_entropy", "pe_lab.analysis.chosen_heads", "pe_lab.analysis.positional_bias",
         "pe_lab.analysis.layers",
         "pe_lab.analysis.knock_out", "pe_lab.analysis.coordinates", "pe_lab.analysis.analysis"],
    ),
    "results": (
        "Results",
        ["pe_lab.results.records", "pe_lab.results.table", "pe_lab.results.scores", "pe_lab.results.statistics"],
    ),
    "errors": ("Errors", ["pe_lab.errors"]),
}  # fmt: skip


def all_pages() -> dict[str, str]:
    """The generated pages by path below the source of the site."""
    made = {"reference/commands.md": commands(), "reference/analyses.md": analyses(), "reference/config.md": config()}
    made["reference/api.md"] = _api_index()
    for name, (title, modules) in API.items():
        made[f"reference/api/{name}.md"] = _api(title, modules)
    return made


def _help(command: str, *argv: str) -> str:
    out = io.StringIO()
    os.environ["COLUMNS"] = "88"
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(f"pe_lab.{command}").main([*argv, "--help"])
    assert out.getvalue(), f"pe_lab.{command} --help prints nothing"
    return f"```text\n{out.getvalue().rstrip()}\n```\n"


def commands() -> str:
    """A section for each command: what it does, and its help."""
    from pe_lab.__main__ import COMMANDS, summary

    parts = ["# Commands\n", "`pe_lab COMMAND` and `python -m pe_lab.COMMAND` are the same.\n"]
    for name in COMMANDS:
        parts.append(f"## {name}\n\n{summary(name)[:1].upper()}{summary(name)[1:]}\n\n{_help(name)}")
    return "\n".join(parts)


def analyses() -> str:
    """A section for each analysis of `pe_lab.analyze`, with its options."""
    from pe_lab.analyze import ANALYSES

    parts = ["# Analyses\n", "`python -m pe_lab.analyze NAME`: what each analysis takes.\n"]
    for name, summary in ANALYSES.items():
        parts.append(f"## {name}\n\n{summary[:1].upper()}{summary[1:]}.\n\n")
        parts.append(_help("analyze", f"{name}"))
    return "\n".join(parts)


def config() -> str:
    """A table of the keys of each part of a config, from the source: type, default, bounds and comment."""
    path = ROOT / "pe_lab/config.py"
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    parts = [
        "# Keys of a config\n",
        "A recipe sets them, and so does the command line: `--config.model.layers=4`, `--config.phases.0.steps=100`.\n",
    ]
    for node in ast.parse(text).body:
        fields = [one for one in getattr(node, "body", []) if isinstance(one, ast.AnnAssign)]
        if not isinstance(node, ast.ClassDef) or not fields:
            continue
        parts.append(f"## {node.name}\n\n{ast.get_docstring(node)}\n")
        parts.append("| key | type | default | |\n|---|---|---|---|")
        for one in fields:
            comment = lines[one.end_lineno - 1][one.end_col_offset :].partition("#")[2].strip()
            default, bounds = _default(one.value)
            more = "; ".join(filter(None, [comment, bounds]))
            cells = [f"`{one.target.id}`", f"`{ast.unparse(one.annotation)}`", f"`{default}`", more]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _default(value: ast.expr | None) -> tuple[str, str]:
    """A field's default as it is written, and its bounds in words; it may have none."""
    if value is None:
        return "none: it must be given", ""
    if not isinstance(value, ast.Call):
        return ast.unparse(value), ""
    if ast.unparse(value.func) == "field":
        given = [one.value for one in value.keywords if one.arg == "default"]
        return ast.unparse(given[0]) if given else "{}", ""
    if ast.unparse(value.func) != "number":
        return ast.unparse(value), ""
    from pe_lab.config import INT32, SEED

    least, most = (eval(ast.unparse(one), {"INT32": INT32, "SEED": SEED}) for one in value.args[1:])
    return ast.unparse(value.args[0]), f"{least:,} to {most:,}" if most < 10**15 else f"at least {least:,}"


def public(module: ModuleType) -> list[str]:
    """Names that a module defines or a package exports, in the order of the source."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    package = Path(module.__file__).name == "__init__.py"
    found = []
    for name in names:
        value = getattr(module, name)
        home = getattr(value, "__module__", "")
        documented = (inspect.isclass(value) or inspect.isroutine(value)) and (inspect.getdoc(value) or "")
        if documented and (home.startswith(module.__name__) if package else home == module.__name__):
            found.append(name)
    return found


def _api_index() -> str:
    listed = "\n".join(f"api/{name}" for name in API)
    return f"# Python interface\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"


def _api(title: str, modules: list[str]) -> str:
    """A page with every public function and class of some modules."""
    parts = [f"# {title}\n"]
    for name in modules:
        module = importlib.import_module(name)
        first = (inspect.getdoc(module) or "").partition("\n")[0]
        parts.append(f"## {name}\n\n{first}\n\n```{{eval-rst}}")
        for one in public(module):
            value = getattr(module, one)
            kind = "class" if inspect.isclass(value) else "function"
            if kind == "class" and issubclass(value, BaseException):
                kind = "exception"
            parts.append(f".. auto{kind}:: {name}.{one}" + ("\n   :members:\n" if kind == "class" else "\n"))
        parts.append("```\n")
    return "\n".join(parts)

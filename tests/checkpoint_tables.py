"""The tables of docs/checkpoints.md: every family in and out, every edit out, each measured where it matters.

PE_LAB_WRITE_DOCS=1 python -m pytest -m slow tests/test_checkpoint_tables.py      writes them anew
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import pe_lab
from pe_lab.checkpoints.hf_export import plan_export, write_huggingface
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.convert import main as convert
from pe_lab.errors import UnsupportedError
from pe_lab.language_model import LanguageModel
from pe_lab.positional import (
    NTK,
    PI,
    Beta,
    DynamicNTK,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    drop,
    pattern,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "checkpoints.md"
HF = Path(__file__).parent / "data" / "hf"
LIMIT = 2e-4
# Of architectures that transformers 4.56 does not have.
ONLY_IN_5 = ("gemma4", "gemma4_shared", "granite_swa", "ministral3", "olmo3")
TRAINED = 16  # tokens that the edits stretch from: far below the 40 of the stored batches


def command(*arguments: str) -> str:
    """Runs pe_lab.convert and returns what it printed; an error is one of the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = convert([*arguments, "--parity=off"])
    assert status == 0, err.getvalue()
    return out.getvalue()


def stored(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a model of tests/data/hf and the logits that transformers computed."""
    arrays = np.load(HF / name / "logits.npz")
    return arrays["tokens"], arrays["logits"]


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """All weights of a Hugging Face directory."""
    found: dict[str, np.ndarray] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same_bytes(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Whether two sets of tensors have the same names, types and bytes."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a
    )


@dataclass(frozen=True)
class Edit:
    """A model of tests/data/hf, changed, and taken out."""

    name: str
    base: str
    positional: object
    logit_scale: float | Beta | None = None
    options: tuple[str, ...] = ()

    def apply(self, lm: LanguageModel) -> LanguageModel:
        return lm.with_positional(self.positional, self.logit_scale)


_BASE = 500.0  # of the rotary models of tests/data/hf
_YARN = Rope(_BASE, scaling=Yarn(4, TRAINED))
EDITS = (
    Edit("RoPE", "llama", Rope(_BASE)),
    Edit("PI(4)", "llama", Rope(_BASE, scaling=PI(4))),
    Edit("NTK(4)", "llama", Rope(_BASE, scaling=NTK(4))),
    Edit("dynamic NTK", "llama", Rope(_BASE, scaling=DynamicNTK(TRAINED))),
    Edit("dynamic NTK at 40 tokens", "llama", Rope(_BASE, scaling=DynamicNTK(TRAINED)), options=("--length=40",)),
    Edit("NTK-by-parts(4)", "llama", Rope(_BASE, scaling=NTKByParts(4, TRAINED))),
    Edit("YaRN(4)", "llama", _YARN),
    Edit("YaRN(2.3), as a table", "llama", Rope(_BASE, scaling=Yarn(2.3, TRAINED))),
    Edit("llama3", "llama", Rope(_BASE, scaling=Llama3(4, original_length=TRAINED))),
    Edit("LongRoPE", "llama", Rope(_BASE, scaling=LongRope((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), TRAINED, 4.0))),
    Edit("p-RoPE 0.5", "llama", Rope(_BASE, 0.5)),
    Edit("partial RoPE 0.5", "llama", PartialRope(_BASE, 0.5)),
    Edit("dropped", "llama", drop()),
    Edit("dropped, as SmolLM3", "llama", drop(), options=("--family=smollm3",)),
    Edit("dropped, logits scaled by 1.3", "llama", drop(), 1.3),
    Edit("dropped, beta at 64 tokens", "llama", drop(), Beta(0.412, TRAINED), ("--length=64",)),
    Edit("dropped on the upper layer", "llama", drop([1])),
    Edit("RNoPE-SWA", "smollm3", pattern([Layer(Rope(_BASE), 8)] * 3 + [Layer(NoPE())])),
    Edit("YaRN(4) on three layers of four", "smollm3", pattern([_YARN] * 3 + [NoPE()])),
    Edit("QK-norm, RoPE", "qwen3", Rope(_BASE)),
    Edit("QK-norm, YaRN(4)", "qwen3", _YARN),
    Edit("QK-norm, dropped", "qwen3", drop()),
    Edit("QK-norm, dropped, logits scaled by 1.3", "qwen3", drop(), 1.3),
    Edit("bias, dropped", "qwen2", drop()),
    Edit("bias, dropped, logits scaled by 1.3", "qwen2", drop(), 1.3),
    Edit("Gemma, dropped", "gemma", drop()),
    Edit("GPT-NeoX, dropped", "gpt_neox", drop()),
    Edit("GPT-NeoX, YaRN(4) on partial RoPE", "gpt_neox", PartialRope(_BASE, 0.25, Yarn(4, TRAINED))),
)  # fmt: skip


# Schedules, as functions of the number of layers; the window is a fifth of the 40 tokens of the stored batches.
_FULL, _WINDOW = Rope(_BASE), 8


def _last(others: object, last: object) -> Callable[[int], list[Layer]]:
    """`last` on the last layer, and `others` before it."""
    return lambda count: [_layer(others)] * (count - 1) + [_layer(last)]


def _layer(of: object) -> Layer:
    return of if isinstance(of, Layer) else Layer(of)


def _all(of: object) -> Callable[[int], list[Layer]]:
    return lambda count: [_layer(of)] * count


_SLIDING = Layer(_FULL, _WINDOW)
SCHEDULES: dict[str, Callable[[int], list[Layer]]] = {
    "RoPE": _all(_FULL),
    "PI(4)": _all(Rope(_BASE, scaling=PI(4))),
    "NTK(4)": _all(Rope(_BASE, scaling=NTK(4))),
    "dynamic NTK": _all(Rope(_BASE, scaling=DynamicNTK(TRAINED))),
    "YaRN(4)": _all(_YARN),
    "YaRN(2.3)": _all(Rope(_BASE, scaling=Yarn(2.3, TRAINED))),
    "NTK-by-parts(4)": _all(Rope(_BASE, scaling=NTKByParts(4, TRAINED))),
    "llama3": _all(Rope(_BASE, scaling=Llama3(4, original_length=TRAINED))),
    "p-RoPE 0.5": _all(Rope(_BASE, 0.5)),
    "partial RoPE 0.5": _all(PartialRope(_BASE, 0.5)),
    "partial RoPE 0.5, YaRN(2.3)": _all(PartialRope(_BASE, 0.5, Yarn(2.3, TRAINED))),
    "dropped": _all(NoPE()),
    "dropped on the last layer": _last(_FULL, NoPE()),
    "YaRN(4), and the last layer dropped": _last(_YARN, NoPE()),
    "windows": _all(_SLIDING),
    "windows but on the last layer": _last(_SLIDING, _FULL),
    "windows without rotation": _all(Layer(NoPE(), _WINDOW)),
    "windows with RoPE, the last layer dropped (RNoPE-SWA)": _last(_SLIDING, NoPE()),
    "windows dropped, RoPE on the last layer": _last(Layer(NoPE(), _WINDOW), _FULL),
    "windows with RoPE, YaRN(4) on the last layer": _last(_SLIDING, _YARN),
    "windows with RoPE, another base on the last layer": _last(_SLIDING, Rope(5000.0)),
    "windows with RoPE, p-RoPE 0.25 on the last layer": _last(_SLIDING, Rope(5000.0, 0.25)),
    "another base on the last layer": _last(_FULL, Rope(5000.0)),
    "YaRN(4) on the last layer": _last(_FULL, _YARN),
}
# A model of tests/data/hf for each architecture that rotates.
VEHICLES = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "olmo3",
)
VEHICLES += ("exaone4", "cohere2", "granite", "granite_swa", "phi3", "starcoder2", "stablelm", "gptj", "gpt_neox")
VEHICLES += ("glm4", "falcon_7b")


def written_as(vehicle: str, layers: Sequence[Layer], directory: Path) -> Path | None:
    """A model of tests/data/hf under other encodings, exported as its own architecture; None if that is refused."""
    source = HuggingFaceSource(HF / vehicle)
    own = source.layers[0].extras
    source.layers = tuple(dataclasses.replace(layer, extras=own) for layer in layers)
    source.training_length = TRAINED
    try:
        export = plan_export(source, source.family.model_type)
    except UnsupportedError:
        return None
    directory.mkdir(parents=True)
    write_huggingface(source, export, directory)
    return directory


def edited(edit: Edit, scratch: Path) -> tuple[LanguageModel, Path, str]:
    """The edited model, the directory it was taken out to, and the architecture that says it."""
    lm = edit.apply(pe_lab.load(f"hf:{HF / edit.base}"))
    child, out = scratch / "child" / _slug(edit.name), scratch / "out" / _slug(edit.name)
    lm.save(child)
    printed = command(f"--from={child}", f"--to=hf:{out}", *edit.options)
    return lm, out, re.search(r"as (\w+),", printed)[1]


def expected(edit: Edit, lm: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """The logits that the export should give: the model's own, at the length it was fixed at."""
    if isinstance(edit.logit_scale, Beta):
        (length,) = (int(option.removeprefix("--length=")) for option in edit.options)
        lm = lm.with_positional(lm.layers, edit.logit_scale.at(length))
    return np.asarray(lm.logits(tokens))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """A difference, with the two digits that mean something."""
    return f"{value:.1e}"


def documented(name: str) -> str:
    """A table as the document has it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]


def document(name: str, content: str) -> None:
    """Puts a table into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(f"<!-- {name} -->\n")
    _, after = rest.split(f"\n<!-- end of {name} -->", 1)
    DOCUMENT.write_text(f"{before}<!-- {name} -->\n{content}\n<!-- end of {name} -->{after}", encoding="utf-8")


def without_numbers(content: str) -> str:
    """A table with its measured numbers blanked: what must not change from one machine to another."""
    return re.sub(r"\d\.\de-\d\d|\d+\.\d%", "#", content)


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def families() -> list[str]:
    """The models of tests/data/hf."""
    return sorted(path.name for path in HF.iterdir() if (path / "logits.npz").is_file())

"""The forms in which an export may be written: an architecture of transformers, and its keys of the encodings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pe_lab.checkpoints.families import FAMILIES, Family, Tensor
from pe_lab.checkpoints.hf_config import write_config
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.checkpoints.runtimes import LLAMA_CPP, RUNTIMES, fails, judge
from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.positional import Layer, Layout

# Of forms that equally many runtimes read, those of these architectures come first: they are the best known.
_FIRST = ("llama", "qwen2", "qwen3", "smollm3", "gpt_neox")
READERS = tuple(name for name in RUNTIMES if name != LLAMA_CPP)  # of such a directory; llama.cpp reads GGUF files


@dataclass(frozen=True)
class Form:
    """One form of an export.

    Attributes:
      config: the content of `config.json`.
      layout: of the heads.
      tensors: to write, in order.
    """

    family: Family
    config: dict[str, Any]
    layout: Layout
    tensors: tuple[Tensor, ...]

    @cached_property
    def reasons(self) -> dict[str, list[str]]:
        """By runtime, why it does not compute the model as it is."""
        return judge(self.config)

    def right(self, runtimes: Sequence[str]) -> list[str]:
        """Those of the runtimes that compute the model, some only with an option of their command."""
        return [name for name in runtimes if not fails(self.reasons[name])]

    def rank(self, runtimes: Sequence[str]) -> tuple[int, int]:
        """The number of runtimes that fail, and of those that need an option: less is better."""
        return len(runtimes) - len(self.right(runtimes)), sum(bool(self.reasons[name]) for name in runtimes)


def forms(model: ModelConfig, layers: Sequence[Layer], options: WriteOptions, dtype: str, family: Family) -> list[Form]:
    """The forms of a family: with the names that transformers has for scalings, and with tables.

    Raises:
      UnsupportedError: the family cannot express the model.
      ConfigError: as `write_config`.
    """
    found: list[Form] = []
    for tables in (False, True):
        try:
            config, layout = write_config(family, model, layers, replace(options, tables=tables), dtype)
            tensors = family.written_tensors(model, layers)
        except UnsupportedError:
            if not tables:
                raise
            continue
        if not found or config != found[0].config:
            found.append(Form(family, config, layout, tensors))
    return found


def choose_form(
    model: ModelConfig,
    layers: Sequence[Layer],
    options: WriteOptions,
    dtype: str,
    family: Family | None = None,
    runtimes: Sequence[str] = (),
    origin: str = "",
) -> tuple[Form, str]:
    """The form of an export, and why it was chosen; "" where the family is given.

    Args:
      layers: without logit scales.
      family: of the form; None: any that transformers has.
      runtimes: that must read it right, of `RUNTIMES`; none: as many of `READERS` as can.
      origin: the family that the weights come from. It is preferred to others: without `runtimes`, wherever it can
        express the model, and else among those that are right.

    Raises:
      UnsupportedError: no family, or not this one, can express the model, with the reason of each; or no form is right
        in all of the runtimes.
      ConfigError: as `write_config`.
    """
    found: list[Form] = []
    reasons: dict[str, str] = {}
    for each in _families(origin) if family is None else [family]:
        try:
            found += forms(model, layers, options, dtype, each)
        except UnsupportedError as error:
            if family is not None:
                raise
            reasons[each.model_type] = str(error)
    if not found:
        advice = ""
        if model.qk_norm not in ("none", "head"):
            advice = "Nearest: surgery --add-qk-norm=head, which Qwen3 has (--family=llama_drope needs DroPE's code)."
        raise UnsupportedError(no_family("transformers", reasons, advice))
    wanted = tuple(runtimes) or READERS
    own = [form for form in found if form.family.model_type == origin and not runtimes]
    best = min(own or found, key=lambda form: form.rank(wanted))  # the first of equals
    if len(best.right(runtimes)) < len(runtimes):
        raise UnsupportedError(_no_form(found, best, runtimes))
    return best, "" if family is not None else _why(found, best, wanted, reasons, origin)


def _families(origin: str) -> Iterator[Family]:
    """The families of transformers: that of the weights first, then the best known."""
    names = dict.fromkeys([*([origin] if origin in FAMILIES else []), *_FIRST, *FAMILIES])
    return (FAMILIES[name] for name in names if FAMILIES[name].stock)


def no_family(runtime: str, reasons: Mapping[str, str], advice: str = "") -> str:
    """The message about a model that no family of a runtime can express: the reasons of the nearest, and the advice."""
    # A family that holds the weights, and cannot express the encoding, is nearer than one that cannot hold them; of
    # those, the nearest are those of fewest differences.
    near = _holding(reasons) or dict(sorted(reasons.items(), key=lambda item: item[1].count(";"))[:4])
    listed = [f"  {reason}" for reason in _by_reason(near)]
    return "\n".join([f"No architecture of {runtime} can express this model:", *listed, *([advice] if advice else [])])


def _no_form(found: Sequence[Form], best: Form, runtimes: Sequence[str]) -> str:
    lines = {}
    for form in sorted(found, key=lambda form: form.rank(runtimes)):
        missing = [name for name in runtimes if name not in form.right(runtimes)]
        lines.setdefault(form.family.model_type, "; ".join(f"{n}: {'; '.join(form.reasons[n])}" for n in missing))
    listed = "\n".join(f"  {name}: {line}" for name, line in list(lines.items())[:4])
    right = best.right(runtimes)
    nearest = f"\nNearest: {best.family.model_type}, --for={','.join(right).lower()}." if right else ""
    if LLAMA_CPP in runtimes:
        nearest += f"\nFor {LLAMA_CPP}, --to=gguf:FILE writes what its converter drops."
    return f"No form of this model is right in {', '.join(runtimes)}:\n{listed}{nearest}"


def _why(found: Sequence[Form], best: Form, runtimes: Sequence[str], reasons: dict[str, str], origin: str) -> str:
    name = best.family.model_type
    others = dict.fromkeys(form.family.model_type for form in found if form.family is not best.family)
    if not others:
        why = "the only architecture that can express it"
    elif name == origin:
        why = f"as the weights came; {', '.join(others)} can express it too"
    else:
        right = f"{len(best.right(runtimes))} of {', '.join(runtimes)} read it right"
        why = f"{right}; {', '.join(others)} can express it too"
    known = {family: reason for family, reason in _holding(reasons).items() if family in (origin, *_FIRST)}
    return f"--family=auto: {name} ({why})." + "".join(f" Not {reason}" for reason in _by_reason(known))


def _holding(reasons: Mapping[str, str]) -> dict[str, str]:
    """The reasons of the families that hold the weights."""
    return {name: reason for name, reason in reasons.items() if "cannot hold this model" not in reason}


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    """`NAMES: REASON` for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason.split(": ", 1)[1], []).append(name)
    return [f"{', '.join(listed)}: {reason}" for reason, listed in names.items()]

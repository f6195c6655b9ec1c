"""What to measure: checkpoints, lengths, suites and methods, and how people write them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pe_lab.checkpoints import Checkpoint
from pe_lab.config import EvaluationConfig
from pe_lab.errors import UserError
from pe_lab.evaluation import methods
from pe_lab.evaluation.tasks.suites import MEASURED as SUITES
from pe_lab.positional import Layer


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure, and what its rows say of it.

    Attributes:
      checkpoint: the weights.
      run: the run's name.
      path: where it lies in the run's directory, such as `pretrain/checkpoints/3000`.
      described: the encoding that the weights are read under instead of their own, as `--positional` writes it.
      own: the checkpoint's own layers, where it is read under another encoding.
    """

    checkpoint: Checkpoint
    run: str
    path: str
    described: str | None = None
    own: tuple[Layer, ...] | None = None

    @property
    def id(self) -> str:
        """Of the weights and how they are read."""
        return self.weights + (f" read as {self.described}" if self.described else "")

    @property
    def weights(self) -> str:
        return str(self.checkpoint.metadata["id"])

    @property
    def training_length(self) -> int:
        return int(self.checkpoint.metadata["training_length"])

    @functools.cached_property
    def model(self) -> str:
        return methods.model_name(self.own or self.checkpoint.layers, self.checkpoint.metadata["lineage"])

    def methods(self) -> tuple[str, ...]:
        """Those that make sense; what is read under a description is read so at every length."""
        if self.described:
            return ("as trained",)
        return methods.methods_of(self.checkpoint.layers, self.training_length)

    def named(self, method: str) -> tuple[str, str]:
        """Method and label as rows have them."""
        if self.described:
            return self.described, f"{self.model}, read as {self.described}"
        return method, methods.label(self.model, method)


@dataclass(frozen=True)
class Plan:
    """What to measure. None of suites or methods: all that are possible.

    Attributes:
      stride: perplexity by windows that slide by so many tokens; None: by windows that do not overlap.
    """

    lengths: tuple[int, ...]
    suites: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    settings: EvaluationConfig = EvaluationConfig()
    again: bool = False
    stride: int | None = None


@dataclass(frozen=True)
class Unit:
    """One row to be: a checkpoint read with a method, at a length, on a source."""

    suite: str
    subject: Subject
    method: str
    length: int
    source: int  # in the mixture

    @property
    def factor(self) -> float:
        return self.length / self.subject.training_length


def distinct(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Subjects without those whose weights are there already."""
    first: dict[str, Subject] = {}
    for subject in subjects:
        first.setdefault(subject.id, subject)
    return tuple(first.values())


def choose(
    plan: Plan, subjects: Sequence[Subject], reasons: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Suites and methods to measure, of those that the plan names, or of all.

    Args:
      reasons: suite -> why it is impossible here.

    Raises:
      UserError: what is named is impossible, or nothing is left.
    """
    here = [m for m in methods.METHODS if any(m in s.methods() for s in subjects)]
    for suite in plan.suites or ():
        if suite in reasons:
            raise UserError(f"--suite={suite} cannot be measured for this run: {reasons[suite]}.")
    suites = tuple(s for s in SUITES if s in (plan.suites or SUITES) and s not in reasons)
    if not suites:
        raise UserError(f"Nothing can be measured for this run: {'; '.join(reasons.values())}.")
    if "beta" in here and "beta" in reasons:
        here.remove("beta")
    for method in plan.methods or ():
        if method == "beta" and "beta" in reasons:
            raise UserError(f"--methods=beta cannot be measured for this run: {reasons['beta']}.")
        if method not in here:
            models = ", ".join(dict.fromkeys(s.model for s in subjects))
            raise UserError(
                f"--methods={method.replace(' ', '-')} makes no sense for what is here ({models}). "
                f"Possible: {', '.join(m.replace(' ', '-') for m in here)}."
            )
    default = [m for m in here if m not in methods.ASKED_FOR]
    chosen = tuple(m for m in here if m in (plan.methods or default))
    if "beta" not in chosen:
        if plan.suites and "beta" in plan.suites:
            raise UserError("--suite=beta fits the logit scale: leave --methods out, or name beta in it.")
        suites = tuple(s for s in suites if s != "beta")
    return suites, chosen


def parse_length(option: str, text: str, training_length: int = 0) -> int:
    """Tokens from `131072`, `128k` (1k = 1024), `1m`, or `2x` times the training length, where there is one."""
    item = text.strip().lower()
    units = {"k": 2**10, "m": 2**20} | ({"x": training_length} if training_length else {})
    unit = units.get(item[-1:], 1)
    examples = "2x, 4096, 8k or 1m" if training_length else "8192, 128k or 1m"
    try:
        tokens = float(item[:-1] if item[-1:] in units else item) * unit
    except ValueError:
        raise UserError(f"{option}: '{item}' is no length. Write {examples}.") from None
    if not tokens.is_integer() or tokens < 2:
        trained = f" (the training length is {training_length})" if training_length else ""
        raise UserError(f"{option}: '{item}' is {tokens:g} tokens; give a whole number of at least 2{trained}.")
    return int(tokens)


def parse_lengths(text: str, training_length: int) -> tuple[int, ...]:
    """Lengths in tokens, ascending, from a comma-separated text; each as `parse_length` reads it."""
    found = {parse_length("--lengths", item, training_length) for item in text.split(",") if item.strip()}
    if not found:
        raise UserError("--lengths is empty. Write for example 1x,2x,4x.")
    return tuple(sorted(found))

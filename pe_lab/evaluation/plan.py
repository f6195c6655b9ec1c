"""What to measure: suites, methods and lengths, and how a command line writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pe_lab.config import EvaluationConfig
from pe_lab.errors import ConfigError
from pe_lab.evaluation.tasks.suites import MEASURED
from pe_lab.evaluation.variants import Subject, Variant, check_methods
from pe_lab.results.variants import VARIANTS


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      lengths: in tokens.
      suites, methods: None: all that are possible. No methods are meant where there are `descriptions` and no methods.
      descriptions: encodings as `--positional` takes them.
      settings: how many tokens and windows.
      again: whether existing records are measured again.
      stride: perplexity by windows that advance by so many tokens; None: by windows that do not overlap.
    """

    lengths: tuple[int, ...]
    suites: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    descriptions: tuple[str, ...] = ()
    settings: EvaluationConfig = EvaluationConfig()
    again: bool = False
    stride: int | None = None


@dataclass(frozen=True)
class Unit:
    """One record to measure: a variant, at a length, on a source."""

    suite: str
    variant: Variant
    length: int
    source: int  # its index in the mixture

    @property
    def factor(self) -> float:
        return self.length / self.variant.training_length


def methods_for(plan: Plan, subject: Subject) -> tuple[str, ...]:
    """The methods that a plan asks for, of those that are possible for a checkpoint."""
    if plan.methods is None and plan.descriptions:
        return ()
    named = subject.default_methods if plan.methods is None else plan.methods
    fits = ("beta",) if plan.methods is None and "beta" in (plan.suites or ()) else ()
    return tuple(method for method in subject.methods if method in (*named, *fits))


def choose(
    plan: Plan, subjects: Sequence[Subject], reasons: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The suites and the methods to measure, where `reasons` says of a suite why it is impossible.

    Raises:
      ConfigError: a named suite or method is impossible, or nothing is left to measure.
    """
    for suite in plan.suites or ():
        if suite in reasons:
            raise ConfigError(f"--suite={suite} cannot be measured for this run: {reasons[suite]}.")
    suites = tuple(s for s in MEASURED if s in (plan.suites or MEASURED) and s not in reasons)
    if not suites:
        raise ConfigError(f"Nothing can be measured for this run: {'; '.join(reasons.values())}.")
    if "beta" in (plan.methods or ()) and "beta" in reasons:
        raise ConfigError(f"--methods=beta cannot be measured for this run: {reasons['beta']}.")
    check_methods(plan.methods or (), subjects)
    wanted = {method for subject in subjects for method in methods_for(plan, subject)}
    methods = tuple(m for m in VARIANTS if m in wanted and m not in reasons)
    if "beta" not in methods:
        if plan.suites and "beta" in plan.suites:
            raise ConfigError("--suite=beta fits the logit scale: leave --methods out, or name beta in it.")
        suites = tuple(s for s in suites if s != "beta")
    return suites, methods


def parse_length(option: str, text: str, training_length: int = 0) -> int:
    """Tokens from `131072`, `128k` (1k = 1024), `1m`, or `2x` times the training length, where there is one."""
    item = text.strip().lower()
    units = {"k": 2**10, "m": 2**20} | ({"x": training_length} if training_length else {})
    unit = units.get(item[-1:], 1)
    examples = "2x, 4096, 8k or 1m" if training_length else "8192, 128k or 1m"
    try:
        tokens = float(item[:-1] if item[-1:] in units else item) * unit
    except ValueError:
        raise ConfigError(f"{option}: '{item}' is no length. Write {examples}.") from None
    if not tokens.is_integer() or not 2 <= tokens < 2**31:
        trained = f" (the training length is {training_length})" if training_length else ""
        raise ConfigError(f"{option}: '{item}' is {tokens:g} tokens; give a whole number from 2 to 2^31 - 1{trained}.")
    return int(tokens)


def parse_lengths(text: str, training_length: int) -> tuple[int, ...]:
    """Lengths in tokens, ascending, from a comma-separated list; see `parse_length`."""
    found = {parse_length("--lengths", item, training_length) for item in text.split(",") if item.strip()}
    if not found:
        raise ConfigError("--lengths is empty. Write for example 1x,2x,4x.")
    return tuple(sorted(found))

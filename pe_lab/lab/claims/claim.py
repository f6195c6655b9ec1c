"""A claim: a sentence of a paper, the runs that test it, what is measured of them, and the rule of the verdict."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pe_lab.config import Config
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.claims.equal_help import HELP, NONE, help_of
from pe_lab.lab.claims.measures import scores
from pe_lab.lab.claims.rates import Rates, Untuned
from pe_lab.lab.claims.values import MINUS, Values, arm_of
from pe_lab.lab.claims.verdict import Condition, Criterion, Precondition
from pe_lab.recipes import explained, load_module
from pe_lab.storage import AnyPath

SIZES = ("laptop", "paper", "quick")
# At the papers' sizes a model reads one corpus, and is asked for the needles of DroPE's Table 1: the mean of its tasks.
PAPER_METRICS = {r": validation prose\b": ": validation", r": needles (?=[0-9{])": ": niah "}
PAPER_EVALUATION = ("--suite=perplexity,niah:multi_query,niah:multi_key,niah:multi_value", "--variants=all")


@dataclass(frozen=True)
class Arm:
    """One recipe of a claim; trained once for each seed.

    Attributes:
      name: of its numbers in criteria, and of its runs. One name means the same recipe in all claims, which share the
        runs.
      recipe: with its argument, as --config takes it; `{parent}` is where it starts: the run of the parent with the
        same seed, or what `surgery` made of it.
      parent: the arm that it starts from; None: random weights.
      surgery: options of `pe_lab.surgery`, which edits the parent's run of each seed first.
      seeds: how many of the claim's seeds, the first ones, it is trained for, where it costs more than others; 0: all.
    """

    name: str
    recipe: str
    parent: Arm | None = None
    surgery: str = ""
    seeds: int = 0

    def __post_init__(self) -> None:
        if self.surgery and self.parent is None:
            raise ConfigError(f"arm {self.name!r}: surgery needs a parent.")
        if not re.fullmatch(r"[a-z0-9_.]+", self.name):
            raise ConfigError(f"arm {self.name!r}: a name has lower-case letters, digits, dots and underscores.")
        if ("{parent}" in self.recipe) != (self.parent is not None):
            raise ConfigError(f"arm {self.name!r}: {{parent}} in its recipe and `parent` go together.")

    @property
    def depth(self) -> int:
        """How many arms it is built on."""
        return 0 if self.parent is None else 1 + self.parent.depth

    def reference(self, size: str, directory: AnyPath, seed: int) -> str:
        """The recipe with its argument for a seed, whose runs are in `directory`."""
        text = self.recipe
        if size == "quick":
            text += ",size=quick" if ":" in text else ":size=quick"
        return text.replace("{parent}", str(self.start(directory, seed))) if self.parent else text

    def start(self, directory: AnyPath, seed: int) -> AnyPath:
        """Where it starts: the run of the parent, or its edited child."""
        assert self.parent is not None
        return directory / "edited" / self.cell(seed) if self.surgery else directory / self.parent.cell(seed)

    def cell(self, seed: int) -> str:
        """The name of its run's directory."""
        return f"{self.name}__seed={seed}"


@dataclass(frozen=True)
class Reference:
    """Numbers that need no run: of an arm's config.

    Attributes:
      arm: its name; it has no parent.
      measure: {metric: value} of the config.
    """

    arm: str
    measure: Callable[[Config], Mapping[str, float]]


@dataclass(frozen=True)
class Claim:
    """What a file in claims/ defines as CLAIM.

    Attributes:
      sentence: the sentence that is tested.
      paper: whose it is, and where: paper, table, figure or section; "ours", with what is near it in a paper.
      quote: the paper's own words; "" of a claim of ours.
      arms: what is trained; the arms that they start from need not be listed.
      criteria: the rule, written before the runs.
      preconditions: what must be true for the question to be asked at this size.
      rates: the grid of learning rates that every arm is tried at; None: none was, and a claim that compares arms is
        not settled for it.
      help: what every arm has at test time: the logit scale that was `fitted` to other text, that of a paper's
        `constant`, or `none`.
      references: numbers of configs, by the name that stands for an arm in terms.
      fits: what is fitted to the numbers, as JSON that the result keeps, such as a law and what it predicts.
      evaluation: options of `pe_lab.evaluate` for the last phase of each arm; None: it is not evaluated.
      measure: the numbers of one run, {metric: value}, from its directory; by default those of its evaluation.
      curves: the terms "ARM: METRIC" of the figure, with {x} for the length's factor: {panel: {label: term}}.
      tried: what else was tried, at which settings, and what came of it.
      recipes: {arm: recipe at the paper's size}, at least for all arms that the rule names, or for none; it starts from
        the arm's parent if it has `{parent}`, else from random weights or a published checkpoint. Other arms, such as
        controls that the paper does not have, are left out there.
      name, file: its file's; set when it is loaded.
    """

    sentence: str
    paper: str
    arms: tuple[Arm, ...]
    criteria: tuple[Criterion, ...]
    preconditions: tuple[Precondition, ...] = ()
    rates: Rates | None = None
    help: str = NONE
    references: Mapping[str, Reference] = field(default_factory=dict)
    fits: Callable[[Values], Mapping[str, Any]] | None = None
    quote: str = ""
    evaluation: tuple[str, ...] | None = ()
    measure: Callable[[AnyPath], Mapping[str, float]] = scores
    curves: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tried: str = ""
    recipes: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        known = {arm.name for arm in self.arms}
        for one in (*self.criteria, *self.preconditions):
            for arm in map(arm_of, one.terms):
                if arm not in known and arm not in self.references:
                    raise ConfigError(f"'{one.text}': '{arm}'. {did_you_mean(arm, [*known, *self.references])}")
        for name, reference in self.references.items():
            if name in known or all(one.name != reference.arm or one.parent for one in self.arms):
                raise ConfigError(f"reference '{name}': give it a name of its own, and an arm without a parent.")
        needed = {arm_of(term) for one in (*self.criteria, *self.preconditions) for term in one.terms} & known
        needed |= {reference.arm for reference in self.references.values()}
        if self.recipes and not needed <= set(self.recipes) <= known:
            raise ConfigError(
                f"recipes at paper size are for the arms that the rule names, or for none: {', '.join(sorted(needed))}."
            )
        if not self.criteria or len(known) < len(self.arms):
            raise ConfigError("a claim needs criteria, and arms with names of their own.")
        if self.help not in HELP:
            raise ConfigError(f"help='{self.help}'. {did_you_mean(self.help, list(HELP))}")
        for one in self.criteria:
            given = {found for term in one.terms if (found := help_of(term))}
            # A measure of a claim's own may help all arms without a word in its numbers' names.
            if given - {self.help} and not (given == {NONE} and self.evaluation is None):
                raise ConfigError(
                    f"criterion '{one.text}': its numbers have help {' and '.join(sorted(given))} at test time, and "
                    f"the claim says {self.help}. Compared arms have the same help."
                )

    def at(self, size: str) -> Claim:
        """The claim at a size: at the paper's with other recipes, and with the numbers that there are there.

        Raises:
          ConfigError: it has no recipes at the paper's size, or none for an arm that another one starts from.
        """
        if size != "paper":
            return self
        if not self.recipes:
            raise ConfigError(f"claim '{self.name}' has no recipes at paper size. --size=laptop has them.")

        def arm(one: Arm) -> Arm:
            recipe = self.recipes.get(one.name)
            if recipe is None:
                raise ConfigError(
                    f"claim '{self.name}': '{one.name}', which others start from, has no recipe at paper size."
                )
            if "{parent}" not in recipe or one.parent is None:
                return Arm(one.name, recipe)
            return Arm(one.name, recipe, arm(one.parent), one.surgery)

        criteria = tuple(
            dataclasses.replace(one, of=_at_paper_size(one.of), over=tuple(map(_at_paper_size, one.over)))
            for one in self.criteria
        )
        preconditions = tuple(
            dataclasses.replace(one, of=_at_paper_size(one.of), others=tuple(map(_at_paper_size, one.others)))
            for one in self.preconditions
        )
        there = {*self.recipes, *self.references}
        curves = {
            panel: kept
            for panel, lines in self.curves.items()
            if (
                kept := {
                    label: _at_paper_size(term)
                    for label, term in lines.items()
                    if {arm_of(one) for one in term.split(MINUS)} <= there
                }
            )
        }
        evaluation = PAPER_EVALUATION if self.evaluation == () else self.evaluation
        return dataclasses.replace(
            self,
            arms=tuple(arm(one) for one in self.arms if one.name in self.recipes),
            criteria=criteria,
            preconditions=preconditions,
            rates=Rates(apart="the rates are the paper's"),
            curves=curves,
            evaluation=evaluation,
        )

    def only(self, name: str) -> Claim:
        """The runs of one arm alone, and nothing to judge.

        Raises:
          ConfigError: it has no such arm.
        """
        arm = next((one for one in self.arms if one.name == name), None)
        if arm is None:
            raise ConfigError(
                f"claim '{self.name}' has no arm '{name}'. {did_you_mean(name, [a.name for a in self.arms])}"
            )
        return dataclasses.replace(
            self,
            arms=(arm,),
            criteria=(Criterion("none", f"{name}: none", by=1.0),),
            preconditions=(),
            references={},
            fits=None,
            rates=Rates(apart="one run"),
            recipes={name: self.recipes[name]} if name in self.recipes else {},
        )

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """The arms, those that they start from, and those of the pilot of `rates`, parents first."""
        found: dict[str, Arm] = {}
        for arm in (*self.arms, *self.pilot):
            chain = [arm]
            while (parent := chain[-1].parent) is not None:
                chain.append(parent)
            for one in reversed(chain):
                if found.setdefault(one.name, one) != one:
                    raise ConfigError(f"claim '{self.name}': two arms are called '{one.name}'.")
        return tuple(found.values())

    @property
    def pilot(self) -> tuple[Arm, ...]:
        """The arms at the other rates of the grid, which are trained for the first seeds alone, and not evaluated."""
        return self.rates.pilot(self.arms) if self.rates else ()

    def seeds_of(self, arm: Arm, seeds: Sequence[int]) -> Sequence[int]:
        """The seeds that an arm is trained for, of those of the claim: the first ones for an arm of the pilot."""
        most = self.rates.seeds if self.rates and arm in self.pilot else arm.seeds
        return seeds[: most or None]

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The preconditions, with those that every claim has which compares arms: that each has its best rate."""
        if self.rates:
            return (*self.preconditions, *self.rates.preconditions(self.arms))
        trained = {arm.name for arm in self.arms}
        compared = any(len({arm_of(term) for term in one.terms} & trained) > 1 for one in self.criteria)
        return (*self.preconditions, *(Untuned(),) * compared)

    @property
    def rule(self) -> list[str]:
        """Criteria, preconditions and the help at test time in words, as the history of results keeps them."""
        return [*(one.rule for one in (*self.criteria, *self.conditions)), f"help at test time: {self.help}"]


def _at_paper_size(term: str) -> str:
    """A term "ARM: METRIC" with the name that the number has at the papers' sizes."""
    for ours, theirs in PAPER_METRICS.items():
        term = re.sub(ours, theirs, term)
    return term


def claims_directory() -> Path:
    """The directory of the claims: inside the package where a wheel installed it, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "files"
    return inside if inside.is_dir() else package.parents[2] / "claims"


def claim_names() -> list[str]:
    """The names of the claims there are."""
    files = sorted(claims_directory().glob("*.py"))
    return [file.stem for file in files if re.search("^CLAIM = ", file.read_text(), re.MULTILINE)]


def load_claim(name: str) -> Claim:
    """The claim of `claims/NAME.py`, or of a file of one's own, `PATH.py`.

    Raises:
      ConfigError: there is no such claim, its file does not define one, or cannot be read or executed.
    """
    path = Path(name) if name.endswith(".py") else claims_directory() / f"{name}.py"
    if not path.is_file():
        raise ConfigError(f"There is no claim '{name}'. {did_you_mean(name, claim_names())} Or give a file, PATH.py.")
    with explained(str(path), "claim"):
        claim = getattr(load_module(path), "CLAIM", None)
    if not isinstance(claim, Claim):
        raise ConfigError(f"'{path}' defines no CLAIM = Claim(...). See docs/claims.md.")
    return dataclasses.replace(claim, name=path.stem, file=str(path))


def load_claims(names: Sequence[str]) -> list[Claim]:
    """Several claims, whose arms of one name are one recipe.

    Raises:
      ConfigError: two of them mean different recipes by one name.
    """
    found, arms = [load_claim(name) for name in names], {}
    for claim in found:
        for arm in claim.all_arms:
            if arms.setdefault(arm.name, arm) != arm:
                raise ConfigError(f"claim '{claim.name}': another claim has an arm '{arm.name}' with another recipe.")
    return found

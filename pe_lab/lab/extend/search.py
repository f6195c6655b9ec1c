"""Divisors of the rotary frequencies by evolution: LongRoPE (arXiv 2402.13753) and LongRoPE2 (arXiv 2502.20082).

A candidate is a divisor for each pair, and a logit scale. The first generation has PI, NTK, YaRN and LongRoPE2's form
at the theoretical critical pair, and mutations of them. Each further one keeps the better half of a population as
parents, and has as many children, half of them by mutation and half by crossover. The papers have a fixed factor in the
place of the logit scale; a scale that does not fit hides which divisors are better. LongRoPE's start of unscaled tokens
is tried on the best candidate, after the evolution, as its authors' `try_start_token` does within it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab import storage
from pe_lab.config import DataConfig
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.forward import Forward, tensor_shards
from pe_lab.evaluation.suites.logit_scale import search_range
from pe_lab.evaluation.variants import Subject, can_scale
from pe_lab.lab.extend.objective import Objective, make_objective
from pe_lab.model import complete
from pe_lab.page.figure_files import render
from pe_lab.positional import NTK, PI, Beta, Encoding, Layer, LongRope, LongRopeStart, PartialRope, Yarn, label
from pe_lab.positional.encodings import rope_spectrum
from pe_lab.positional.scalings import Scaling
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.records import finite

STEP = 0.01  # of divisors, as in LongRoPE's search space
HIGHEST = 1.25  # times the factor: the largest divisor, as in LongRoPE
MUTATED = 0.3  # chance that a pair changes in a mutation, and that it is the other parent's in a crossover
CRITICAL_STEPS = 3  # pairs that a mutation moves the critical pair by, at most
TRIES = 100  # to make a candidate that has not been measured
SCALE_STEP = 0.15  # standard deviation of the logarithm of a mutated logit scale
Divisors = Float[np.ndarray, " R"]


class Genes(NamedTuple):
    """What is searched: the divisors of the pairs, the factor on the attention logits, and how many tokens at the start
    are not scaled."""

    divisors: Divisors
    scale: float = 1.0
    start: int = 0

    @property
    def key(self) -> tuple[float, ...]:
        """Equal for equal genes."""
        return (*self.divisors.tolist(), self.scale, self.start)


Measure = Callable[[Sequence[Genes]], Sequence[float]]  # candidates -> losses, nats


@dataclass(frozen=True)
class SearchSpace:
    """What is searched: divisors of R pairs for sequences of `factor` times the training length.

    Attributes:
      inv_freq: [R] unscaled, radians per position.
      base, dim: of these frequencies.
      training_length: in tokens.
      monotone: whether a slower pair has at least the divisor of a faster one (LongRoPE, eq. 3).
    """

    inv_freq: Float[np.ndarray, " R"]
    base: float
    dim: int
    training_length: int
    factor: float
    monotone: bool = True

    @property
    def critical(self) -> int:
        """The first pair that does not complete one rotation within the training length (LongRoPE2, section 3)."""
        periods = 2 * math.pi / self.inv_freq
        return int(np.searchsorted(periods, self.training_length, side="right"))

    def allowed(self, divisors: Divisors) -> Divisors:
        """The divisors within the space, in steps of `STEP`; a monotone space raises later ones to earlier ones."""
        found = np.clip(divisors, 1.0, HIGHEST * self.factor)
        if self.monotone:
            found = np.maximum.accumulate(found)
        return np.round(np.round(found / STEP) * STEP, 4)

    def of(self, scaling: Scaling) -> Divisors:
        """The divisors of a known scaling."""
        return self.allowed(self.inv_freq / scaling.scale(self.inv_freq, self.base, self.dim, None)[0])

    def beyond_critical(self, critical: int, tail: Sequence[float]) -> Divisors:
        """LongRoPE2's form: NTK up to the critical pair, whose divisor it reaches there, and `tail` from it on."""
        found = np.empty(len(self.inv_freq))
        found[critical:] = tail
        if critical:
            found[:critical] = tail[0] ** (np.arange(critical) / critical)
        return self.allowed(found)

    def scale(self, logit_scale: float) -> float:
        """The logit scale within the bounds in which one is fitted."""
        low, high = search_range(self.factor)
        return round(min(max(logit_scale, low), high), 3)

    def known(self) -> dict[str, Genes]:
        """The candidates that a search starts from, by name."""
        factor, pairs = self.factor, len(self.inv_freq)
        yarn = Yarn(factor, self.training_length)
        attention_factor = yarn.scale(self.inv_freq, self.base, self.dim, None)[1]
        found = {"PI": Genes(self.of(PI(factor))), "YaRN": Genes(self.of(yarn), self.scale(attention_factor**2))}
        if self.dim > 2:
            found["NTK"] = Genes(self.of(NTK(factor)))
        if self.critical < pairs:
            tail = [factor] * (pairs - self.critical)
            found["critical pair"] = Genes(self.beyond_critical(self.critical, tail))
        return found

    def layers(self, genes: Genes, before: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with these genes beyond the training length, and unchanged up to it; with a start, divisors divide
        at every length."""
        ones, divisors = (1.0,) * len(genes.divisors), tuple(genes.divisors.tolist())
        length, factor = self.training_length, self.factor
        law = Beta((genes.scale - 1) / math.log(factor), length) if genes.scale != 1 else 1.0
        if genes.start:
            return with_rotation(before, lambda _: LongRopeStart(divisors, genes.start, self.base), length, law)
        table = LongRope(ones, divisors, length, factor, attention_factor=1.0)
        return with_rotation(before, lambda one: dataclasses.replace(one, scaling=table), length, law)


@dataclass(frozen=True)
class SearchSettings:
    """The size of a search; LongRoPE's is 64 and 40.

    Attributes:
      population: candidates of the first generation. Half as many are parents, and half as many are made in each
        further one.
      iterations: further generations.
      seed: of all that is drawn; equal seeds give equal searches.
      starts: of unscaled tokens, tried on the best candidate after all generations. No runtime has them.
    """

    population: int = 64
    iterations: int = 40
    seed: int = 0
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.population < 8 or self.iterations < 0:
            raise ConfigError(
                f"A search with a population of {self.population} and {self.iterations} iterations: give at least 8 "
                "candidates and 0 iterations."
            )
        if any(start < 1 for start in self.starts) or len(set(self.starts)) < len(self.starts):
            raise ConfigError(f"A search with starts of {self.starts} tokens: give different numbers of 1 or more.")

    @property
    def measurements(self) -> int:
        """Candidates that are measured in all."""
        return self.population + self.iterations * (self.population // 2) + len(self.starts)


@dataclass(frozen=True)
class Candidate:
    """Divisors and a logit scale with their loss, nats.

    Attributes:
      generation: 0 is the first one.
      origin: a known method, or what it was made of: `mutation of 4`, `crossover of 4 and 9`, by place in the history.
    """

    divisors: tuple[float, ...]
    scale: float
    start: int
    loss: float
    generation: int
    origin: str

    @property
    def genes(self) -> Genes:
        """As the search has them."""
        return Genes(np.array(self.divisors), self.scale, self.start)


@dataclass
class DivisorSearch:
    """A search, with all candidates that were measured, in order.

    Its history is a file of JSON lines, with which a search that was stopped goes on: it ends as one that was not.
    """

    space: SearchSpace
    settings: SearchSettings
    history: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        """The candidate of the least loss; of equals the first."""
        return min(self.history, key=lambda one: one.loss)

    def run(
        self, measure: Measure, at_once: int, file: storage.AnyPath, about: dict[str, Any], show: Callable[[str], None]
    ) -> Candidate:
        """Measures all generations, and returns the best candidate.

        Args:
          measure: the losses of some candidates.
          at_once: how many `measure` is given; the history is written after each.
          file: of the history. What it has already is not measured again.
          about: what the losses depend on, as JSON, for the first line of the file.
          show: prints a line after each generation.

        Raises:
          DataError: the file is the history of another search, or damaged.
        """
        header = finite({"space": self._space_json(), "settings": dataclasses.asdict(self.settings), **about}, None)
        self.history = read_history(file, header)
        known = len(self.history)
        generations = self.settings.iterations + bool(self.settings.starts)
        for generation in range(generations + 1):
            wanted = list(self._children(generation))
            start = sum(one.generation < generation for one in self.history)
            for first in range(len(self.history) - start, len(wanted), at_once):
                part = wanted[first : first + at_once]
                losses = measure([genes for genes, _ in part])
                self.history += [
                    Candidate(tuple(genes.divisors.tolist()), genes.scale, genes.start, float(loss), generation, origin)
                    for (genes, origin), loss in zip(part, losses, strict=True)
                ]
                write_history(file, header, self.history)
            if len(self.history) > known:
                best = self.best
                show(
                    f"generation {generation} of {generations}: best loss {best.loss:.4f} "
                    f"({best.origin}, generation {best.generation}), {len(self.history):,} candidates"
                )
        return self.best

    def _space_json(self) -> dict[str, Any]:
        space = self.space
        rest = {name: getattr(space, name) for name in ("base", "dim", "training_length", "factor", "monotone")}
        return {"inv_freq": [float(x) for x in space.inv_freq], **rest}

    # ----------------------------------------------------------------------------------------------------------------
    # Candidates, each a function of the seed, the generation and the history before it

    def _children(self, generation: int) -> Iterator[tuple[Genes, str]]:
        """The candidates of a generation, with their origins."""
        rng = np.random.default_rng([self.settings.seed, generation])
        before = [one for one in self.history if one.generation < generation]
        seen = {one.genes.key for one in before}

        def new(make: Callable[[], Genes]) -> Genes | None:
            for _ in range(TRIES):
                genes = make()
                if genes.key not in seen:
                    seen.add(genes.key)
                    return genes
            return None

        if generation == 0:
            known = list(self.space.known().items())
            made = [(name, new(lambda one=one: one)) for name, one in known]
            yield from ((genes, name) for name, genes in made if genes is not None)
            for n in range(self.settings.population - sum(genes is not None for _, genes in made)):
                name, parent = known[n % len(known)]
                if (genes := new(lambda parent=parent: self._mutated(parent, rng))) is not None:
                    yield genes, f"mutation of {name}"
            return
        if generation > self.settings.iterations:
            best = self.best
            for start in self.settings.starts:
                yield best.genes._replace(start=start), f"start of {best.origin}"
            return
        size = self.settings.population // 2
        places = sorted(range(len(before)), key=lambda place: before[place].loss)[:size]
        for n in range(size):
            one, other = rng.choice(places, 2, replace=False).tolist()
            parents = [before[place].genes for place in (one, other)]
            if n % 2 and (genes := new(lambda parents=parents: self._crossed(*parents, rng))) is not None:
                yield genes, f"crossover of {one} and {other}"
            elif (genes := new(lambda parents=parents: self._mutated(parents[0], rng))) is not None:
                yield genes, f"mutation of {one}"

    def _mutated(self, parent: Genes, rng: np.random.Generator) -> Genes:
        """The parent with other divisors, by one of three mutations, and half of the time with another logit scale."""
        mutation = (self._new_pairs, self._new_curve, self._new_critical)[rng.integers(3)]
        divisors = self.space.allowed(mutation(parent.divisors, rng))
        change = math.exp(SCALE_STEP * rng.standard_normal()) if rng.random() < 0.5 else 1.0
        return Genes(divisors, self.space.scale(parent.scale * change))

    def _new_pairs(self, parent: Divisors, rng: np.random.Generator) -> Divisors:
        """LongRoPE's: some divisors move, in a monotone space between their neighbours."""
        found, pairs = parent.copy(), len(parent)
        for pair in np.flatnonzero(rng.random(pairs) < MUTATED).tolist():
            if self.space.monotone:
                low = found[pair - 1] if pair else 1.0
                high = found[pair + 1] if pair + 1 < pairs else HIGHEST * self.space.factor
                found[pair] = rng.uniform(low, max(low, high))
            else:
                found[pair] *= math.exp(0.2 * rng.standard_normal())
        return found

    def _new_curve(self, parent: Divisors, rng: np.random.Generator) -> Divisors:
        """Neighbouring divisors move together: a bump of any width. Neither paper has it; it needs fewer candidates."""
        pairs = len(parent)
        centre, width = rng.uniform(0, pairs), rng.uniform(1, max(pairs / 3, 1.5))
        bump = np.exp(-(((np.arange(pairs) - centre) / width) ** 2))
        return parent * np.exp(0.4 * math.log(self.space.factor) * rng.standard_normal() * bump)

    def _new_critical(self, parent: Divisors, rng: np.random.Generator) -> Divisors:
        """LongRoPE2's: another critical pair near the theoretical one, and about the whole factor from it on."""
        space, pairs = self.space, len(parent)
        critical = int(np.clip(space.critical + rng.integers(-CRITICAL_STEPS, CRITICAL_STEPS + 1), 0, pairs - 1))
        tail = np.sort(rng.uniform(space.factor / HIGHEST, HIGHEST * space.factor, pairs - critical))
        if rng.random() < 0.5:
            tail[:] = tail[0]
        return space.beyond_critical(critical, tail.tolist())

    def _crossed(self, one: Genes, other: Genes, rng: np.random.Generator) -> Genes:
        chosen = np.where(rng.random(len(one.divisors)) < MUTATED, other.divisors, one.divisors)
        return Genes(self.space.allowed(chosen), (one, other)[rng.integers(2)].scale)


# --------------------------------------------------------------------------------------------------------------------
# The history: a file and a figure


def write_history(file: storage.AnyPath, header: dict[str, Any], history: Sequence[Candidate]) -> None:
    """Writes the file: what was searched, then a line for each candidate."""
    storage.write_records(file, [header, *map(dataclasses.asdict, history)])


def read_history(file: storage.AnyPath, header: dict[str, Any]) -> list[Candidate]:
    """The candidates of the file; none if there is no file.

    Raises:
      DataError: it is the history of another search, or damaged.
    """
    if not storage.is_file(file):
        return []
    first, *rest = list(storage.read_records(file, "candidate of a search", "Move it away, and search again.")) or [{}]
    if differing := [key for key in header if first.get(key) != header[key]]:
        raise DataError(
            f"'{file}' is the history of another search: {', '.join(differing)} differ. Move it away, or give another "
            "directory."
        )
    try:
        return [
            Candidate(
                tuple(map(float, one["divisors"])),
                float(one["scale"]),
                int(one["start"]),
                float(one["loss"]),
                int(one["generation"]),
                str(one["origin"]),
            )
            for one in rest
        ]
    except (LookupError, TypeError, ValueError):
        raise DataError(f"'{file}' is damaged. Move it away, and search again.") from None


def figure(search: DivisorSearch) -> LineCharts:
    """The divisor of each pair of the best candidate, against those of the known methods."""
    pairs = np.arange(len(search.space.inv_freq), dtype=np.float64)
    best = search.best
    lines = [Line(name, pairs, genes.divisors) for name, genes in search.space.known().items()]
    found = f"found, logit scale {best.scale:g}" + (f", from token {best.start:,}" if best.start else "")
    lines.append(Line(found, pairs, np.array(best.divisors)))
    return LineCharts(
        "search",
        "Divisors that the search found",
        f"Divisor of each pair of channels, the fastest first; the critical pair is {search.space.critical}.",
        (("", tuple(lines)),),
        x_label="pair",
        y_label="divisor of its frequency",
        marks=((float(search.space.critical), "critical pair"),),
    )


# --------------------------------------------------------------------------------------------------------------------
# The search of a checkpoint

HISTORY, FAR = "search.jsonl", "far_tokens.json"


def search_space(subject: Subject, length: int, monotone: bool = True) -> SearchSpace:
    """What is searched for a checkpoint at `length` tokens: divisors of the pairs of all layers that can be rescaled.

    Raises:
      ConfigError: the length is not beyond the training length, no layer rotates, or layers rotate differently.
    """
    trained = subject.training_length
    if length <= trained:
        raise ConfigError(f"--length={length}: a search is for more than the training length, {trained:,} tokens.")
    rotating = {layer.encoding for layer in subject.lm.layers if can_scale(layer, trained)}
    if not rotating:
        raise ConfigError(f"{subject.path} has no layer that rotates and is not scaled: there is nothing to search.")
    if len(rotating) > 1:
        names = ", ".join(sorted(label(Layer(one)) for one in rotating))
        raise ConfigError(f"{subject.path} has layers of several rotations ({names}); a search is for one.")
    (encoding,) = rotating
    head_dim = complete(subject.checkpoint.model).head_dim
    dim = encoding.rotated_channels(head_dim) if isinstance(encoding, PartialRope) else head_dim
    return SearchSpace(rope_spectrum(encoding.base, dim), encoding.base, dim, trained, length / trained, monotone)


def with_rotation(
    layers: Sequence[Layer],
    rotation: Callable[[Encoding], Encoding],
    training_length: int,
    logit_scale: float | Beta = 1.0,
) -> tuple[Layer, ...]:
    """The layers with a rotation made of theirs, and a logit scale other than 1, where they can be rescaled."""

    def scaled(layer: Layer) -> Layer:
        given = {} if logit_scale == 1.0 else {"logit_scale": logit_scale}
        return dataclasses.replace(layer, encoding=rotation(layer.encoding), **given)

    return tuple(scaled(layer) if can_scale(layer, training_length) else layer for layer in layers)


def search_checkpoint(
    subject: Subject,
    data: DataConfig,
    length: int,
    directory: storage.AnyPath,
    settings: SearchSettings = SearchSettings(),
    objective: Sequence[str] = (),
    sequences: int = 4,
    monotone: bool = True,
    show: Callable[[str], None] = print,
) -> tuple[DivisorSearch, Objective]:
    """Searches the divisors of a checkpoint for sequences of `length` tokens.

    Args:
      directory: of the history, `search.jsonl`, with which a search that was stopped goes on, and of its figure.
      objective: names, see `objective.OBJECTIVES`; (): `default_objective`.
      sequences: of each part of the objective.

    Raises:
      UserError: see `search_space`, `make_objective` and `DivisorSearch.run`; or a start, where some channels do not
        rotate.
    """
    space = search_space(subject, length, monotone)
    if settings.starts and space.dim < complete(subject.checkpoint.model).head_dim:
        raise ConfigError(
            f"{subject.path} rotates {space.dim} channels of a head; a start is for those that rotate all."
        )
    forward = Forward(complete(subject.checkpoint.model), tensor=tensor_shards(subject.lm.mesh))
    params = forward.place(subject.checkpoint.params)
    show(f"search at {length:,} tokens: {settings.measurements:,} candidates at most")
    measured = make_objective(objective, data, subject, forward, params, length, sequences, show, directory / FAR)
    show(f"objective: {measured.describe()}")

    def losses(population: Sequence[Genes]) -> list[float]:
        # A start is in the compiled function, with its divisors; without one they are an argument.
        together = [genes for genes in population if not genes.start]
        apart = [[genes] for genes in population if genes.start]
        found = {}
        for part in [together, *apart]:
            layers = [space.layers(genes, subject.lm.layers) for genes in part]
            sums = measured.losses(forward, params, layers).sum(1)
            found |= {genes.key: float(one) for genes, one in zip(part, sums, strict=True)}
        return [found[genes.key] for genes in population]

    search = DivisorSearch(space, settings)
    about = {
        "checkpoint": subject.id,
        "length": length,
        "objective": [part.name for part in measured.parts],
        "data": measured.fingerprint,
    }
    with TokenProgress("search", settings.measurements * measured.tokens) as progress:
        forward.on_tokens = progress.add_up
        search.run(losses, forward.candidates_at_once(sequences, length), directory / HISTORY, about, show)
    for form in ("svg", "png"):
        storage.write_file(directory / f"search.{form}", render(figure(search), form))
    return search, measured

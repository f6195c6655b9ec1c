"""Measures the suites that score tokens: which variants, lengths and sources are possible, and their records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from pe_lab.config import DataConfig
from pe_lab.data.mixture import open_mixture
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.forward import Forward, OnTokens, tensor_shards
from pe_lab.evaluation.suite import Suite, TokenSuite, read_settings
from pe_lab.evaluation.suites import SUITES
from pe_lab.evaluation.suites.needles import Predict
from pe_lab.evaluation.suites.perplexity import Losses
from pe_lab.evaluation.variants import Subject, Variant, check_variants, paper_coefficient, variants_of
from pe_lab.identity import versions
from pe_lab.model import complete
from pe_lab.parallel import first_then_others
from pe_lab.positional import Alibi, Layer, label_layers
from pe_lab.results.records import Record, RecordFile, announced, digest, finite
from pe_lab.results.variants import PAPER_COEFFICIENT, VARIANTS
from pe_lab.storage import AnyPath
from pe_lab.terminal import console

if TYPE_CHECKING:
    from pe_lab.evaluation.session import EvaluationSession

Scores = Callable[[Any, Any, Any], tuple[Any, Any]]
BranchScores = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Forwards = dict[Any, Forward]  # compiled forward passes by shape


@dataclass(frozen=True)
class EvaluationPlan:
    """What to measure.

    Attributes:
      lengths: in tokens.
      suites, variants: their names; None: all that are possible. No variants are meant where there are `descriptions`
        and no names.
      descriptions: encodings as `--positional` takes them.
      options: of the suites, by name.
      seed: of what suites draw.
      again: whether existing records are measured again.
      fit_scale: whether descriptions have the logit scale that fits held-out text best, at each length.
    """

    lengths: tuple[int, ...]
    suites: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    descriptions: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    again: bool = False
    fit_scale: bool = False

    def variants_for(self, subject: Subject) -> tuple[str, ...]:
        """The variants that are asked for, of those that are possible for a checkpoint.

        Where none are named, those that a named suite fits are meant too.
        """
        if self.variants is None and self.descriptions:
            return ()
        fitted = [getattr(SUITES[name], "fits", None) for name in self.suites or ()]
        named = (*subject.default_variants, *fitted) if self.variants is None else self.variants
        return tuple(variant for variant in subject.variants if variant in named)


@dataclass(frozen=True)
class MeasurementUnit:
    """One record to measure: a variant, at a length, on a source."""

    suite: TokenSuite
    variant: Variant
    length: int
    source: int | None  # its index in the mixture; None: no one of them
    settings: Any = None  # of the suite; None of a fit, which another suite asks for

    @property
    def factor(self) -> float:
        return self.length / self.variant.training_length


class Evaluation:
    """Measures subjects of one run, all of one model shape, into a directory of record files.

    Args:
      subjects: checkpoints; those with equal weights are measured once.
      data: where text and needles come from.
      directory: of `SUITE.jsonl`.
      devices: `compute_devices()` by default.
      mesh: on which the weights lie already, instead of `devices`.
      attention: an implementation of attention instead of the one in the checkpoints' configs.
      forwards: compiled forward passes, which are added to; evaluations that share them compile once.
      opened: data by what it depends on, which is added to; only evaluations of one plan on one data may share it.
      quiet: whether nothing is printed.

    Attributes:
      lengths, seed: of the plan.
      devices, directory: as given.
      out: the console, which prints nothing where it is quiet.
      mixture: the opened data.
      text_sources: the numbers of its sources that hold out text.
      files: the records by suite.
      skipped: sentences about what is left out, and why, and about tokens that lengths do not share.
      kept: sentences about what was stored with the checkpoints.
      reused: units whose records existed.
      on_tokens: is called with the number of tokens that a forward pass has read.

    Raises:
      UserError: a suite or a variant that is impossible here, or lengths that the data cannot fill.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        data: DataConfig,
        plan: EvaluationPlan,
        directory: AnyPath,
        devices: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
        attention: str | None = None,
        forwards: Forwards | None = None,
        opened: dict[Any, Any] | None = None,
        quiet: bool = False,
    ):
        self.subjects = [s for n, s in enumerate(subjects) if s.id not in {before.id for before in subjects[:n]}]
        self.plan, self.data, self.lengths, self.seed = plan, data, plan.lengths, plan.seed
        self.devices, self._mesh, self._attention, self.directory = devices, mesh, attention, directory
        self.out = console(quiet)
        self._opened: dict[Any, Any] = {} if opened is None else opened
        self._known: dict[Any, Any] = {}  # results by what they depend on
        self._settings: dict[str, Any] = {}
        # Text is prepared once, by the first process.
        self.mixture = self.remember_data("mixture", lambda: first_then_others(lambda: open_mixture(data)))
        self.source_names = ", ".join(s.name for s in self.mixture.sources)
        self._check_vocabulary()
        sources = enumerate(self.mixture.sources)
        self.text_sources = [i for i, s in sources if s.prepared is not None and s.tokens("validation")]
        self.skipped, self.kept = list[str](), list[str]()
        self.reused: list[MeasurementUnit] = []
        self.on_tokens: OnTokens = lambda tokens: None
        self.suites, self.variant_names = self._possible()
        # Suites that fit a variant come before those that measure it.
        fitting = [s for s in SUITES.values() if isinstance(s, TokenSuite) and self._fits(s, self.variant_names)]
        self._needed = [*fitting, *(suite for suite in self.suites if suite not in fitting)]
        self.files = {suite.name: RecordFile(directory / f"{suite.name}.jsonl") for suite in self._needed}
        self.variants = [variant for subject in self.subjects for variant in self._variants_of(subject)]
        self.units = list(self._units(suite for suite in self._needed if suite in self.suites))
        self.forwards: Forwards = {} if forwards is None else forwards
        for variant in self.variants:
            self._forward(variant).check_attention(variant.layers, max(plan.lengths))
        found = [sentence for suite in self._needed for sentence in suite.check(self)]
        self.skipped += dict.fromkeys(found)

    def cost(self, unit: MeasurementUnit) -> int:
        """Tokens of a unit, about, for a progress bar."""
        return unit.suite.cost(self.settings(unit.suite), unit.length)

    def run(self) -> list[Record]:
        """The records of the plan, in its order; those that do not exist yet are measured."""
        out = self.out
        for sentence in self.skipped:
            out.print(sentence)
        models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in self.subjects))
        out.print(f"{len(self.units)} measurements of {models}")
        records, finished = [], 0
        planned = announced(self.directory, list(map(self._name, self.units)))
        fitting = (suite for suite in self._needed if suite not in self.suites)
        fits = [unit for unit in self._units(fitting) if self._found(self._key(unit)) is None]
        total = sum(map(self.cost, [*self.units, *fits])) + sum(suite.cost_before(self) for suite in self._needed)
        with planned, TokenProgress("compiling", total, out) as progress:
            for unit in self.units:
                name, before = f"{unit.suite.name} {unit.length:,} {unit.variant.label}", progress.read
                self.on_tokens = functools.partial(progress.add, name=name)
                for forward in self.forwards.values():
                    forward.on_tokens = self.on_tokens
                record, existed = self._record(unit)
                records.append(record)
                if existed:
                    self.reused.append(unit)
                    progress.found(self.cost(unit))
                # More than its cost is read by the first that needs a fit, or what `cost_before` counts.
                finished += max(self.cost(unit), progress.read - before)
                progress.show(finished, name)
        for suite in self._needed:
            suite.finish(self)
        if self.reused:
            out.print(f"{len(self.reused)} of them were measured before (--again measures them again).")
        for sentence in self.kept:
            out.print(sentence)
        if progress.read:
            out.print(progress.speed())
        out.print(f"Records: {self.directory}")
        return records

    # --------------------------------------------------------------------------------------------------------
    # What a suite measures with

    def settings(self, suite: Suite) -> Any:
        """The settings of a suite."""
        if suite.name not in self._settings:
            self._settings[suite.name] = read_settings(suite, self.plan.options)
        return self._settings[suite.name]

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """A result by its key, computed once. Variants coincide at the training length, and share results there."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def encoding_key(self, variant: Variant, layers: Sequence[Layer], length: int) -> str:
        """A digest of the weights and the encoding that sequences of `length` tokens are read under.

        Descriptions that make equal schedules have equal keys: dynamic scalings at their training length, or NTK and
        dynamic NTK at a longer one.
        """

        def make() -> str:
            schedule = self._forward(variant).schedule(layers, length)
            arrays = [np.asarray(one).tobytes().hex() for one in jax.tree.leaves(schedule)]
            return digest([variant.subject.id, repr(schedule.structure), arrays], 24)

        return self.remember(("encoding", variant.subject.id, layers, length), make)

    def remember_data(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Data by its key, which does not depend on the subjects, opened once."""
        if key not in self._opened:
            self._opened[key] = compute()
        return self._opened[key]

    def fingerprint(self, source: int | None) -> Any:
        """A digest of a source of the data, for the settings of a record."""
        found = None if source is None else self.mixture.sources[source].fingerprint
        return found if found is None or isinstance(found, str) else list(found)

    def losses(self, variant: Variant, layers: Sequence[Layer]) -> Losses:
        """A function from a batch to the loss of each of its targets [n, T], nats."""
        forward, params = self._forward(variant), self._params(variant)
        return lambda batch: forward.losses(params, batch, layers)

    def predictions(self, variant: Variant, layers: Sequence[Layer]) -> Predict:
        """A function from tokens [n, T] and positions [n, Q] to the likeliest next tokens after these [n, Q]."""
        forward, params = self._forward(variant), self._params(variant)

        def predict(tokens: Int[np.ndarray, "n T"], at: Int[np.ndarray, "n Q"]) -> Int[np.ndarray, "n Q"]:
            return forward.predictions(params, tokens, at, layers)

        return predict

    def scores(self, variant: Variant, layers: Sequence[Layer]) -> Scores:
        """A function from tokens [n, T], positions [n, Q] and targets after these [n, Q] to two arrays [n, Q].

        They are the log-probabilities of the targets, nats, and whether each is the likeliest token.
        """
        forward, params = self._forward(variant), self._params(variant)

        def score(
            tokens: Int[np.ndarray, "n T"], at: Int[np.ndarray, "n Q"], targets: Int[np.ndarray, "n Q"]
        ) -> tuple[Float[np.ndarray, "n Q"], Bool[np.ndarray, "n Q"]]:
            found = list(forward.scores(params, tokens, at, targets, layers))
            return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])

        return score

    def branch_scores(self, variant: Variant, layers: Sequence[Layer]) -> BranchScores:
        """A function from tokens [n, P], suffixes [n, J, S], positions in these and targets [n, J, A] to two arrays.

        They are those of `scores`, [n, J, A]; every suffix follows the tokens alone.
        """
        forward, params = self._forward(variant), self._params(variant)
        return lambda *batch: forward.branch_scores(params, *batch, layers)

    def _forward(self, variant: Variant) -> Forward:
        alike = [other for other in self.variants if (other.described is None) == (variant.described is None)]
        slopes = any(isinstance(layer.encoding, Alibi) for other in alike for layer in other.layers)
        shape = variant.subject.checkpoint.model
        if (shape, slopes) not in self.forwards:
            named = {} if self._attention is None else {"attention": self._attention}
            config = complete(dataclasses.replace(shape, **named))
            tensor = tensor_shards(variant.subject.lm.mesh)
            self.forwards[shape, slopes] = Forward(config, slopes, self.devices, tensor=tensor, mesh=self._mesh)
        return self.forwards[shape, slopes]

    def _params(self, variant: Variant) -> Any:
        subject = variant.subject
        return self.remember(("params", subject.id), lambda: self._forward(variant).place(subject.checkpoint.params))

    # --------------------------------------------------------------------------------------------------------
    # What to measure

    def _possible(self) -> tuple[list[TokenSuite], tuple[str, ...]]:
        """The suites and the names of the variants of the plan that are possible for these checkpoints and this data.

        Raises:
          ConfigError: a named suite or variant is impossible, or nothing is left to measure.
        """
        plan = self.plan
        asked = [SUITES[name] for name in plan.suites] if plan.suites is not None else list(SUITES.values())
        scored = [s for s in SUITES.values() if isinstance(s, TokenSuite)]
        chosen = [s for s in scored if s in asked and (plan.suites is not None or s.by_default)]
        fitting = {s.fits: s for s in scored if s.fits is not None}
        wanted = {variant for subject in self.subjects for variant in plan.variants_for(subject)}
        needed = [*chosen, *(s for s in fitting.values() if self._fits(s, wanted))]
        reasons = {s: s.impossible(self) for s in dict.fromkeys(needed)}
        for suite in chosen if plan.suites is not None else ():
            if reasons[suite]:
                raise ConfigError(f"--suite={suite.name} cannot be measured for this run: {reasons[suite]}.")
        for variant, suite in fitting.items():
            asked_for = "--fit-scale" if self._fits(suite, ()) else f"--variants={variant}"
            if reasons.get(suite) and (variant in (plan.variants or ()) or self._fits(suite, ())):
                raise ConfigError(f"{asked_for} cannot be measured for this run: {reasons[suite]}.")
        possible = [s for s in chosen if not reasons[s]]
        if not possible:
            raise ConfigError(f"Nothing can be measured for this run: {'; '.join(filter(None, reasons.values()))}.")
        for suite, reason in reasons.items():
            if reason and (self._fits(suite, wanted) if suite.fits else suite in chosen):
                self.skipped.append(f"{suite.name} left out: {reason}.")
        check_variants(plan.variants or (), self.subjects)
        names = tuple(v for v in VARIANTS if v in wanted and not (v in fitting and reasons[fitting[v]]))
        for suite in [s for s in possible if s.fits is not None and not self._fits(s, names)]:
            if plan.suites is not None:
                raise ConfigError(
                    f"--suite={suite.name} fits the variant {suite.fits}: leave --variants out, or name it there. With "
                    "--positional and --fit-scale it fits these encodings."
                )
            possible.remove(suite)
        return possible, names

    def _fits(self, suite: TokenSuite, names: Collection[str]) -> bool:
        """Whether a suite fits a number of one of these variants, or of the descriptions."""
        described = self.plan.fit_scale and bool(self.plan.descriptions)
        return suite.fits is not None and (suite.fits in names or described)

    def _variants_of(self, subject: Subject) -> list[Variant]:
        names = [name for name in self.plan.variants_for(subject) if name in self.variant_names]
        return variants_of(
            subject, names, self.plan.descriptions, lambda one: functools.partial(self._beta, one), self.plan.fit_scale
        )

    def _units(self, suites: Iterable[TokenSuite]) -> Iterator[MeasurementUnit]:
        """The records of suites."""
        for suite in suites:
            for variant in self.variants:
                for length in self.lengths:
                    for source in suite.sources(self):
                        unit = MeasurementUnit(suite, variant, length, source, self.settings(suite))
                        if suite.covers(unit):
                            yield unit

    def _check_vocabulary(self) -> None:
        for subject in self.subjects:
            trained, model = subject.checkpoint.metadata.get("tokenizer"), subject.checkpoint.model
            found = self.mixture.tokenizer.fingerprint
            if trained not in (None, found):
                raise CheckpointError(
                    f"{subject.path} was trained with tokenizer {trained}, its data now gives {found}. Evaluate where "
                    "it was trained, or with data prepared with that tokenizer."
                )
            if model.vocab_size < self.mixture.vocab_size:
                raise CheckpointError(
                    f"{subject.path} knows {model.vocab_size} tokens, its data has {self.mixture.vocab_size}."
                )

    # --------------------------------------------------------------------------------------------------------
    # Records

    def _record(self, unit: MeasurementUnit) -> tuple[Record, bool]:
        """The record of a unit, and whether it existed."""
        variant, record, suite, file = unit.variant, self._key(unit), unit.suite, self.files[unit.suite.name]
        if (found := self._found(record)) is not None:
            renamed = found | {name: record[name] for name in ("label", "tokens_trained")}
            if renamed != found:
                file.put([renamed])
            return renamed, True
        if suite.fits is None:
            record |= {"beta": variant.beta_at(unit.length), "positional": label_layers(variant.layers_at(unit.length))}
        record = finite({**record, **suite.measure(self, unit), "versions": versions()})
        file.put([record])
        return record, False

    def _found(self, key: Record) -> Record | None:
        """The record of a key; None: it is to be measured."""
        return None if self.plan.again else self.files[key["suite"]].find(key)

    def _key(self, unit: MeasurementUnit) -> Record:
        """What a unit's record is found by."""
        return self._name(unit) | {"seed": self.seed, "settings": self.identity(unit)}

    def _name(self, unit: MeasurementUnit) -> Record:
        """The keys of a unit's record that tell what it measures: suite, checkpoint, variant, length and source."""
        source = unit.suite.source_name(self, unit)
        named = {} if source is None else {"source": source}
        return {"suite": unit.suite.name} | unit.variant.record(unit.length) | named

    def identity(self, unit: MeasurementUnit) -> Record:
        """The settings that a record's numbers depend on; a record under other settings is measured again."""
        given: Record = {"protocol": unit.suite.protocol}
        coefficient = paper_coefficient(unit.variant.subject.lineage)
        if unit.variant.name == "paper beta" and coefficient != PAPER_COEFFICIENT:
            given["coefficient"] = coefficient
        for fitting in self._needed if unit.suite.fits is None else ():
            if fitting.fits is not None and unit.variant.fitted:
                given["fit"] = fitting.identity(self, dataclasses.replace(unit, suite=fitting, source=None))
        return given | unit.suite.identity(self, unit)

    def _beta(self, variant: Variant, length: int) -> float:
        """The fitted scale for sequences of `length` tokens, fitted first if needed; 1 up to the training length."""
        if length <= variant.training_length:
            return 1.0
        fitting = next(suite for suite in self._needed if suite.fits is not None)
        return float(self._record(MeasurementUnit(fitting, variant, length, None))[0][fitting.metrics[0].key])


def open_evaluation(chosen: Mapping[TokenSuite, Sequence[str]], session: EvaluationSession) -> Evaluation:
    """The evaluation of the suites that score tokens, as a session asks for it; see `Suite.runner`."""
    data, plan = session.data, session.plan
    if data is None:
        raise ConfigError(
            f"{session.target.paths[-1]} does not tell its training data (it is external). Measure it on a text: "
            "--text=GLOB."
        )
    if plan.suites is not None:
        plan = dataclasses.replace(plan, suites=tuple(suite.name for suite in chosen))
        fitting = next((suite for suite in chosen if suite.fits is not None), None)
        if plan.descriptions and fitting and not plan.fit_scale:
            raise ConfigError(
                f"--suite={fitting.name} fits the scale of a checkpoint's own encoding, and --positional gives "
                "another. Add --fit-scale to fit it for that one, or leave --positional out."
            )
    arguments = session.arguments
    return Evaluation(
        session.subjects, data, plan, session.out, attention=arguments.attention, forwards=session.forwards
    )

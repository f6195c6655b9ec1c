"""Measures suites that need no answers (perplexity, needles, the logit scale): what is possible, and its records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pe_lab.checkpoints.checkpoint import write_logit_scale
from pe_lab.config import DataConfig
from pe_lab.data.mixture import open_mixture
from pe_lab.errors import CheckpointError, ConfigError, UserError
from pe_lab.evaluation.plan import Plan, Unit, choose, methods_for
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.scoring.forward import Forward, tensor_shards
from pe_lab.evaluation.tasks import beta as betas
from pe_lab.evaluation.tasks import needles, perplexity
from pe_lab.evaluation.tasks.suites import MEASURED
from pe_lab.evaluation.variants import Subject, Variant, layers_under, paper_coefficient, variants_of
from pe_lab.identity import versions
from pe_lab.model import complete
from pe_lab.parallel import check_memory, first_then_others, on_first
from pe_lab.positional import Alibi, Layer, label_layers
from pe_lab.results.records import Record, RecordFile, announced, finite
from pe_lab.results.variants import PAPER_COEFFICIENT
from pe_lab.storage import AnyPath
from pe_lab.terminal import console

Forwards = dict[Any, Forward]  # compiled forward passes by shape


class Evaluation:
    """Measures subjects of one run, all of one model shape, into a directory of record files.

    Args:
      subjects: checkpoints; those with equal weights are measured once.
      data: where text and needles come from.
      directory: of `SUITE.jsonl`.
      devices: `compute_devices()` by default.
      attention: an implementation of attention instead of the one in the checkpoints' configs.
      forwards: compiled forward passes, which are added to; evaluations that share them compile once.

    Attributes:
      skipped: sentences about what is left out, and why, and about tokens that lengths do not share.
      kept: sentences about what was stored with the checkpoints.
      reused: units whose records existed.

    Raises:
      UserError: a suite or a method that is impossible here, or lengths that the data cannot fill.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        data: DataConfig,
        plan: Plan,
        directory: AnyPath,
        devices: Sequence[Any] | None = None,
        attention: str | None = None,
        forwards: Forwards | None = None,
    ):
        self.subjects = [s for n, s in enumerate(subjects) if s.id not in {before.id for before in subjects[:n]}]
        self.plan, self._data, self._devices, self._attention = plan, data, devices, attention
        self._directory = directory
        self.mixture = first_then_others(lambda: open_mixture(data))  # text is prepared once
        self._check_vocabulary()
        self.files = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in MEASURED}
        self._known: dict[Any, Any] = {}  # results by what they depend on
        sources = list(enumerate(self.mixture.sources))
        self._text = [i for i, s in sources if s.prepared is not None and s.tokens("validation")]
        self._needles = [i for i, s in sources if s.needles is not None]
        self.skipped, self.kept = list[str](), list[str]()
        self.reused: list[Unit] = []
        self.suites, self.methods = self._possible()
        self.variants = [variant for subject in self.subjects for variant in self._variants_of(subject)]
        self.units = list(self._units())
        self.forwards: Forwards = {} if forwards is None else forwards
        for variant in self.variants:
            self._forward(variant).check_attention(variant.layers, max(plan.lengths))
        self._check_lengths()

    def cost(self, unit: Unit) -> int:
        """Tokens of a unit, about, for a progress bar."""
        settings = self.plan.settings
        return {
            "perplexity": settings.tokens,
            "needles": settings.needle_windows * unit.length,
            "beta": 10 * settings.fit_tokens,
        }[unit.suite]

    def run(self) -> list[Record]:
        """The records of the plan, in its order; those that do not exist yet are measured."""
        out = console()
        for sentence in self.skipped:
            out.print(sentence)
        models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in self.subjects))
        out.print(f"{len(self.units)} measurements of {models}")
        records, finished = [], 0
        planned = announced(self._directory, list(map(self._name, self.units)))
        with planned, TokenProgress("compiling", sum(map(self.cost, self.units))) as progress:
            for unit in self.units:
                name = f"{unit.suite} {unit.length:,} {unit.variant.label}"
                for forward in self.forwards.values():
                    forward.on_tokens = functools.partial(progress.add, name=name)
                record, existed = self._record(unit)
                records.append(record)
                if existed:
                    self.reused.append(unit)
                finished += self.cost(unit)
                progress.show(finished, name)
        if "beta" in self.methods:
            self._write_common_coefficients()
        if self.reused:
            out.print(f"{len(self.reused)} of them were measured before (--again measures them again).")
        for sentence in self.kept:
            out.print(sentence)
        if progress.read:
            out.print(progress.speed())
        out.print(f"Records: {self._directory}")
        return records

    # --------------------------------------------------------------------------------------------------------
    # What to measure

    def _variants_of(self, subject: Subject) -> list[Variant]:
        methods = [method for method in methods_for(self.plan, subject) if method in self.methods]
        return variants_of(subject, methods, self.plan.descriptions, functools.partial(self._beta, subject))

    def _possible(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The suites and methods of the plan that are possible for these checkpoints and this data."""
        names = ", ".join(s.name for s in self.mixture.sources)
        scaled = [s for s in self.subjects if "beta" in s.methods]
        reasons: dict[str, str] = {}
        if not self._text:
            reasons["perplexity"] = f"its data ({names}) holds out no text"
        if not self._needles:
            reasons["needles"] = f"it was trained without needles (its data: {names})"
        if not scaled:
            reasons["beta"] = (
                "a logit scale is fitted for layers that rotate or have no encoding, are not scaled, and have no logit "
                "scale of their own"
            )
        elif not self._text:
            reasons["beta"] = f"a logit scale is fitted on held-out text, and its data ({names}) has none"
        elif max(self.plan.lengths) <= min(s.training_length for s in scaled):
            reasons["beta"] = "no length is beyond the training length"
        elif reason := self._nothing_to_fit():
            reasons["beta"] = reason
            if self.plan.methods is None and any("beta" in methods_for(self.plan, s) for s in scaled):
                self.skipped.append(f"β left out: {reason}.")
        if self.plan.suites is None:
            self.skipped += [f"{s} left out: {reasons[s]}." for s in MEASURED[:2] if s in reasons]
        return choose(self.plan, self.subjects, reasons)

    def _nothing_to_fit(self) -> str | None:
        """Why no logit scale can be fitted on the held-out text; None if one can."""
        try:
            texts = [self._held_out(source) for source in self._text]
        except UserError as error:
            return str(error).rstrip(".")
        short = [text for text in texts if not len(text.fit)]
        if not short:
            return None
        return (
            f"data source {short[0].source!r} has held-out text for one sequence of {short[0].tile:,} tokens "
            "and none to fit a logit scale on"
        )

    def _units(self) -> Iterator[Unit]:
        """The records to measure. Scales come first: the method `beta` needs them."""
        for suite in ("beta", "perplexity", "needles"):
            if suite not in self.suites:
                continue
            sources = {"beta": [-1], "perplexity": self._text, "needles": self._needles}[suite]
            for variant in self.variants:
                for length in self.plan.lengths:
                    if suite == "beta" and (variant.method != "beta" or length <= variant.training_length):
                        continue
                    for source in sources:
                        yield Unit(suite, variant, length, source)

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

    def _check_lengths(self) -> None:
        """Opens all text and needles, so that an impossible length is refused before anything is measured."""
        if self.plan.stride and self.plan.stride > min(self.plan.lengths):
            raise ConfigError(
                f"--stride={self.plan.stride} is more than the shortest length, {min(self.plan.lengths)}: windows "
                "would leave tokens out. Give a smaller one."
            )
        if any(unit.suite in ("perplexity", "beta") or unit.variant.method == "beta" for unit in self.units):
            for source in self._text:
                self.skipped += self._held_out(source).missing(self.plan.lengths, self.plan.settings.tokens)
        for source in self._needles if "needles" in self.suites else ():
            for length in self.plan.lengths:
                self._questions(source, length)

    # --------------------------------------------------------------------------------------------------------
    # Measuring

    def _record(self, unit: Unit) -> tuple[Record, bool]:
        """The record of a unit, and whether it existed."""
        variant, record = unit.variant, self._name(unit)
        record |= {"seed": self.plan.settings.seed, "settings": self._settings(unit)}
        file, suite = self.files[unit.suite], unit.suite
        if not self.plan.again and (found := file.find(record)):
            renamed = found | {name: record[name] for name in ("label", "tokens_trained")}
            if renamed != found:
                file.put([renamed])
            return renamed, True
        measures = {"perplexity": self._perplexity, "needles": self._needle_accuracy, "beta": self._fitted_beta}
        if suite != "beta":
            record |= {"beta": variant.beta_at(unit.length), "positional": label_layers(variant.layers_at(unit.length))}
        record = finite({**record, **measures[suite](unit), "versions": versions()})
        file.put([record])
        return record, False

    def _name(self, unit: Unit) -> Record:
        """The keys of a unit's record that tell what it measures: suite, checkpoint, variant, length and source."""
        more = f", windows sliding by {self.plan.stride}" if unit.suite == "perplexity" and self.plan.stride else ""
        source = {} if unit.suite == "beta" else {"source": self.mixture.sources[unit.source].name + more}
        return {"suite": unit.suite} | unit.variant.record(unit.length) | source

    def _settings(self, unit: Unit) -> Record:
        """The settings that a record's numbers depend on; a record under other settings is measured again."""
        settings, method = self.plan.settings, unit.variant.method
        given: Record = {"protocol": perplexity.SUITE.protocol}
        coefficient = paper_coefficient(unit.variant.subject.lineage)
        if method == "paper beta" and coefficient != PAPER_COEFFICIENT:
            given["coefficient"] = coefficient
        if unit.suite == "beta":
            return given | self._text_settings(self._text)
        if method == "beta":
            given["fit"] = self._text_settings(self._text)
        if unit.suite == "needles":
            return given | {
                "protocol": needles.SUITE.protocol,
                "windows": settings.needle_windows,
                "data": self._fingerprint(unit.source),
            }
        if method == "cropped" or self.plan.stride:
            given["stride"] = self._stride(unit.variant)
        return given | self._text_settings([unit.source])

    def _text_settings(self, sources: Sequence[int]) -> Record:
        """What chooses the tokens to score and those to fit on, of these sources of text."""
        settings = self.plan.settings
        return {
            "tile": [self._held_out(i).tile for i in sources],
            "tokens": settings.tokens,
            "fit_tokens": settings.fit_tokens,
            "data": [self._fingerprint(i) for i in sources],
        }

    def _fingerprint(self, source: int) -> Any:
        found = self.mixture.sources[source].fingerprint
        return found if isinstance(found, str) else list(found)

    def _stride(self, variant: Variant) -> int:
        return self.plan.stride or max(1, variant.training_length // max(1, self.plan.settings.crop_steps))

    def _remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """A result by its key, computed once. Methods coincide at the training length, and share results there."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _forward(self, variant: Variant) -> Forward:
        alike = [other for other in self.variants if (other.described is None) == (variant.described is None)]
        slopes = any(isinstance(layer.encoding, Alibi) for other in alike for layer in other.layers)
        shape = variant.subject.checkpoint.model
        if (shape, slopes) not in self.forwards:
            named = {} if self._attention is None else {"attention": self._attention}
            config = complete(dataclasses.replace(shape, **named))
            tensor = tensor_shards(variant.subject.lm.mesh)
            self.forwards[shape, slopes] = Forward(config, slopes, self._devices, tensor=tensor)
        return self.forwards[shape, slopes]

    def _params(self, variant: Variant) -> Any:
        subject = variant.subject
        return self._remember(("params", subject.id), lambda: self._forward(variant).place(subject.checkpoint.params))

    def _losses(self, variant: Variant, layers: Sequence[Layer]) -> perplexity.Losses:
        forward, params = self._forward(variant), self._params(variant)
        return lambda batch: forward.losses(params, batch, layers)

    def _perplexity(self, unit: Unit) -> Record:
        variant, text = unit.variant, self._held_out(unit.source)
        layers, subject = variant.layers_at(unit.length), variant.subject
        losses = self._losses(variant, layers)
        size = min(unit.length, variant.crop or unit.length)
        if self.plan.stride:
            kind, length = "sliding", text.tile
            read = perplexity.Cropped(text, size, min(self.plan.stride, size), losses)
        elif size < unit.length:
            kind, length = "cropped", unit.length
            crops = functools.partial(perplexity.Cropped, text, size, self._stride(variant), losses)
            read = self._remember(("crops", subject.id, unit.source), crops)
        else:
            kind, length = "windows", unit.length
            read = functools.partial(perplexity.window_losses, text, losses=losses)
        found = self._remember(
            (kind, subject.id, layers, size, length, unit.source),
            lambda: perplexity.summarize(*read(length), len(text.score)),
        )
        return {**found, "tiles": list(text.score_index)}

    def _needle_accuracy(self, unit: Unit) -> Record:
        variant, asked = unit.variant, self._questions(unit.source, unit.length)
        layers, forward, params = variant.layers_at(unit.length), self._forward(variant), self._params(variant)
        crop = variant.crop if unit.length > variant.training_length else None

        def answer() -> Record:
            predicted = needles.predict(asked, lambda tokens, at: forward.predictions(params, tokens, at, layers), crop)
            return needles.score(predicted, asked)

        found = self._remember(("needles", variant.subject.id, layers, unit.length, unit.source, crop), answer)
        return {**found, "guessing": self.mixture.sources[unit.source].needles.guessing}

    def _held_out(self, source: int) -> perplexity.HeldOut:
        settings, name = self.plan.settings, self.mixture.sources[source].name
        return self._remember(
            ("text", source),
            lambda: perplexity.held_out(
                self._data, source, name, self.plan.lengths, settings.tokens, settings.fit_tokens,
                self.mixture.tokenizer.eos_id,
            ),
        )  # fmt: skip

    def _questions(self, source: int, length: int) -> needles.Questions:
        settings = self.plan.settings
        needed = 4 * 4 * settings.needle_windows * length  # int32: tokens, targets, distances and answers
        what = f"Asking for needles in {settings.needle_windows:,} windows of {length:,} tokens"
        check_memory(needed, what, advice="Give shorter --lengths, or fewer --windows.")
        return self._remember(
            ("questions", source, length),
            lambda: needles.questions(self._data, source, length, settings.needle_windows, settings.seed),
        )

    # --------------------------------------------------------------------------------------------------------
    # The logit scale

    def _beta(self, subject: Subject, length: int) -> float:
        """The scale for sequences of `length` tokens, fitted first if needed; 1 up to the training length."""
        if length <= subject.training_length:
            return 1.0
        variant = next(variant for variant in self.variants if variant.subject is subject and variant.method == "beta")
        return float(self._record(Unit("beta", variant, length, -1))[0]["beta"])

    def _fitted_beta(self, unit: Unit) -> Record:
        """The scale with the smallest loss on the tiles set aside for it; text sources count by their weight."""
        variant, subject, length = unit.variant, unit.variant.subject, unit.length
        texts = [self._held_out(source) for source in self._text]
        shares = np.asarray([self.mixture.sources[source].weight for source in self._text], np.float64)
        batches = [perplexity.as_batch(text, perplexity.cut(text.fit, length)) for text in texts]

        def loss(beta: float) -> float:
            layers = layers_under("beta", subject.checkpoint.layers, length, subject.training_length, beta)
            losses = self._losses(variant, layers)
            means = [np.average(losses(batch), weights=batch["weights"]) for batch in batches]
            return float(np.average(means, weights=shares))

        fit = self._remember(("fit", subject.id, length), lambda: betas.fit_beta(loss, unit.factor))
        tokens = sum(len(text.fit) * (text.tile // length) * length for text in texts)
        names = ", ".join(text.source for text in texts)
        return {
            "c": betas.coefficient(fit.beta, unit.factor),
            "beta": fit.beta,
            "nll_before": fit.nll_before,
            "nll_after": fit.nll_after,
            "fitted_on": f"{tokens:,} held-out tokens of {names}, none of them scored",
            "tiles": [list(text.fit_index) for text in texts],
            "evaluations": fit.evaluations,
        }

    def _write_common_coefficients(self) -> None:
        """Adds the c that fits the scales of all lengths best to their records, and keeps it with the checkpoint."""
        file, data = self.files["beta"], [self._fingerprint(source) for source in self._text]
        for subject in self.subjects:
            # Scales that were fitted on other text do not count.
            mine = [one for one in file.records if one.get("checkpoint_id") == subject.id]
            mine = [one for one in mine if (one.get("settings") or {}).get("data") == data and one.get("beta")]
            c = betas.common_coefficient([float(one["beta"]) for one in mine], [float(one["factor"]) for one in mine])
            if mine:
                file.put([{**one, "c_all_lengths": c} for one in mine])
            if c is not None:
                fitted = {int(one["length"]): float(one["beta"]) for one in mine}
                on = str(mine[0]["fitted_on"])
                kept = on_first(functools.partial(write_logit_scale, subject.checkpoint, c, fitted, on))
                where = f"is kept in {kept}" if kept else "is not kept: the checkpoint is external. Convert it first"
                self.kept.append(f"{subject.path}: β = 1 {c:+.3f} ln s {where}.")

"""Measuring checkpoints: what is possible, what is measured already, rows as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.checkpoints.logit_scale import write_logit_scale
from pe_lab.config import DataConfig
from pe_lab.data.mixture import open_mixture
from pe_lab.errors import UserError
from pe_lab.evaluation import methods
from pe_lab.evaluation.plan import SUITES, Plan, Subject, Unit, choose, distinct
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.tasks import beta as betas
from pe_lab.evaluation.tasks import needles, perplexity
from pe_lab.model import complete
from pe_lab.positional import Alibi, Layer
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.training.machine import versions


class Evaluation:
    """Measures subjects of one run, all of one model shape, into a directory of row files.

    Raises:
      UserError: a suite or a method that is impossible here, lengths that the data cannot fill.

    Args:
      attention: an implementation to read with, instead of what the checkpoints' configs say.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        data: DataConfig,
        plan: Plan,
        directory: Path,
        devices: Sequence[Any] | None = None,
        attention: str | None = None,
    ):
        self.subjects = distinct(subjects)
        self.plan, self._data = plan, data
        self.mixture = open_mixture(data)
        self._check_vocabulary()
        self.files = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in SUITES}
        self._known: dict[Any, Any] = {}  # what was computed in this process
        self._text = [
            i for i, s in enumerate(self.mixture.sources) if s.prepared is not None and s.tokens("validation")
        ]
        self._needles = [i for i, s in enumerate(self.mixture.sources) if s.needles is not None]
        self.skipped: list[str] = []  # sentences: what was left out, and why
        self.kept: list[str] = []  # and what was stored with the checkpoints
        self.suites, self.methods = self._possible()
        self.units = list(self._units())
        alibi = any(isinstance(layer.encoding, Alibi) for s in self.subjects for layer in s.checkpoint.layers)
        shapes = dict.fromkeys(s.checkpoint.model for s in self.subjects)
        named = {} if attention is None else {"attention": attention}
        self.forwards = {
            shape: Forward(complete(dataclasses.replace(shape, **named)), alibi, devices) for shape in shapes
        }
        for subject in self.subjects:
            self.forwards[subject.checkpoint.model].check_attention(subject.checkpoint.layers, max(self.plan.lengths))
        self._check_lengths()

    @property
    def work(self) -> int:
        """Tokens in all units, for a progress bar."""
        return sum(self.cost(unit) for unit in self.units)

    def cost(self, unit: Unit) -> int:
        """Tokens of a unit."""
        settings = self.plan.settings
        return {
            "perplexity": settings.tokens,
            "needles": settings.needle_windows * unit.length,
            "beta": 10 * settings.fit_tokens,
        }[unit.suite]

    def run(
        self,
        measured: Callable[[Unit, bool], None] = lambda unit, reused: None,
        heard: Callable[[int], None] = lambda tokens: None,
    ) -> list[Record]:
        """Measures what is not measured yet; all rows of the plan, in its order.

        `measured` hears of each row, `heard` of tokens as they are read.
        """
        for forward in self.forwards.values():
            forward.on_tokens = heard
        rows = []
        for unit in self.units:
            row, reused = self._row(unit)
            measured(unit, reused)
            rows.append(row)
        if "beta" in self.methods:
            self._write_common_coefficients()
        return rows

    # --------------------------------------------------------------------------------------------------------
    # What to measure

    def _possible(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The suites and methods that make sense for these checkpoints and this data, of those that are asked for."""
        names = ", ".join(s.name for s in self.mixture.sources)
        reasons: dict[str, str] = {}
        if not self._text:
            reasons["perplexity"] = f"its data ({names}) holds out no text"
        if not self._needles:
            reasons["needles"] = f"it was trained without needles (its data: {names})"
        if all("beta" not in s.methods() for s in self.subjects):
            reasons["beta"] = "no checkpoint here is without positional encoding and without a logit scale of its own"
        elif not self._text:
            reasons["beta"] = f"a logit scale is fitted on held-out text, and its data ({names}) has none"
        elif max(self.plan.lengths) <= min(s.training_length for s in self.subjects if "beta" in s.methods()):
            reasons["beta"] = "no length is beyond the training length"
        elif reason := self._nothing_to_fit():
            reasons["beta"] = reason
            if self.plan.methods is None:
                self.skipped.append(f"β left out: {reason}.")
        if self.plan.suites is None:
            self.skipped += [f"{s} left out: {reasons[s]}." for s in SUITES[:2] if s in reasons]
        return choose(self.plan, self.subjects, reasons)

    def _nothing_to_fit(self) -> str | None:
        """Why no logit scale can be fitted on the held-out text, if it cannot."""
        try:
            texts = [self._held_out(source) for source in self._text]
        except UserError as error:
            return str(error).rstrip(".")
        short = [text for text in texts if not len(text.fit)]
        if not short:
            return None
        return (
            f"data source {short[0].source!r} has held-out text for one text of {short[0].longest:,} tokens "
            "and none to fit a logit scale on"
        )

    def _units(self) -> Iterator[Unit]:
        """The plan's rows. Scales first: they are what the beta method reads with."""
        for suite in ("beta", "perplexity", "needles"):
            if suite not in self.suites:
                continue
            sources = {"beta": [-1], "perplexity": self._text, "needles": self._needles}[suite]
            for subject in self.subjects:
                for method in [m for m in subject.methods() if m in self.methods]:
                    for length in self.plan.lengths:
                        if suite == "beta" and (method != "beta" or length <= subject.training_length):
                            continue
                        for source in sources:
                            yield Unit(suite, subject, method, length, source)

    def _check_vocabulary(self) -> None:
        for subject in self.subjects:
            metadata, model = subject.checkpoint.metadata, subject.checkpoint.model
            ours = self.mixture.tokenizer.fingerprint
            if metadata.get("tokenizer") not in (None, ours):
                raise UserError(
                    f"{subject.path} was trained with tokenizer {metadata['tokenizer']}, its data now gives "
                    f"{ours}. Evaluate where it was trained, or with data prepared with that tokenizer."
                )
            if model.vocab_size < self.mixture.vocab_size:
                raise UserError(
                    f"{subject.path} knows {model.vocab_size} tokens, its data has {self.mixture.vocab_size}."
                )

    def _check_lengths(self) -> None:
        """Opens all text and needles: an impossible length is known before anything is measured."""
        if self.plan.stride and self.plan.stride > min(self.plan.lengths):
            raise UserError(
                f"--stride={self.plan.stride} is more than the shortest length, {min(self.plan.lengths)}: windows "
                "would leave tokens out. Give a smaller one."
            )
        if any(unit.suite in ("perplexity", "beta") or unit.method == "beta" for unit in self.units):
            for source in self._text:
                text = self._held_out(source)
                got, wanted = len(text.score) * text.longest, self.plan.settings.tokens
                if got < wanted - text.longest:
                    self.skipped.append(
                        f"{text.source}: {got:,} held-out tokens scored, not {wanted:,}: there are no more."
                    )
        for source in self._needles if "needles" in self.suites else ():
            for length in self.plan.lengths:
                self._questions(source, length)

    # --------------------------------------------------------------------------------------------------------
    # Measuring

    def _row(self, unit: Unit) -> tuple[Record, bool]:
        """The row of a unit, and whether it was there already."""
        checkpoint, (method, label) = unit.subject.checkpoint, unit.subject.named(unit.method)
        row: Record = {
            "suite": unit.suite,
            "run": unit.subject.run,
            "phase": checkpoint.metadata.get("phase", ""),
            "checkpoint": unit.subject.path,
            "checkpoint_id": unit.subject.weights,
            "step": checkpoint.step,
            "model": unit.subject.model,
            "method": method,
            "label": label,
            "length": unit.length,
            "factor": int(unit.factor) if unit.factor.is_integer() else unit.factor,
            "seed": self.plan.settings.seed,
            "settings": self._settings(unit),
        }
        if unit.suite != "beta":
            row["source"] = self.mixture.sources[unit.source].name
        if unit.suite == "perplexity" and self.plan.stride:
            row["source"] += f", windows sliding by {self.plan.stride}"
        file = self.files[unit.suite]
        if not self.plan.again and (found := file.find(row, same=("checkpoint_id", "label", "settings"))):
            return found, True
        measure = {"perplexity": self._perplexity, "needles": self._needle_accuracy, "beta": self._beta_row}[unit.suite]
        if unit.suite != "beta":
            row |= {"beta": self._scale(unit), "positional": methods.summary(self._layers(unit))}
        row = finite({**row, **measure(unit), "versions": versions()})
        file.put([row])
        return row, False

    def _settings(self, unit: Unit) -> Record:
        """What else a row's numbers depend on; a row measured under other settings is measured again."""
        settings, given = self.plan.settings, {"protocol": perplexity.SUITE.protocol}
        text = {
            "longest": max(self.plan.lengths),
            "tokens": settings.tokens,
            "fit_tokens": settings.fit_tokens,
        }
        text["data"] = [self._fingerprint(i) for i in self._text]
        if unit.suite == "needles":
            given |= {
                "protocol": needles.SUITE.protocol,
                "windows": settings.needle_windows,
                "data": self._fingerprint(unit.source),
            }
            return given | ({"fit": text} if unit.method == "beta" else {})
        if unit.method == "cropped" or (unit.suite == "perplexity" and self.plan.stride):
            given["stride"] = self._stride(unit.subject)
        return given | text

    def _fingerprint(self, source: int) -> Any:
        found = self.mixture.sources[source].fingerprint
        return found if isinstance(found, str) else list(found)

    def _layers(self, unit: Unit) -> tuple[Layer, ...]:
        subject = unit.subject
        return methods.read_with(
            unit.method, subject.checkpoint.layers, unit.length, subject.training_length, self._scale(unit)
        )

    def _scale(self, unit: Unit) -> float:
        """The logit scale a unit is read with."""
        if unit.method == "paper beta":
            return methods.paper_beta(unit.factor)
        return self._beta(unit.subject, unit.length) if unit.method == "beta" else 1.0

    def _stride(self, subject: Subject) -> int:
        return self.plan.stride or max(1, subject.training_length // max(1, self.plan.settings.crop_steps))

    def _remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Where methods coincide, as all do at the training length, what was computed once is used again."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _forward(self, subject: Subject) -> tuple[Forward, Any]:
        forward = self.forwards[subject.checkpoint.model]
        return forward, self._remember(("params", subject.weights), lambda: forward.place(subject.checkpoint.params))

    def _losses(self, subject: Subject, layers: Sequence[Layer]) -> perplexity.Losses:
        forward, params = self._forward(subject)
        return lambda batch: forward.losses(params, batch, layers)

    def _perplexity(self, unit: Unit) -> Record:
        subject, text, layers = unit.subject, self._held_out(unit.source), self._layers(unit)
        losses = self._losses(subject, layers)
        size = min(unit.length, subject.training_length) if unit.method == "cropped" else unit.length
        if self.plan.stride:
            stride = min(self.plan.stride, size)
            found = self._remember(
                ("sliding", subject.id, layers, size, unit.source),
                lambda: perplexity.summarize(
                    *perplexity.Cropped(text, size, stride, losses)(text.longest), len(text.score)
                ),
            )
        elif size < unit.length:
            crops = self._remember(
                ("crops", subject.id, unit.source),
                lambda: perplexity.Cropped(text, size, self._stride(subject), losses),
            )
            found = perplexity.summarize(*crops(unit.length), len(text.score))
        else:
            found = self._remember(
                ("perplexity", subject.id, layers, unit.length, unit.source),
                lambda: perplexity.summarize(*perplexity.window_losses(text, unit.length, losses), len(text.score)),
            )
        return {**found, "tiles": list(text.score_index)}

    def _needle_accuracy(self, unit: Unit) -> Record:
        subject, asked, layers = unit.subject, self._questions(unit.source, unit.length), self._layers(unit)
        forward, params = self._forward(subject)
        crop = subject.training_length if unit.method == "cropped" and unit.length > subject.training_length else None

        def answer() -> Record:
            predicted = needles.predict(asked, lambda tokens, at: forward.predictions(params, tokens, at, layers), crop)
            return needles.score(predicted, asked)

        found = self._remember(("needles", subject.id, layers, unit.length, unit.source, crop), answer)
        return {**found, "guessing": self.mixture.sources[unit.source].needles.guessing}

    def _held_out(self, source: int) -> perplexity.HeldOut:
        settings, name = self.plan.settings, self.mixture.sources[source].name
        return self._remember(
            ("text", source),
            lambda: perplexity.held_out(
                self._data, source, name, max(self.plan.lengths), settings.tokens, settings.fit_tokens,
                self.mixture.tokenizer.eos_id,
            ),
        )  # fmt: skip

    def _questions(self, source: int, length: int) -> needles.Questions:
        settings = self.plan.settings
        return self._remember(
            ("questions", source, length),
            lambda: needles.questions(self._data, source, length, settings.needle_windows, settings.seed),
        )

    # --------------------------------------------------------------------------------------------------------
    # The logit scale

    def _beta(self, subject: Subject, length: int) -> float:
        """The scale fitted for texts of `length`, now if it was not yet; 1 up to the training length."""
        if length <= subject.training_length:
            return 1.0
        return float(self._row(Unit("beta", subject, "beta", length, -1))[0]["beta"])

    def _fit(self, subject: Subject, length: int) -> betas.Fit:
        """Minimizes the loss on the tiles set aside for it; text sources count by their weight."""
        texts = [self._held_out(source) for source in self._text]
        shares = np.asarray([self.mixture.sources[source].weight for source in self._text], np.float64)
        batches = [perplexity.as_batch(text, perplexity.cut(text.fit, length)) for text in texts]

        def loss(beta: float) -> float:
            layers = methods.read_with("beta", subject.checkpoint.layers, length, subject.training_length, beta)
            losses = self._losses(subject, layers)
            means = [np.average(losses(batch), weights=batch["weights"]) for batch in batches]
            return float(np.average(means, weights=shares))

        return self._remember(
            ("fit", subject.id, length), lambda: betas.fit_beta(loss, length / subject.training_length)
        )

    def _beta_row(self, unit: Unit) -> Record:
        fit = self._fit(unit.subject, unit.length)
        texts = [self._held_out(source) for source in self._text]
        tokens = sum(len(text.fit) * (text.longest // unit.length) * unit.length for text in texts)
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
        """Adds to every fitted scale the one c that fits those of all lengths best."""
        file = self.files["beta"]
        for subject in self.subjects:
            # Scales that were fitted on other text say something else.
            data = [self._fingerprint(source) for source in self._text]
            mine = [row for row in file.records if row.get("checkpoint_id") == subject.weights]
            mine = [row for row in mine if (row.get("settings") or {}).get("data") == data and row.get("beta")]
            c = betas.common_coefficient([float(row["beta"]) for row in mine], [float(row["factor"]) for row in mine])
            if mine:
                file.put([{**row, "c_all_lengths": c} for row in mine])
            if c is not None:
                fitted = {int(row["length"]): float(row["beta"]) for row in mine}
                kept = write_logit_scale(subject.checkpoint, c, fitted, str(mine[0]["fitted_on"]))
                where = f"is kept in {kept}" if kept else "is not kept: the checkpoint is not ours. Convert it first"
                self.kept.append(f"{subject.path}: β = 1 {c:+.3f} ln s {where}.")

"""DroPE's logit scale at inference, beta(s) = 1 + c ln s, fitted on held-out tokens (DroPE, section 5)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pe_lab.errors import UserError
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.evaluation.suites.perplexity import (
    HeldOutSettings,
    as_batch,
    cut,
    missing_tokens,
    text_identity,
    text_of,
)
from pe_lab.terminal import bounded

if TYPE_CHECKING:
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record


@dataclass(frozen=True)
class Fit:
    """The logit scale of the least loss at a length."""

    beta: float
    nll_before: float  # the mean loss at scale 1, nats a token
    nll_after: float  # and at `beta`
    evaluations: int  # how many scales were tried


def search_range(factor: float) -> tuple[float, float]:
    """The bounds of beta at length / training length = factor; they allow about twice the paper's c."""
    return 0.5, 1.5 + math.log(max(factor, 1.0))


def fit_beta(loss: Callable[[float], float], factor: float, tolerance: float = 0.01, most: int = 25) -> Fit:
    """Minimizes `loss` (mean nats a token at a logit scale) by Brent's bounded method within `search_range`.

    Scale 1 is kept unless another scale has a lower loss. At most `most` scales are tried.
    """
    from scipy.optimize import minimize_scalar  # half a second to import

    tried = {1.0: loss(1.0)}

    def remember(beta: float) -> float:
        beta = round(float(beta), 4)  # as it is stored, and read again
        if beta not in tried:
            tried[beta] = loss(beta)
        return tried[beta]

    options = {"xatol": tolerance, "maxiter": most - 1}
    minimize_scalar(remember, bounds=search_range(factor), method="bounded", options=options)
    best = min(tried, key=lambda beta: tried[beta])
    return Fit(best, tried[1.0], tried[best], len(tried))


def coefficient(beta: float, factor: float) -> float | None:
    """c from the scale of one length; None at the training length, where every c gives 1."""
    return (beta - 1) / math.log(factor) if factor > 0 and factor != 1 else None


def common_coefficient(betas: Sequence[float], factors: Sequence[float]) -> float | None:
    """The c that fits the scales of several lengths best, by least squares in beta; None if all factors are 1."""
    logs = [math.log(factor) for factor in factors]
    weight = sum(log * log for log in logs)
    return sum(log * (beta - 1) for log, beta in zip(logs, betas, strict=True)) / weight if weight else None


@dataclass(frozen=True)
class LogitScaleSettings(HeldOutSettings):
    """What chooses the held-out tokens, and how many scales are tried."""

    fit_evaluations: int = option(25, "scales that the fit of one tries, at most", bounded(int, 3, 1000))


class LogitScale(TokenSuite):
    """The logit scale of the variant `beta`, or of a description, fitted at each length beyond the training length."""

    name = fits = "beta"
    title = "Beta"
    arrangement = "lines"
    metrics = (
        SuiteMetric("beta", "β", interval="none"),
        SuiteMetric("c", "c", interval="none"),
        SuiteMetric("nll_before", "loss without β", higher_is_better=False, interval="none", decimals=4),
        SuiteMetric("nll_after", "loss with β", higher_is_better=False, interval="none", decimals=4),
    )
    by_default = True
    settings = LogitScaleSettings

    def impossible(self, evaluation: Evaluation) -> str:
        scaled = [s for s in evaluation.subjects if self.fits in s.variants or evaluation.plan.fit_scale]
        if not scaled:
            return (
                "a logit scale is fitted for layers that rotate or have no encoding, are not scaled, and have no logit "
                "scale of their own"
            )
        if not evaluation.text_sources:
            return f"a logit scale is fitted on held-out text, and its data ({evaluation.source_names}) has none"
        if max(evaluation.lengths) <= min(s.training_length for s in scaled):
            # Descriptions then have scale 1.
            return "" if evaluation.plan.fit_scale else "no length is beyond the training length"
        try:
            texts = [text_of(evaluation, source) for source in evaluation.text_sources]
        except UserError as error:
            return str(error).rstrip(".")
        short = [text for text in texts if not len(text.fit)]
        if not short:
            return ""
        return (
            f"data source {short[0].source!r} has held-out text for one sequence of {short[0].tile:,} tokens "
            "and none to fit a logit scale on"
        )

    def sources(self, evaluation: Evaluation) -> Sequence[None]:
        return [None]

    def covers(self, unit: MeasurementUnit) -> bool:
        return unit.variant.fitted and unit.length > unit.variant.training_length

    def check(self, evaluation: Evaluation) -> list[str]:
        return missing_tokens(evaluation)

    def cost(self, settings: LogitScaleSettings, length: int) -> int:
        return min(settings.fit_evaluations, 10) * settings.fit_tokens

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        most = evaluation.settings(self).fit_evaluations
        fewer = {} if most == LogitScaleSettings.fit_evaluations else {"fit_evaluations": most}
        return text_identity(evaluation, evaluation.text_sources) | fewer

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The scale with the smallest loss on the tiles set aside for it; text sources count by their weight."""
        variant, length = unit.variant, unit.length
        texts = [text_of(evaluation, source) for source in evaluation.text_sources]
        shares = np.asarray([evaluation.mixture.sources[i].weight for i in evaluation.text_sources], np.float64)
        batches = [as_batch(text, cut(text.fit, length)) for text in texts]

        def loss(beta: float) -> float:
            losses = evaluation.losses(variant, variant.layers_with_beta(length, beta))
            means = [np.average(losses(batch), weights=batch["weights"]) for batch in batches]
            return float(np.average(means, weights=shares))

        key = ("fit", evaluation.encoding_key(variant, variant.layers, length), length)
        most = evaluation.settings(self).fit_evaluations
        fit = evaluation.remember(key, lambda: fit_beta(loss, unit.factor, most=most))
        tokens = sum(len(text.fit) * (text.tile // length) * length for text in texts)
        names = ", ".join(text.source for text in texts)
        return {
            "c": coefficient(fit.beta, unit.factor),
            "beta": fit.beta,
            "nll_before": fit.nll_before,
            "nll_after": fit.nll_after,
            "fitted_on": f"{tokens:,} held-out tokens of {names}, none of them scored",
            "tiles": [list(text.fit_index) for text in texts],
            "evaluations": fit.evaluations,
        }

    def finish(self, evaluation: Evaluation) -> None:
        """Adds the c that fits the scales of all lengths best to their records.

        That of the checkpoint's own encoding is kept with the checkpoint.
        """
        from pe_lab.checkpoints.checkpoint import write_logit_scale  # which imports JAX
        from pe_lab.parallel import on_first

        file = evaluation.files[self.name]
        data = [evaluation.fingerprint(source) for source in evaluation.text_sources]
        for variant in (variant for variant in evaluation.variants if variant.fitted):
            subject = variant.subject
            # Scales that were fitted on other text do not count.
            mine = [one for one in file.records if one.get("checkpoint_id") == subject.id]
            mine = [one for one in mine if one.get("variant") == variant.name]
            mine = [one for one in mine if (one.get("settings") or {}).get("data") == data and one.get("beta")]
            c = common_coefficient([float(one["beta"]) for one in mine], [float(one["factor"]) for one in mine])
            if mine:
                file.put([{**one, "c_all_lengths": c} for one in mine])
            if c is not None and variant.described is None:
                fitted = {int(one["length"]): float(one["beta"]) for one in mine}
                on = str(mine[0]["fitted_on"])
                kept = on_first(functools.partial(write_logit_scale, subject.checkpoint, c, fitted, on))
                where = f"is kept in {kept}" if kept else "is not kept: the checkpoint is external. Convert it first"
                evaluation.kept.append(f"{subject.path}: β = 1 {c:+.3f} ln s {where}.")


SUITE = LogitScale()

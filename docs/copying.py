"""A suite of one's own: how well a model copies random tokens that it has read once, at any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.terminal import positive


@dataclass(frozen=True)
class CopyingSettings:
    copies: int = option(64, "sequences a length", positive)


class Copying(TokenSuite):
    name = "copying"
    title = "Copying"
    about = "The second half of a sequence repeats the first; the figure is the share of its tokens that are predicted."
    metrics = (SuiteMetric("accuracy", "accuracy", unit="%", interval="wilson"),)
    settings = CopyingSettings

    def sources(self, evaluation):
        return [None]  # it needs no data: tokens are drawn

    def covers(self, unit):
        return unit.variant.crop is None  # a cropped context has not read the first half

    def cost(self, settings, length):
        return settings.copies * length

    def measure(self, evaluation, unit):
        copies, half = evaluation.settings(self).copies, unit.length // 2
        rng = np.random.default_rng([evaluation.seed, unit.length])
        tokens = np.tile(rng.integers(0, evaluation.mixture.vocab_size, (copies, half)), 2)
        at = np.tile(np.arange(half, 2 * half - 1), (copies, 1))
        predict = evaluation.predictions(unit.variant, unit.variant.layers_at(unit.length))
        right = predict(tokens, at) == tokens[:, half + 1 :]
        stderr = right.mean(1).std(ddof=1) / copies**0.5 if copies > 1 else None
        return {"accuracy": float(right.mean()), "queries": right.size, "stderr": stderr}


SUITE = Copying()

"""The help that a model gets at test time: a logit scale, fitted by perplexity on other text, or a paper's constant.

Compared arms get the same help. DroPE scales the logits of dropped models by beta(s) = 1 + c ln s, whose c it fits by
perplexity (section 5), and reports c = 0.412 for its model from scratch (appendix C.2). Here each arm under each
scaling is measured without a scale, with the one that fits it best on text that is not scored, and with the constant.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from pe_lab.lab.claims.values import WindowMean
from pe_lab.results.records import digest
from pe_lab.results.variants import PAPER_COEFFICIENT, paper_beta
from pe_lab.storage import AnyPath

NONE, FITTED, CONSTANT = "none", "fitted", "constant"
HELP = {
    NONE: "no logit scale is fitted; one that is part of an encoding, as YaRN's, stays",
    FITTED: "each arm has the logit scale that fits other text best",
    CONSTANT: "each arm has the logit scale of the paper's constant",
}
TOKENS, FIT_TOKENS, WINDOWS = 32768, 8192, 32


def help_of(term: str) -> str | None:
    """The help that a number has by its name; None of one within the training length, where no scale is needed.

    A cropped context never reads more than that.
    """
    if term.endswith(" cropped"):
        return None
    beyond = [float(x) for x in re.findall(r" (\d+(?:\.\d+)?)x\b", term)]
    if not any(factor > 1 for factor in beyond):
        return None
    if term.endswith((", constant", " paper beta")):
        return CONSTANT
    return FITTED if term.endswith((", fitted", " beta")) else NONE


def helped(
    directory: AnyPath, factors: Sequence[int], scalings: Sequence[str] = ("as trained", "YaRN")
) -> dict[str, float]:
    """Text and needles of a run beyond its training length under scalings, by the help: `text 4x YaRN, fitted`.

    Text is the loss in nats per token, needles the share found. `scale 4x YaRN` is the logit scale that was fitted.
    Numbers are `WindowMean`s. A scaling is left out where it changes no layer.
    """
    import pe_lab  # JAX takes seconds to import, and a claim's command plans first
    from pe_lab.analysis.losses import Streams
    from pe_lab.analysis.sequences import symbol_windows, text_windows
    from pe_lab.evaluation.suites.logit_scale import fit_beta
    from pe_lab.evaluation.variants import Subject, layers_under

    lm = pe_lab.load(directory)
    subject, found = Subject(lm, "model", str(directory)), {}
    for factor in factors:
        length = factor * lm.training_length
        windows, fit_windows = TOKENS // length, FIT_TOKENS // length
        text = text_windows(None, subject, length, windows + fit_windows)
        every = len(text) // fit_windows
        chosen = range(0, every * fit_windows, every)
        chosen_on = text.batch(chosen)
        scored_on = text.batch([n for n in range(len(text)) if n not in chosen])
        asked = symbol_windows(subject, length, WINDOWS, 0)
        choosing, prose, needles = (Streams(lm, one.tokens) for one in (chosen_on, scored_on, asked))
        of_text, of_needles = (digest(one.digests) for one in (scored_on, asked))
        for scaling in scalings:
            layers = layers_under(scaling, lm.layers, length, lm.training_length)
            if scaling != scalings[0] and layers == lm.layers:
                continue  # nothing rotates

            def at(scale, layers=layers):
                return dataclasses.replace(lm, layers=tuple(dataclasses.replace(n, logit_scale=scale) for n in layers))

            def loss(scale, at=at, streams=choosing, targets=chosen_on.targets):
                return float(streams.under(at(scale)).losses(targets).mean())

            fitted = fit_beta(loss, factor, tolerance=0.02).beta
            scales = {"": 1.0, ", fitted": fitted, ", constant": paper_beta(PAPER_COEFFICIENT, factor)}
            for end, scale in scales.items():
                lost = prose.under(at(scale)).losses(scored_on.targets)
                right = needles.under(at(scale)).scores(asked.questions.at, asked.questions.answers)[1]
                found[f"text {factor}x {scaling}{end}"] = _mean(lost, of_text)
                found[f"needles {factor}x {scaling}{end}"] = _mean(right, of_needles)
            found[f"scale {factor}x {scaling}"] = fitted
    return found


def _mean(values: np.ndarray, text: str) -> WindowMean:
    """The mean of values by window and token."""
    return WindowMean(float(values.mean()), values.mean(1, dtype=np.float64).round(6), text)

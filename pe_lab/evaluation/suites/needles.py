"""Accuracy on held-out windows of a needles source: whether the likeliest token is the value that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from pe_lab.config import DataConfig
from pe_lab.data.held_out import needle_windows
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.evaluation.suites.perplexity import bin_edges, standard_error
from pe_lab.terminal import positive

if TYPE_CHECKING:
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record

Predict = Callable[[Int[np.ndarray, "n T"], Int[np.ndarray, "n Q"]], Int[np.ndarray, "n Q"]]


@dataclass(frozen=True)
class NeedleQuestions:
    """Windows with Q questions each."""

    tokens: Int[np.ndarray, "n T"]
    at: Int[np.ndarray, "n Q"]  # the positions before the answers
    answers: Int[np.ndarray, "n Q"]  # the right tokens
    distance: Int[np.ndarray, "n Q"]  # tokens from the answer back to the needle's value


def questions(data: DataConfig, index: int, length: int, windows: int, seed: int) -> NeedleQuestions:
    """The first `windows` held-out windows of `length` tokens of source `index`, which is one of needles."""
    made = needle_windows(data, index, length, seed, "validation").batch(np.arange(windows))
    at = np.nonzero(made["answers"])[1].reshape(windows, -1)
    return NeedleQuestions(
        made["tokens"],
        at,
        np.take_along_axis(made["targets"], at, 1),
        np.take_along_axis(made["distance"], at, 1),
    )


def predict(asked: NeedleQuestions, model: Predict, crop: int | None = None) -> Int[np.ndarray, "n Q"]:
    """The likeliest answer to every question; with `crop`, from the last `crop` tokens of the question alone."""
    length = asked.tokens.shape[1]
    if crop is None or crop >= length:
        return model(asked.tokens, asked.at)
    start = np.maximum(asked.at + 1 - crop, 0)
    places = start[..., None] + np.arange(crop)
    crops = np.take_along_axis(asked.tokens[:, None], places, axis=2).reshape(-1, crop)
    # The compiled function takes Q positions a sequence: the same one, Q times.
    at = np.repeat((asked.at - start).reshape(-1, 1), asked.at.shape[1], axis=1)
    return model(crops, at)[:, 0].reshape(asked.at.shape)


DEPTH_BINS = 10


def score(predicted: Int[np.ndarray, "n Q"], asked: NeedleQuestions) -> dict[str, Any]:
    """The values of a result record: accuracy, its standard error over windows, accuracy by distance and by depth."""
    answers, distance = asked.answers, asked.distance
    right = predicted == answers
    accuracy = float(right.mean())
    edges = bin_edges([1, 4], 2, int(distance.max()) + 1)
    by_distance, distance_count = _by_bin(right, np.digitize(distance, edges) - 1, len(edges) - 1)
    depth = (asked.at + 1 - distance) * DEPTH_BINS // asked.tokens.shape[1]
    by_depth, depth_count = _by_bin(right, depth, DEPTH_BINS)
    return {
        "accuracy": accuracy,
        "queries": int(right.size),
        "windows": len(right),
        # NeedleQuestions of one window share its needles and filler: windows, not questions, are independent.
        "stderr": standard_error((right - accuracy).sum(1), float(right.size)),
        "accuracy_by_window": right.mean(1).tolist(),
        "accuracy_by_distance": {"edges": edges, "accuracy": by_distance, "count": distance_count},
        # Bins of equal width; `depth` has their centres, per cent of the window.
        "by_depth": {
            "depth": [100 * (b + 0.5) / DEPTH_BINS for b in range(DEPTH_BINS)],
            "score": by_depth,
            "count": depth_count,
        },
    }


def _by_bin(
    right: Bool[np.ndarray, "n Q"], place: Int[np.ndarray, "n Q"], bins: int
) -> tuple[list[float | None], list[int]]:
    """The accuracy in each bin (None: empty), and its number of questions."""
    inside = [right[place == b] for b in range(bins)]
    return [float(part.mean()) if part.size else None for part in inside], [part.size for part in inside]


@dataclass(frozen=True)
class NeedleSettings:
    windows: int = option(256, "windows per needle accuracy", positive)


class Needles(TokenSuite):
    name = "needles"
    title = "Needle accuracy"
    protocol = 3  # since 2 also by depth, since 3 by window, with the loss of the answers
    metrics = (SuiteMetric("accuracy", "accuracy", unit="%", interval="wilson"),)
    judged = by_default = True
    settings = NeedleSettings

    def impossible(self, evaluation: Evaluation) -> str:
        if self.sources(evaluation):
            return ""
        return f"it was trained without needles (its data: {evaluation.source_names})"

    def sources(self, evaluation: Evaluation) -> Sequence[int]:
        return [i for i, source in enumerate(evaluation.mixture.sources) if source.needles is not None]

    def check(self, evaluation: Evaluation) -> list[str]:
        for source in self.sources(evaluation):
            for length in evaluation.lengths:
                self._questions(evaluation, source, length)
        return []

    def cost(self, settings: NeedleSettings, length: int) -> int:
        return settings.windows * length

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        return {"windows": evaluation.settings(self).windows, "data": evaluation.fingerprint(unit.source)}

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The accuracy of the answers, of a cropped variant from the last tokens of each question alone."""
        variant, asked = unit.variant, self._questions(evaluation, unit.source, unit.length)
        layers = variant.layers_at(unit.length)
        crop = variant.crop if unit.length > variant.training_length else None

        def answer() -> Record:
            if crop is not None:
                return score(predict(asked, evaluation.predictions(variant, layers), crop), asked)
            log_probability, likeliest = evaluation.scores(variant, layers)(asked.tokens, asked.at, asked.answers)
            nll = -log_probability.mean(1, dtype=np.float64)
            losses = {"answer_nll": float(nll.mean()), "answer_nll_by_window": nll.tolist()}
            return score(np.where(likeliest, asked.answers, -1), asked) | losses

        encoding = evaluation.encoding_key(variant, layers, unit.length)
        found = evaluation.remember((self.name, encoding, unit.length, unit.source, crop), answer)
        return {**found, "guessing": evaluation.mixture.sources[unit.source].needles.guessing}

    def _questions(self, evaluation: Evaluation, source: int, length: int) -> NeedleQuestions:
        from pe_lab.parallel import check_memory  # which imports JAX

        windows = evaluation.settings(self).windows
        needed = 4 * 4 * windows * length  # int32: tokens, targets, distances and answers
        what = f"Asking for needles in {windows:,} windows of {length:,} tokens"
        check_memory(needed, what, advice="Give shorter --lengths, or fewer --windows.")
        return evaluation.remember_data(
            ("questions", source, length),
            lambda: questions(evaluation.data, source, length, windows, evaluation.seed),
        )


SUITE = Needles()

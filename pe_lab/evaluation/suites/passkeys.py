"""Needles hidden in held-out text, all asked for at its end: many answers of one forward pass, scored by likelihood."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.generation.tasks import random_for
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.evaluation.suites.needles import DEPTH_BINS
from pe_lab.evaluation.suites.niah import distinct, draw, needle
from pe_lab.evaluation.suites.perplexity import standard_error
from pe_lab.terminal import positive

if TYPE_CHECKING:
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record

TOKENS_EACH = 128  # of a sequence, at least, for each needle, its question and its answer


@dataclass(frozen=True)
class PasskeySequences:
    """Sequences that end with Q questions and their right answers, which have A tokens together.

    Attributes:
      at: the position before each token of the answers.
      answers: these tokens.
      question: of each of them, from 0 to Q - 1; -1 for padding, where another sequence has more.
      depth: where the needle of each question stands, as a share of the sequence.
    """

    tokens: Int32[np.ndarray, "n T"]
    at: Int32[np.ndarray, "n A"]
    answers: Int32[np.ndarray, "n A"]
    question: Int32[np.ndarray, "n A"]
    depth: Float[np.ndarray, "n Q"]


def passkey_sequences(
    text: Int[np.ndarray, "n T"], count: int, tokenizer: Tokenizer, seed: int = 0
) -> PasskeySequences:
    """Sequences of T tokens: text with RULER's needles at even distances, then questions in another order.

    Every question is followed by the right answer, so that one pass scores all of them.
    """
    made = [_hide(one, count, tokenizer, random_for("passkeys", seed, n)) for n, one in enumerate(text)]
    most = max(len(at) for _, at, _, _ in made)

    def padded(k: int, value: int) -> Int32[np.ndarray, "n A"]:
        rows = [np.pad(one[k], (0, most - len(one[k])), constant_values=value) for one in made]
        return np.stack(rows).astype(np.int32)

    tokens, at = np.stack([one[0] for one in made]), padded(1, 0)
    depth = np.stack([one[3] for one in made])
    return PasskeySequences(tokens, at, np.take_along_axis(tokens, at + 1, 1), padded(2, -1), depth)


def _hide(
    text: Int[np.ndarray, " T"], count: int, tokenizer: Tokenizer, rng: random.Random
) -> tuple[Int32[np.ndarray, " T"], Int[np.ndarray, " A"], Int[np.ndarray, " A"], Float[np.ndarray, " Q"]]:
    """One sequence: its tokens, the positions before the answers, their questions, and the depths of the needles."""

    def encode(part: str) -> list[int]:
        return [int(token) for token in tokenizer.encode_prompt(part, add_special_tokens=False)]

    keys = distinct(lambda: draw("words", rng), count)
    values = distinct(lambda: draw("numbers", rng), count)
    hidden = [encode(f"\n{needle('numbers', *one)}\n") for one in zip(keys, values, strict=True)]
    asked = rng.sample(range(count), count)
    questions, spans = "", []
    for one in asked:
        questions += f"\nThe special magic number for {keys[one]} mentioned in the text is: "
        spans.append((len(questions), len(questions) + len(values[one])))
        questions += f"{values[one]}."
    # In one piece: a tokenizer may join a value to the space before it, or begin every piece with a space.
    end, offsets = tokenizer.encode_with_offsets(questions)
    question = np.full(len(end), -1)
    for n, (start, stop) in enumerate(spans):
        question[(offsets[:, 1] > start) & (offsets[:, 0] < stop)] = n
    filler = len(text) - len(end) - sum(map(len, hidden))
    if filler < 0:
        raise ConfigError(
            f"--passkeys={count}: {count} needles, questions and answers have {len(text) - filler:,} tokens, more than "
            f"the {len(text):,} of the sequence. Give fewer, or longer --lengths."
        )
    places = ((np.arange(count) + 0.5) * filler / count).astype(int).tolist()
    tokens, starts, done = list[int](), list[int](), 0
    for place, one in zip(places, hidden, strict=True):
        tokens += text[done:place].tolist()
        starts.append(len(tokens))
        tokens += one
        done = place
    tokens += [*text[done:filler].tolist(), *end.tolist()]
    found = np.flatnonzero(question >= 0)
    first = len(text) - len(end)
    return np.array(tokens, np.int32), first + found - 1, question[found], np.array(starts)[asked] / len(text)


def score(
    log_probability: Float[np.ndarray, "n A"], likeliest: Bool[np.ndarray, "n A"], asked: PasskeySequences
) -> Record:
    """The values of a record: the share of right answers, and the mean loss of the answers' tokens.

    An answer is right if each of its tokens is the likeliest after the right ones before it.
    """
    count, counted = asked.depth.shape[1], asked.question >= 0
    of_question = asked.question[..., None] == np.arange(count)
    right = ~(~likeliest[..., None] & of_question).any(1)
    accuracy = float(right.mean())
    nll = -np.where(counted, log_probability, 0.0).sum(1, dtype=np.float64) / counted.sum(1)
    bins = np.minimum((asked.depth * DEPTH_BINS).astype(int), DEPTH_BINS - 1)
    inside = [right[bins == b] for b in range(DEPTH_BINS)]
    return {
        "accuracy": accuracy,
        "queries": int(right.size),
        "windows": len(right),
        # Needles of one sequence share its text: sequences are independent.
        "stderr": standard_error((right - accuracy).sum(1), float(right.size)),
        "accuracy_by_window": right.mean(1).tolist(),
        "answer_nll": float(nll.mean()),
        "answer_nll_by_window": nll.tolist(),
        "by_depth": {
            "depth": [100 * (b + 0.5) / DEPTH_BINS for b in range(DEPTH_BINS)],
            "score": [float(part.mean()) if part.size else None for part in inside],
            "count": [int(part.size) for part in inside],
        },
    }


@dataclass(frozen=True)
class PasskeySettings:
    passkey_windows: int = option(4, "sequences with needles that are asked for", positive)
    passkeys: int = option(8, f"needles in each, at most one for {TOKENS_EACH} tokens", positive)


class Passkeys(TokenSuite):
    """RULER's needles in held-out text, read in one pass for all questions."""

    name = "passkeys"
    title = "Passkeys found in text"
    about = (
        "Sequences of held-out text with sentences that give numbers; all numbers are asked for at the end. An answer "
        "is right if each of its tokens is the likeliest after the right ones before it."
    )
    metrics = (
        SuiteMetric("accuracy", "accuracy", unit="%", interval="wilson"),
        SuiteMetric("answer_nll", "loss of the answers", "nats", higher_is_better=False, interval="none"),
    )
    settings = PasskeySettings

    def covers(self, unit: MeasurementUnit) -> bool:
        return unit.variant.crop is None

    def check(self, evaluation: Evaluation) -> list[str]:
        if min(evaluation.lengths) < TOKENS_EACH:
            raise ConfigError(
                f"--suite=passkeys needs sequences of at least {TOKENS_EACH} tokens, not {min(evaluation.lengths)}."
            )
        for source in self.sources(evaluation):
            for length in evaluation.lengths:
                self._sequences(evaluation, source, length)
        return []

    def cost(self, settings: PasskeySettings, length: int) -> int:
        return settings.passkey_windows * length

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The answers at the end of each sequence."""
        variant, asked = unit.variant, self._sequences(evaluation, unit.source, unit.length)
        layers = variant.layers_at(unit.length)

        def answers() -> Record:
            return score(*evaluation.scores(variant, layers)(asked.tokens, asked.at, asked.answers), asked)

        key = (self.name, evaluation.encoding_key(variant, layers, unit.length), unit.length, unit.source)
        return evaluation.remember(key, answers)

    def _sequences(self, evaluation: Evaluation, source: int, length: int) -> PasskeySequences:
        settings = evaluation.settings(self)

        def make() -> PasskeySequences:
            stream = evaluation.mixture.sources[source].prepared.streams["validation"]
            windows = stream.tokens // length
            if windows < settings.passkey_windows:
                raise DataError(
                    f"data source {evaluation.mixture.sources[source].name!r} has {stream.tokens:,} held-out tokens, "
                    f"too few for {settings.passkey_windows} sequences of {length:,}. Give fewer --passkey-windows, or "
                    "shorter --lengths."
                )
            chosen = ((np.arange(settings.passkey_windows) + 0.5) * windows / settings.passkey_windows).astype(int)
            text = stream.gather(chosen * length, length).astype(np.int32)
            count = min(settings.passkeys, length // TOKENS_EACH)
            return passkey_sequences(text, count, evaluation.mixture.tokenizer, evaluation.seed)

        return evaluation.remember_data(("passkeys", source, length), make)


SUITE = Passkeys()

"""Needles hidden in held-out text, scored by likelihood: many questions for each sequence that is read.

They are asked one after another at its end, each with its right answer, in one pass. With distractors each is asked by
itself, in RULER's words: what it follows is the text alone, which is read once, into a KV cache.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.generation.tasks import random_for
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.evaluation.suites.needles import DEPTH_BINS
from pe_lab.evaluation.suites.niah import around, distinct, draw, needle
from pe_lab.evaluation.suites.perplexity import standard_error
from pe_lab.terminal import bounded, positive

if TYPE_CHECKING:
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record

TOKENS_EACH = 128  # of a sequence, at least, for each needle, its question and its answer
NEEDLES = 8  # in a sequence
KINDS = ("words", "numbers")  # of keys and of values
MOST = 31  # distractors: a sequence then has 1,024 continuations


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
    nll = -np.where(counted, log_probability, 0.0).sum(1, dtype=np.float64) / counted.sum(1)
    return _found(right, nll, asked.depth)


def _found(right: Bool[np.ndarray, "n Q"], nll: Float[np.ndarray, " n"], depth: Float[np.ndarray, "n Q"]) -> Record:
    """Accuracy, also by depth, and the loss of the answers, with the standard error over sequences."""
    accuracy = float(right.mean())
    bins = np.minimum((depth * DEPTH_BINS).astype(int), DEPTH_BINS - 1)
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


# ---------------------------------------------------------------------------------------------------------------------
# With distractors: every question by itself


@dataclass(frozen=True)
class DistractorQuestions:
    """Sequences with Q needles, and Q x Q continuations of each: every question with every value as its answer.

    Attributes:
      tokens: RULER's first sentences and the text with its needles.
      suffixes: [n, q, v] is the question for key q with the value of needle v, padded at its end.
      at: the position in a suffix before each token of the value.
      values: these tokens.
      counted: which of them are tokens of the value; the others are padding, where another value has more.
      depth: where the needle of each question stands, as a share of the sequence.
    """

    tokens: Int32[np.ndarray, "n P"]
    suffixes: Int32[np.ndarray, "n Q Q S"]
    at: Int32[np.ndarray, "n Q Q A"]
    values: Int32[np.ndarray, "n Q Q A"]
    counted: Bool[np.ndarray, "n Q Q A"]
    depth: Float[np.ndarray, "n Q"]

    @property
    def length(self) -> int:
        """Tokens of a sequence with its longest continuation."""
        return self.tokens.shape[1] + self.suffixes.shape[-1]

    def cropped(self, crop: int) -> DistractorQuestions:
        """The questions of what a model reads that never reads more than `crop` tokens."""
        kept = self.tokens[:, max(self.length - crop, 0) :]
        return dataclasses.replace(self, tokens=kept)


class _Continuation(NamedTuple):
    tokens: Int[np.ndarray, " s"]
    at: Int[np.ndarray, " a"]  # the positions before the tokens of the value


def distractor_questions(
    text: Int[np.ndarray, "n T"], distractors: int, tokenizer: Tokenizer, seed: int = 0
) -> DistractorQuestions:
    """Sequences of T tokens, the longest question and value included: RULER's prompt around text with needles.

    Keys and values of a sequence differ, and the needles stand anywhere in the text. Each needle is asked for, and has
    the others as distractors.

    Raises:
      ConfigError: needles, question and value have more than T tokens.
    """
    (_, length), count = text.shape, distractors + 1
    rngs = [random_for("passkeys", f"{distractors} distractors", seed, n) for n in range(len(text))]
    keys, values = ([distinct(functools.partial(draw, kind, rng), count) for rng in rngs] for kind in KINDS)
    asked = [
        [[_continuation(key, value, tokenizer) for value in of] for key in names]
        for names, of in zip(keys, values, strict=True)
    ]
    flat = [one for sequence in asked for question in sequence for one in question]
    size, most = max(len(one.tokens) for one in flat), max(len(one.at) for one in flat)
    made = [
        _scatter(one, length - size, list(map(needle, ["numbers"] * count, *of)), tokenizer, rng)
        for one, *of, rng in zip(text, keys, values, rngs, strict=True)
    ]

    def padded(part: Callable[[_Continuation], np.ndarray], width: int) -> Int32[np.ndarray, "n Q Q w"]:
        filled = [np.pad(part(one), (0, width - len(part(one)))) for one in flat]
        return np.stack(filled).reshape(len(text), count, count, width).astype(np.int32)

    suffixes, at = padded(lambda one: one.tokens, size), padded(lambda one: one.at, most)
    counted = padded(lambda one: np.ones(len(one.at), np.int32), most) > 0
    values_at = np.take_along_axis(suffixes, np.minimum(at + 1, size - 1), axis=-1)
    tokens, depth = (np.stack([one[k] for one in made]) for k in (0, 1))
    return DistractorQuestions(tokens, suffixes, at, values_at, counted, depth / length)


def _continuation(key: str, value: str, tokenizer: Tokenizer) -> _Continuation:
    """RULER's question, with DroPE's colon, and a value as its answer."""
    _, question = around("numbers", key, single=True)
    # In one piece: a tokenizer may join the value to the space before it.
    question += ": "
    tokens, offsets = tokenizer.encode_with_offsets(question + value)
    return _Continuation(tokens, np.flatnonzero(offsets[:, 1] > len(question)) - 1)


def _scatter(
    text: Int[np.ndarray, " T"], size: int, needles: Sequence[str], tokenizer: Tokenizer, rng: random.Random
) -> tuple[Int32[np.ndarray, " P"], Int[np.ndarray, " Q"]]:
    """`size` tokens: RULER's first sentences, and text with needles at random places; and where each one begins."""
    before, _ = around("numbers", "", single=True)
    head = tokenizer.encode_prompt(before).tolist()
    hidden = [tokenizer.encode_prompt(f"\n{one}\n", add_special_tokens=False).tolist() for one in needles]
    filler = size - len(head) - sum(map(len, hidden))
    if filler < 0:
        raise ConfigError(
            f"--distractors={len(needles) - 1}: {len(needles)} needles and a question have {len(text) - filler:,} "
            f"tokens, more than the {len(text):,} of the sequence. Give fewer, or longer --lengths."
        )
    places = sorted((rng.randint(0, filler), n) for n in range(len(needles)))
    tokens, starts, done = head, np.zeros(len(needles), int), 0
    for place, n in places:
        tokens += text[done:place].tolist()
        starts[n] = len(tokens)
        tokens += hidden[n]
        done = place
    return np.array([*tokens, *text[done:filler].tolist()], np.int32), starts


def score_values(
    log_probability: Float[np.ndarray, "n Q Q A"], likeliest: Bool[np.ndarray, "n Q Q A"], asked: DistractorQuestions
) -> Record:
    """The values of a record: the share found by greedy decoding, and what the likelihoods of all values tell.

    `choice` is the share of questions whose value is the likeliest of those in the text; guessing has `chance`.
    `key_gain` is how much likelier a value is after its own key than after the others, in nats: 0 of a model that does
    not tell keys apart, whatever it thinks of the values.
    """
    count = asked.depth.shape[1]
    own = np.arange(count)
    right = (likeliest | ~asked.counted).all(-1)[:, own, own]
    total = np.where(asked.counted, log_probability, 0.0).sum(-1, dtype=np.float64)
    nll = -total[:, own, own].sum(1) / asked.counted[:, own, own].sum((1, 2))
    found = _found(right, nll, asked.depth)
    if count == 1:
        return found
    chosen = total.argmax(2) == own
    others = (total.sum(1) - total[:, own, own]) / (count - 1)
    gain = (total[:, own, own] - others).mean(1)
    choice, mean_gain = float(chosen.mean()), float(gain.mean())
    return found | {
        "choice": choice,
        "choice_stderr": standard_error((chosen - choice).sum(1), float(chosen.size)),
        "choice_by_window": chosen.mean(1).tolist(),
        "chance": 1 / count,
        "key_gain": mean_gain,
        "key_gain_stderr": standard_error(gain - mean_gain, float(len(gain))),
        "key_gain_by_window": gain.tolist(),
    }


@dataclass(frozen=True)
class PasskeySettings:
    passkey_windows: int = option(4, "sequences with needles that are asked for", positive)
    passkeys: int | None = option(
        None, f"needles in each, at most one for {TOKENS_EACH} tokens (default {NEEDLES})", positive
    )
    distractors: int | None = option(
        None,
        "other needles beside each that is asked for; every one is asked for by itself, in RULER's words",
        bounded(int, 0, MOST),
    )


class Passkeys(TokenSuite):
    """RULER's needles in held-out text, read in one pass for all questions."""

    name = "passkeys"
    title = "Passkeys found in text"
    about = (
        "Sequences of held-out text with sentences that give numbers; all numbers are asked for at the end. An answer "
        "is right if each of its tokens is the likeliest after the right ones before it. With distractors each number "
        "is asked for by itself."
    )
    metrics = (
        SuiteMetric("accuracy", "accuracy", unit="%", interval="wilson"),
        SuiteMetric("answer_nll", "loss of the answers", "nats", higher_is_better=False, interval="none"),
        SuiteMetric("choice", "choice among the values", unit="%"),
        SuiteMetric("key_gain", "gain by the key", "nats"),
    )
    settings = PasskeySettings

    def impossible_in_training(self, settings: PasskeySettings) -> str:
        return "" if settings.distractors is None else "questions with distractors need a KV cache"

    def covers(self, unit: MeasurementUnit) -> bool:
        return unit.variant.crop is None or unit.settings.distractors is not None

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        settings = evaluation.settings(self)
        given = {"data": evaluation.fingerprint(unit.source), "passkey_windows": settings.passkey_windows}
        if settings.distractors is not None:
            return given | {"distractors": settings.distractors}
        return given | {"passkeys": settings.passkeys or NEEDLES}

    def check(self, evaluation: Evaluation) -> list[str]:
        settings = evaluation.settings(self)
        if settings.distractors is not None:
            return self._check_distractors(evaluation)
        if min(evaluation.lengths) < TOKENS_EACH:
            raise ConfigError(
                f"--suite=passkeys needs sequences of at least {TOKENS_EACH} tokens, not {min(evaluation.lengths)}."
            )
        for source in self.sources(evaluation):
            for length in evaluation.lengths:
                self._sequences(evaluation, source, length)
        return []

    def _check_distractors(self, evaluation: Evaluation) -> list[str]:
        if evaluation.settings(self).passkeys is not None:
            raise ConfigError(
                "--passkeys and --distractors: with distractors every sequence has one needle more than these. Leave "
                "--passkeys out."
            )
        for source in self.sources(evaluation):
            for length in evaluation.lengths:
                size = self._questions(evaluation, source, length).suffixes.shape[-1]
                for variant in evaluation.variants:
                    crop = variant.crop if length > variant.training_length else None
                    if crop is not None and crop <= size:
                        raise ConfigError(
                            f"--suite=passkeys: a question has {size} tokens, and {variant.label} reads {crop}. Leave "
                            "this variant out: --variants."
                        )
        return []

    def cost(self, settings: PasskeySettings, length: int) -> int:
        count = 0 if settings.distractors is None else settings.distractors + 1
        return settings.passkey_windows * (length + TOKENS_EACH // 2 * count**2)

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The answers at the end of each sequence."""
        if evaluation.settings(self).distractors is not None:
            return self._measure_values(evaluation, unit)
        variant, asked = unit.variant, self._sequences(evaluation, unit.source, unit.length)
        layers = variant.layers_at(unit.length)

        def answers() -> Record:
            return score(*evaluation.scores(variant, layers)(asked.tokens, asked.at, asked.answers), asked)

        key = (self.name, evaluation.encoding_key(variant, layers, unit.length), unit.length, unit.source)
        return evaluation.remember(key, answers)

    def _measure_values(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """Every question by itself; of a cropped variant after the last tokens of its training length alone."""
        variant, asked = unit.variant, self._questions(evaluation, unit.source, unit.length)
        crop = variant.crop if unit.length > variant.training_length else None
        layers = variant.layers_at(unit.length)

        def answers() -> Record:
            shown = asked if crop is None else asked.cropped(crop)
            flat = [one.reshape(len(one), -1, one.shape[-1]) for one in (asked.suffixes, asked.at, asked.values)]
            scores = evaluation.branch_scores(variant, layers)(shown.tokens, *flat)
            return score_values(*(one.reshape(asked.values.shape) for one in scores), asked)

        encoding = evaluation.encoding_key(variant, layers, unit.length)
        return evaluation.remember((self.name, encoding, unit.length, unit.source, crop), answers)

    def _sequences(self, evaluation: Evaluation, source: int, length: int) -> PasskeySequences:
        count = min(evaluation.settings(self).passkeys or NEEDLES, length // TOKENS_EACH)

        def make() -> PasskeySequences:
            text = self._text(evaluation, source, length)
            return passkey_sequences(text, count, evaluation.mixture.tokenizer, evaluation.seed)

        return evaluation.remember_data(("passkeys", source, length), make)

    def _questions(self, evaluation: Evaluation, source: int, length: int) -> DistractorQuestions:
        distractors = evaluation.settings(self).distractors

        def make() -> DistractorQuestions:
            text = self._text(evaluation, source, length)
            return distractor_questions(text, distractors, evaluation.mixture.tokenizer, evaluation.seed)

        return evaluation.remember_data(("passkeys", source, length), make)

    def _text(self, evaluation: Evaluation, source: int, length: int) -> Int32[np.ndarray, "n T"]:
        """Held-out windows of a source, at even distances."""
        wanted = evaluation.settings(self).passkey_windows
        stream = evaluation.mixture.sources[source].prepared.streams["validation"]
        windows = stream.tokens // length
        if windows < wanted:
            raise DataError(
                f"data source {evaluation.mixture.sources[source].name!r} has {stream.tokens:,} held-out tokens, "
                f"too few for {wanted} sequences of {length:,}. Give fewer --passkey-windows, or shorter --lengths."
            )
        chosen = ((np.arange(wanted) + 0.5) * windows / wanted).astype(int)
        return stream.gather(chosen * length, length).astype(np.int32)


SUITE = Passkeys()

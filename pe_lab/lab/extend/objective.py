"""What a search minimizes: losses on tokens of held-out data that need a far context, for a population at once."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Float64, Int32

from pe_lab.config import DataConfig
from pe_lab.data.held_out import needle_windows
from pe_lab.data.mixture import MixtureSource, open_mixture
from pe_lab.errors import ConfigError, DataError, did_you_mean
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites.long_range import choose_documents, default_short, document_sizes, key_tokens
from pe_lab.evaluation.suites.passkeys import TOKENS_EACH, passkey_sequences
from pe_lab.lab.extend.numbers import FEWEST
from pe_lab.results.records import digest
from pe_lab.storage import AnyPath, is_file, read_json, write_json

if TYPE_CHECKING:
    from pe_lab.evaluation.variants import Subject
    from pe_lab.positional import Layer

PASSKEYS = 8  # in a sequence, at most


@dataclass(frozen=True)
class ObjectivePart:
    """Sequences with the targets that count, of one kind.

    Attributes:
      name: of `OBJECTIVES`.
      weights: of the targets.
    """

    name: str
    tokens: Int32[np.ndarray, "n T"]
    targets: Int32[np.ndarray, "n T"]
    weights: Float32[np.ndarray, "n T"]

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """For `Forward`."""
        return {"tokens": self.tokens, "targets": self.targets, "weights": self.weights}


@dataclass(frozen=True)
class Objective:
    """The sum over parts of the mean loss on the targets that count, nats.

    Attributes:
      parts: their names say what counts.
      length: of all sequences, in tokens.
      read_before: {length: tokens of sequences of it that were read to find the targets}.
    """

    parts: tuple[ObjectivePart, ...]
    length: int
    read_before: Mapping[int, int]

    @property
    def tokens(self) -> int:
        """That one candidate reads."""
        return sum(part.tokens.size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A digest of all sequences and weights."""
        return digest([[p.name, p.tokens.tolist(), np.flatnonzero(p.weights).tolist()] for p in self.parts], 24)

    def describe(self) -> str:
        """One line: which targets of how many sequences."""
        parts = [f"{int((p.weights > 0).sum()):,} targets of {len(p.tokens)} ({p.name})" for p in self.parts]
        return f"{' and '.join(parts)} sequences of {self.length:,} tokens"

    def losses(
        self, forward: Forward, params: Any, population: Sequence[Sequence[Layer]]
    ) -> Float64[np.ndarray, "P parts"]:
        """The mean loss of each part under each of P encodings; the objective is the sum over parts."""
        columns = []
        for part in self.parts:
            sums = forward.population_losses(params, part.batch, population).astype(np.float64)
            columns.append(sums.sum(1) / part.weights.sum(dtype=np.float64))
        return np.stack(columns, axis=1)


Losses = Callable[[Int32[np.ndarray, "n W"]], Float32[np.ndarray, "n T"]]


def make_objective(
    names: Sequence[str],
    data: DataConfig,
    subject: Subject,
    forward: Forward,
    params: Any,
    length: int,
    sequences: int,
    show: Callable[[str], None] = lambda line: None,
    kept: AnyPath | None = None,
) -> Objective:
    """The objective of these names on held-out data that no suite scores.

    Args:
      names: of `OBJECTIVES`; (): `default_objective`, with all tokens of the documents where too few need a far one.
      sequences: of each part, at most.
      show: prints a line for each document in which far tokens are looked for.
      kept: a file for the far tokens, which are then found once.

    Raises:
      ConfigError: there is no such objective, or nothing of the kind in the data.
      DataError: too few documents or tokens that need a far context.
    """
    for name in names:
        if name not in OBJECTIVES:
            raise ConfigError(f"--objective: there is no '{name}'. {did_you_mean(name, list(OBJECTIVES))}")
    layers, read = subject.lm.layers, collections.Counter[int]()

    def losses(windows: Int32[np.ndarray, "n W"]) -> Float32[np.ndarray, "n T"]:
        tokens = windows[:, :-1]
        read[tokens.shape[1]] += tokens.size
        return forward.losses(params, {"tokens": tokens, "targets": windows[:, 1:]}, layers)

    opened = _Opened(data, subject.training_length, losses, length, sequences, not names, show, subject.id, kept, read)
    parts = tuple(OBJECTIVES[name](opened) for name in names or default_objective(data, length))
    return Objective(parts, length, read)


def default_objective(data: DataConfig, length: int) -> tuple[str, ...]:
    """Tokens of documents that need a far context, and the needles that the model was trained with, or passkeys."""
    if any(source.needles is not None for source in open_mixture(data).sources):
        return ("long_range", "needles")
    return ("long_range", "passkeys") if length >= TOKENS_EACH else ("long_range",)


@dataclass(frozen=True)
class _Opened:
    """What parts are made of."""

    data: DataConfig
    training_length: int
    losses: Losses
    length: int
    sequences: int
    falls_back: bool  # to all tokens, where too few need a far context
    show: Callable[[str], None]
    reference: str  # the id of the checkpoint that finds far tokens
    kept: AnyPath | None
    read: collections.Counter[int]

    def texts(self) -> list[MixtureSource]:
        """The sources that hold out text."""
        sources = [one for one in open_mixture(self.data).sources if one.prepared is not None]
        return [one for one in sources if one.tokens("validation") and not one.prepared.streams["validation"].has_loss]


def _documents(opened: _Opened) -> Int32[np.ndarray, "n W"]:
    """The first tokens of held-out documents that no suite scores."""
    texts = opened.texts()
    found = []
    for source in texts:
        stream = source.prepared.streams["validation"]
        starts = choose_documents(stream, opened.length, -(-opened.sequences // len(texts)), "fit")
        found.append(stream.gather(np.asarray(starts, int), opened.length + 1).astype(np.int32))
    documents = np.concatenate(found) if found else np.zeros((0, opened.length + 1), np.int32)
    if len(documents):
        return documents[: opened.sequences]
    longest = max((int(document_sizes(s.prepared.streams["validation"]).max(initial=0)) for s in texts), default=0)
    raise DataError(
        f"A search at {opened.length:,} tokens needs two held-out documents of more than that; the longest has "
        f"{longest:,}. Search at a shorter --length, or hold out more (data.validation_fraction)."
    )


def _text(opened: _Opened) -> ObjectivePart:
    documents = _documents(opened)
    return _part("text", documents, np.ones((len(documents), opened.length), np.float32))


def _long_range(opened: _Opened) -> ObjectivePart:
    documents, short = _documents(opened), default_short(opened.training_length)
    about = {"reference": opened.reference, "documents": digest(documents.tolist(), 24), "short": short}
    found = _read_far(opened, about)
    for n, document in enumerate(documents[len(found) :], len(found) + 1):
        opened.show(f"document {n} of {len(documents)}: which tokens need a far context")
        reach, stride = opened.training_length + 1, max(1, short // 4)
        found.append(key_tokens(document, opened.losses, reach, short, stride).tolist())
        if opened.kept is not None:
            read = {str(length): tokens for length, tokens in opened.read.items()}
            write_json(opened.kept, {**about, "positions": found, "read": read})
    weights = np.zeros((len(documents), opened.length), np.float32)
    for counted, positions in zip(weights, found, strict=True):
        counted[np.array(positions, int) - 1] = 1
    if (count := int(weights.sum())) < FEWEST:
        if opened.falls_back:
            return _part("text", documents, np.ones_like(weights))
        raise DataError(
            f"Of {weights.size:,} held-out tokens, {count} need more than {short:,} tokens of context: too few to "
            "search with. Give more --sequences, other data, or --objective=text."
        )
    return _part("long_range", documents, weights)


def _read_far(opened: _Opened, about: Mapping[str, Any]) -> list[list[int]]:
    """The positions of far tokens in the documents that were looked through before, whose cost it adds."""
    if opened.kept is None or not is_file(opened.kept):
        return []
    found = read_json(opened.kept)
    if {key: found.get(key) for key in about} != about:
        return []
    opened.read.update({int(length): tokens for length, tokens in found["read"].items()})
    return found["positions"]


def _needles(opened: _Opened) -> ObjectivePart:
    sources = open_mixture(opened.data).sources
    index = next((n for n, source in enumerate(sources) if source.needles is not None), None)
    if index is None:
        raise ConfigError("--objective=needles: the data has no needles. Give --objective=passkeys.")
    # Suites ask the first windows of other seeds.
    made = needle_windows(opened.data, index, opened.length, 2**31 - 1, "validation").batch(np.arange(opened.sequences))
    weights = made["answers"].astype(np.float32)
    return ObjectivePart("needles", made["tokens"].astype(np.int32), made["targets"].astype(np.int32), weights)


def _passkeys(opened: _Opened) -> ObjectivePart:
    texts = opened.texts()
    if not texts or opened.length < TOKENS_EACH:
        raise ConfigError(f"--objective=passkeys needs text, and at least {TOKENS_EACH} tokens.")
    stream = texts[0].prepared.streams["validation"]
    windows = min(opened.sequences, stream.tokens // opened.length)
    if not windows:
        raise DataError(f"{texts[0].name} has {stream.tokens:,} held-out tokens, too few for {opened.length:,}.")
    text = stream.gather(np.arange(windows) * opened.length, opened.length).astype(np.int32)
    count = min(PASSKEYS, opened.length // TOKENS_EACH)
    asked = passkey_sequences(text, count, open_mixture(opened.data).tokenizer, seed=-1)  # suites have others
    weights = np.zeros(text.shape, np.float32)
    for counted, at, question in zip(weights, asked.at, asked.question, strict=True):
        counted[at[question >= 0]] = 1
    return ObjectivePart("passkeys", asked.tokens, np.roll(asked.tokens, -1, axis=1), weights)


def _part(name: str, documents: Int32[np.ndarray, "n W"], weights: Float32[np.ndarray, "n T"]) -> ObjectivePart:
    return ObjectivePart(name, documents[:, :-1], documents[:, 1:], weights)


OBJECTIVES: dict[str, Callable[[_Opened], ObjectivePart]] = {
    "long_range": _long_range,
    "needles": _needles,
    "passkeys": _passkeys,
    "text": _text,
}

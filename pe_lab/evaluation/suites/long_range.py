"""Loss on the tokens of long documents that need a far context: LongPPL (Fang et al. 2024, arXiv 2410.23771)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Int, Int64

from pe_lab import storage
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.evaluation.suites.perplexity import bin_edges, standard_error
from pe_lab.results.records import as_dict, digest
from pe_lab.terminal import positive

if TYPE_CHECKING:
    from pe_lab.data.shards import TokenStream
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.evaluation.variants import Subject
    from pe_lab.results.records import Record

GAIN, KNOWN = 2.0, 2.0  # nats: a far context makes a key token's loss smaller by more than GAIN, to less than KNOWN
READ_FOR_EACH = 9  # tokens that are read to tell whether a token is a key token: 5 in short contexts, 4 in far ones
SHORT = 4096  # tokens of the short context, and a quarter of the reference's training length at most
ReadLosses = Callable[[Int[np.ndarray, "n W"]], Float[np.ndarray, "n T"]]  # sequences of W = T + 1 tokens -> losses


@dataclass(frozen=True)
class KeyTokens:
    """Documents, and those of their tokens that need a far context.

    Attributes:
      starts: of the documents among the held-out tokens of their source.
      length: their tokens that were looked at, from the first one on.
      positions: of the key tokens in each document, from 1 to `length`.
      about: what chose them, as JSON: the protocol, the data and the reference.
    """

    starts: tuple[int, ...]
    length: int
    positions: tuple[Int64[np.ndarray, " _"], ...]
    about: Mapping[str, Any]

    def weights(self, length: int) -> Float[np.ndarray, "n T"]:
        """1 for the targets of the first `length` that are key tokens, else 0."""
        found = np.zeros((len(self.starts), length), np.float32)
        for weights, positions in zip(found, self.positions, strict=True):
            weights[positions[positions <= length] - 1] = 1
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        positions = [one.tolist() for one in self.positions]
        return {**self.about, "starts": list(self.starts), "length": self.length, "positions": positions}


def key_tokens(
    document: Int[np.ndarray, " W"], losses: ReadLosses, reach: int, short: int, stride: int
) -> Int64[np.ndarray, " keys"]:
    """The positions of the tokens that need a far context, ascending: LongPPL's criterion (its eq. 5 and 6).

    A token is one if its loss is more than `GAIN` lower with the far context than with the short one, and lower than
    `KNOWN`. The short context of a token begins at the largest multiple of `stride` that is at least `short` tokens
    before it. The far context is the whole document, as in LongPPL, where the reference can read that. Further on it is
    what lies before the token in a window of `reach` tokens; windows advance by a quarter of that.

    Args:
      losses: of the reference.
      reach: the most tokens that the reference reads at once, more than `short`.
    """
    total = len(document)
    near = _by_token(document, np.arange(0, total - short, stride), short, stride, losses)
    reach = min(reach, total)
    step = max(1, reach // 4)
    far = _by_token(document, np.arange(step, total - reach + step, step), reach - step, step, losses)
    far[1:reach] = losses(document[None, :reach])[0]
    return np.flatnonzero((near - far > GAIN) & (far < KNOWN)).astype(np.int64)


def _by_token(
    document: Int[np.ndarray, " W"], starts: Int[np.ndarray, " n"], context: int, stride: int, losses: ReadLosses
) -> Float[np.ndarray, " W"]:
    """The loss of each token, of the `stride` tokens after `context` tokens from each start; NaN of other tokens."""
    found = np.full(len(document), np.nan)
    if not len(starts):
        return found
    places = starts[:, None] + np.arange(context + stride)
    # After the end comes any token: no earlier loss depends on it.
    scored = losses(document[np.minimum(places, len(document) - 1)])[:, context - 1 :]
    inside = places[:, context:] < len(document)
    found[places[:, context:][inside]] = scored[inside]
    return found


def default_short(reach: int) -> int:
    """The tokens of the short context where the reference reads `reach` tokens."""
    return max(1, min(SHORT, reach // 4))


# --------------------------------------------------------------------------------------------------------------------
# The suite


@dataclass(frozen=True)
class LongRangeSettings:
    documents: int = option(32, "held-out documents of at least the longest length", positive)
    reference: str = option(
        "",
        "what chooses the tokens that need a far context: a checkpoint, or a file of key tokens that an evaluation has "
        "written (default: the model itself, which reads its training length)",
        metavar="CHECKPOINT|FILE.json",
    )
    short: int = option(
        0, f"tokens of the short context (default: {SHORT}, at most a quarter of what the reference reads)", positive
    )


class LongRange(TokenSuite):
    """LongPPL on held-out documents, and the loss of all of their tokens by position."""

    name = "long_range"
    title = "Loss on tokens that need a far context"
    about = (
        "Perplexity on the tokens of long documents whose loss falls by more than 2 nats, to less than 2, when a "
        "reference model reads more than a short context before them (LongPPL)."
    )
    metrics = (
        SuiteMetric("perplexity", "LongPPL", higher_is_better=False, interval="log"),
        SuiteMetric("all_nll", "loss of all tokens", "nats", higher_is_better=False, interval="none"),
    )
    settings = LongRangeSettings

    def impossible_in_training(self, settings: LongRangeSettings) -> str:
        if settings.reference:
            return ""
        return "each measurement would choose tokens of its own: set evaluation.options.reference"

    def impossible(self, evaluation: Evaluation) -> str:
        longest, texts = max(evaluation.lengths), self._texts(evaluation)
        if not texts:
            return f"its data ({evaluation.source_names}) holds out no text"
        if self.sources(evaluation):
            return ""
        if evaluation.settings(self).reference.endswith(".json"):
            keys = self._of_file(evaluation)
            return f"{evaluation.settings(self).reference} has key tokens of other data, {keys.about['source']}"
        found = max((int(document_sizes(_stream(evaluation, source)).max(initial=0)) for source in texts), default=0)
        return f"no held-out document has {longest + 1:,} tokens; the longest has {found:,}"

    def sources(self, evaluation: Evaluation) -> Sequence[int]:
        longest = max(evaluation.lengths)
        found = [i for i in self._texts(evaluation) if choose_documents(_stream(evaluation, i), longest, 1)]
        if not evaluation.settings(self).reference.endswith(".json"):
            return found
        of_file = self._of_file(evaluation).about["data"]  # of one source
        return [i for i in found if evaluation.fingerprint(i) == of_file]

    def _texts(self, evaluation: Evaluation) -> list[int]:
        prepared = {i: evaluation.mixture.sources[i].prepared for i in evaluation.text_sources}
        return [i for i, one in prepared.items() if not one.streams["validation"].has_loss]  # no chats

    def covers(self, unit: MeasurementUnit) -> bool:
        return unit.variant.crop is None

    def check(self, evaluation: Evaluation) -> list[str]:
        settings, sentences = evaluation.settings(self), []
        if settings.reference.endswith(".json"):
            return []
        for source in self.sources(evaluation):
            longest = max(evaluation.lengths)
            count = len(choose_documents(_stream(evaluation, source), longest, settings.documents))
            if count < settings.documents:
                name = evaluation.mixture.sources[source].name
                sentences.append(
                    f"{name}: {count:,} held-out documents of more than {longest:,} tokens are scored, not "
                    f"{settings.documents:,}: there are no more, and every second one is left for searches."
                )
        for subject in evaluation.subjects:
            reference = self._reference(evaluation, subject)
            short = self._short(evaluation, reference)
            if short + 1 >= min(evaluation.lengths[-1], reference.training_length):
                raise ConfigError(
                    f"--short={short}: the reference {reference.path} reads {reference.training_length:,} tokens, and "
                    "nothing is further away than the short context. Give a smaller one."
                )
        return sentences

    def cost(self, settings: LongRangeSettings, length: int) -> int:
        return settings.documents * length

    def cost_before(self, evaluation: Evaluation) -> int:
        if evaluation.settings(self).reference.endswith(".json"):
            return 0
        abouts = [
            self._about(evaluation, subject, source)
            for subject in evaluation.subjects
            for source in self.sources(evaluation)
        ]
        missing = {digest(dict(one)): one for one in abouts if not storage.is_file(self._file(evaluation, one))}
        return sum(READ_FOR_EACH * len(one["starts"]) * one["length"] for one in missing.values())

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        return {
            "data": evaluation.fingerprint(unit.source),
            "key_tokens": digest(dict(self._about(evaluation, unit.variant.subject, unit.source))),
        }

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The losses of the first tokens of all documents: of key tokens, and of all by position."""
        variant, length = unit.variant, unit.length
        keys = self._keys(evaluation, variant.subject, unit.source)
        layers = variant.layers_at(length)

        def summary() -> Record:
            documents = _documents(evaluation, unit.source, keys.starts, length)
            losses = evaluation.losses(variant, layers)(_batch(documents))
            return summarize(losses, keys.weights(length))

        encoding = evaluation.encoding_key(variant, layers, length)
        key = (self.name, encoding, length, unit.source, digest(dict(keys.about)))
        return {**evaluation.remember(key, summary), "reference": keys.about["reference"], "short": keys.about["short"]}

    # ----------------------------------------------------------------------------------------------------------------
    # Key tokens

    def _keys(self, evaluation: Evaluation, subject: Subject, source: int) -> KeyTokens:
        """The key tokens for a subject: those of the file, or found by the reference and kept beside the records."""
        if evaluation.settings(self).reference.endswith(".json"):
            return self._of_file(evaluation)
        about = self._about(evaluation, subject, source)
        return evaluation.remember_data(
            ("key tokens", digest(dict(about))), functools.partial(self._find, evaluation, subject, source, about)
        )

    def _file(self, evaluation: Evaluation, about: Mapping[str, Any]) -> storage.AnyPath:
        return evaluation.directory / f"{self.name}.key_tokens" / f"{digest(dict(about))}.json"

    def _find(self, evaluation: Evaluation, subject: Subject, source: int, about: Mapping[str, Any]) -> KeyTokens:
        from pe_lab.parallel import on_first

        file = self._file(evaluation, about)
        known = on_first(lambda: read_key_tokens(file) if storage.is_file(file) else None)
        if known is not None:
            return known
        reference = self._reference(evaluation, subject)
        length, starts = about["length"], about["starts"]
        documents = _documents(evaluation, source, starts, length)
        losses, short = self._losses(evaluation, reference), about["short"]
        stride = max(1, short // 4)
        positions = []
        for n, document in enumerate(documents):
            evaluation.out.print(f"document {n + 1} of {len(documents)}: which tokens need a far context")
            positions.append(key_tokens(document, losses, reference.training_length + 1, short, stride))
        found = KeyTokens(tuple(starts), length, tuple(positions), about)
        on_first(lambda: storage.write_json(file, found.to_json()))
        return found

    def _about(self, evaluation: Evaluation, subject: Subject, source: int) -> Mapping[str, Any]:
        """What the key tokens of a source depend on."""
        if evaluation.settings(self).reference.endswith(".json"):
            return self._of_file(evaluation).about
        reference, longest = self._reference(evaluation, subject), max(evaluation.lengths)
        return {
            "protocol": self.protocol,
            "source": evaluation.mixture.sources[source].name,
            "data": evaluation.fingerprint(source),
            "reference": {"checkpoint": reference.path, "id": reference.id, "reads": reference.training_length},
            "short": self._short(evaluation, reference),
            "length": longest,
            "starts": choose_documents(_stream(evaluation, source), longest, evaluation.settings(self).documents),
        }

    def _of_file(self, evaluation: Evaluation) -> KeyTokens:
        """The key tokens of the file that `reference` names."""
        given, longest = evaluation.settings(self).reference, max(evaluation.lengths)
        keys = evaluation.remember_data(
            ("key tokens", given), lambda: read_key_tokens(storage.path("--reference", given))
        )
        if keys.length < longest:
            raise DataError(
                f"--reference='{given}' has key tokens of documents of {keys.length:,} tokens, and {longest:,} are "
                "asked for. Name a checkpoint, which finds them anew."
            )
        return keys

    def _reference(self, evaluation: Evaluation, subject: Subject) -> Subject:
        given = evaluation.settings(self).reference
        if not given:
            return subject
        return evaluation.remember_data(("reference", given), lambda: _load(evaluation, given))

    def _short(self, evaluation: Evaluation, reference: Subject) -> int:
        return evaluation.settings(self).short or default_short(reference.training_length)

    def _losses(self, evaluation: Evaluation, reference: Subject) -> ReadLosses:
        """The losses of a reference as it was trained."""
        from pe_lab.evaluation.scoring.forward import Forward
        from pe_lab.model import complete
        from pe_lab.positional import Alibi

        layers, checkpoint = reference.lm.layers, reference.checkpoint
        if own := next((variant for variant in evaluation.variants if variant.subject is reference), None):
            losses = evaluation.losses(own, layers)
            return lambda windows: losses(_batch(windows))
        slopes = any(isinstance(layer.encoding, Alibi) for layer in layers)
        forward = Forward(complete(checkpoint.model), slopes, evaluation.devices)
        forward.on_tokens = evaluation.on_tokens
        params = forward.place(checkpoint.params)
        return lambda windows: forward.losses(params, _batch(windows), layers)


SUITE = LongRange()


def summarize(losses: Float[np.ndarray, "n T"], weights: Float[np.ndarray, "n T"]) -> Record:
    """The values of a record: LongPPL with its standard error over documents, and the loss of all tokens by position.

    Documents are the pairs of a comparison: a document has the same key tokens for all variants.
    """
    losses, weights = losses.astype(np.float64), weights.astype(np.float64)
    keys, total = weights.sum(1), weights.sum()
    by_document = (losses * weights).sum(1)
    nll = float(by_document.sum() / total) if total else None
    edges = bin_edges([0, 4, 8, 16], 4, losses.shape[1])
    sums = np.add.reduceat(losses.mean(0), edges[:-1])
    return {
        "nll": nll,
        "perplexity": math.exp(nll) if nll is not None and nll < 700 else None,
        "stderr": None if nll is None else standard_error(by_document - nll * keys, float(total)),
        "tokens": int(total),
        "share": float(total / weights.size),
        "nll_by_document": [s / k if k else None for s, k in zip(by_document.tolist(), keys.tolist(), strict=True)],
        "tokens_by_document": [int(k) for k in keys],
        "all_nll": float(losses.mean()),
        "all_nll_by_document": losses.mean(1).tolist(),
        "position_edges": edges,
        "nll_by_position": (sums / np.diff(edges)).tolist(),
    }


def read_key_tokens(file: storage.AnyPath) -> KeyTokens:
    """The key tokens of a file that an evaluation has written; `DataError` for another one."""
    content = as_dict(storage.read_json(file))
    try:
        starts, length = tuple(map(int, content.pop("starts"))), int(content.pop("length"))
        positions = tuple(np.asarray(one, np.int64) for one in content.pop("positions"))
        about = {**content, "length": length, "starts": list(starts)}
        if len(positions) != len(starts) or not {"source", "data", "reference", "short"} <= about.keys():
            raise ValueError("keys are missing")
    except (LookupError, TypeError, ValueError):
        raise DataError(f"'{file}' is no file of key tokens, or is damaged. --suite=long_range writes them.") from None
    return KeyTokens(starts, length, positions, about)


def _load(evaluation: Evaluation, given: str) -> Subject:
    from pe_lab.evaluation.targets import load_subjects, locate

    target = locate(given)
    (subject,) = load_subjects(target, target.paths[-1:])
    trained, found = subject.checkpoint.metadata.get("tokenizer"), evaluation.mixture.tokenizer.fingerprint
    if trained not in (None, found):
        raise CheckpointError(
            f"--reference={given} was trained with another tokenizer than the data. Key tokens are tokens of both: "
            "choose a reference of the same family."
        )
    return subject


def _stream(evaluation: Evaluation, source: int) -> TokenStream:
    return evaluation.mixture.sources[source].prepared.streams["validation"]


def document_sizes(stream: TokenStream) -> Int64[np.ndarray, " documents"]:
    """The tokens of each document, with its EOS."""
    return np.diff(stream.ends, prepend=0)


def choose_documents(
    stream: TokenStream, longest: int, most: int, part: Literal["score", "fit"] = "score"
) -> list[int]:
    """The starts of at most `most` documents of more than `longest` tokens, at even distances.

    Of all documents by size, every second one is left for what is fitted, such as a search: whatever the lengths, none
    is both scored and fitted on.
    """
    sizes = document_sizes(stream)
    ranks = np.empty(len(sizes), int)
    ranks[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    long = np.flatnonzero((sizes > longest) & (ranks % 2 == ("score", "fit").index(part)))
    count = min(most, len(long))
    chosen = long[((np.arange(count) + 0.5) * len(long) / max(count, 1)).astype(int)]
    return [int(stream.ends[n] - sizes[n]) for n in chosen]


def _documents(
    evaluation: Evaluation, source: int, starts: Sequence[int], length: int
) -> Int[np.ndarray, "n length_and_1"]:
    """The first `length` + 1 tokens of the documents that start there."""
    return _stream(evaluation, source).gather(np.asarray(starts), length + 1).astype(np.int32)


def _batch(windows: Int[np.ndarray, "n W"]) -> dict[str, np.ndarray]:
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

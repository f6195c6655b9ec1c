"""Filters of documents: by length, by language and against duplicates; how many each dropped, and samples of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pe_lab.data.sources.source import Document
from pe_lab.data.tokenizers import encodable
from pe_lab.errors import ConfigError, DataError, UnsupportedError, did_you_mean

# Why a document is dropped, in the order in which filters see it.
REASONS = (
    "min_characters",
    "max_characters",
    "language",
    "exact_duplicate",
    "near_duplicate",
    "min_tokens",
    "max_tokens",
)
SAMPLES = 32  # kept of each reason
SAMPLE_CHARACTERS = 1_000  # of a document in a sample
MOST_CHARACTERS = 2**26  # of a document, all of which is in memory
LANGUAGE_CHARACTERS = 10_000  # from its beginning, by which a document's language is told


@functools.cache
def _languages() -> Any:
    """The model of languages; `UnsupportedError` if its library is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise UnsupportedError("--language needs py3langid: pip install 'pe-lab[filters]'.") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@dataclass(frozen=True)
class Filters:
    """Which documents are dropped; by default none. Equal filters drop the same documents of the same corpus."""

    min_characters: int = 0
    max_characters: int = 0  # 0: any number
    min_tokens: int = 0  # without EOS
    max_tokens: int = 0
    language: str = ""  # ISO 639-1
    language_probability: float = 0.5  # below which a document is not of the language
    exact_duplicates: bool = False  # of an earlier document
    near_duplicates: float = 0.0  # the Jaccard similarity of shingles from which documents are duplicates; 0: none is
    shingle_words: int = 5
    permutations: int = 128

    @property
    def duplicates(self) -> bool:
        """Whether documents have to be compared with each other."""
        return self.exact_duplicates or self.near_duplicates > 0

    def settings(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON, with the parameters of the filters that are on."""
        on = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.language:
            on["language_probability"] = self.language_probability
        if self.near_duplicates:
            on |= {"shingle_words": self.shingle_words, "permutations": self.permutations}
        return on

    def libraries(self) -> dict[str, str]:
        """The versions of the libraries whose results decide, which another version need not repeat."""
        used = {"py3langid": bool(self.language), "rensa": self.near_duplicates > 0}
        return {name: importlib.metadata.version(name) for name, is_used in used.items() if is_used}

    def check(self) -> None:
        """Raises `ConfigError` for a filter that contradicts another one, or a language that is not known."""
        for unit in ("characters", "tokens"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most and least > most:
                raise ConfigError(f"--min-{unit}={least} is more than --max-{unit}={most}: no document has both.")
        if self.near_duplicates:
            from pe_lab.data.duplicates import minhash

            minhash()
        if self.language and self.language not in (known := _languages().labels):
            raise ConfigError(
                f"--language={self.language} is not known. {did_you_mean(self.language, [str(k) for k in known])}"
            )

    def found_language(self, text: str) -> tuple[str, float]:
        """The likeliest language of a text, and its probability."""
        name, probability = _languages().classify(text[:LANGUAGE_CHARACTERS])
        return str(name), float(probability)

    def reason(self, text: str) -> str:
        """Why a document is dropped for itself, before it is encoded; "" if it is not."""
        if len(text) < self.min_characters:
            return "min_characters"
        if self.max_characters and len(text) > self.max_characters:
            return "max_characters"
        if self.language:
            name, probability = self.found_language(text)
            if name != self.language or probability < self.language_probability:
                return "language"
        return ""

    def check_length(self, document: Document, where: str) -> None:
        """Raises `DataError`, which names `where`, for one of more than `MOST_CHARACTERS` that is not dropped."""
        messages = document.messages or ()
        characters = len(document.text) or sum(len(message.get("content") or "") for message in messages)
        if characters > MOST_CHARACTERS and not 0 < self.max_characters < characters:
            raise DataError(
                f"{where} has {characters:,} characters; one has at most {MOST_CHARACTERS:,}. Split it, or drop such "
                f"documents with --max-characters={MOST_CHARACTERS}."
            )

    def reason_of_tokens(self, tokens: int) -> str:
        """Why a document of so many tokens is dropped; "" if it is not."""
        if tokens < self.min_tokens:
            return "min_tokens"
        return "max_tokens" if self.max_tokens and tokens > self.max_tokens else ""


def key_of(document: Document) -> str:
    """The string that is equal for equal documents and can be encoded: the text, or the messages as JSON."""
    if document.messages is None:
        return encodable(document.text)
    return json.dumps([dict(message) for message in document.messages], sort_keys=True)


def text_of(document: Document) -> str:
    """The text by which filters judge a document: for a chat the contents of its messages, a line each."""
    if document.messages is None:
        return encodable(document.text)
    return encodable("\n".join(message.get("content") or "" for message in document.messages))


class Dropped:
    """Counts the documents of one input shard that were dropped, and keeps a sample of each reason.

    A sample is of the `SAMPLES` documents whose hashes are smallest: the same documents, however the corpus is shared
    among workers.
    """

    def __init__(self, shard: int, name: str):
        self._shard, self._name = shard, name
        self.counts: Counter[str] = Counter()
        self._samples: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}

    def add(self, reason: str, number: int, text: str, about: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Counts document `number` of the shard; `about` describes it further, if it becomes a sample."""
        self.counts[reason] += 1
        digest = hashlib.blake2b(f"{self._shard} {number} {reason}".encode(), digest_size=6).digest()
        rank = int.from_bytes(digest, "big")
        samples = self._samples.setdefault(reason, [])
        if len(samples) == SAMPLES and -rank <= samples[0][0]:
            return
        record = {"input": self._name, "shard": self._shard, "document": number, "characters": len(text), **about()}
        (heapq.heappush if len(samples) < SAMPLES else heapq.heapreplace)(
            samples, (-rank, -number, {**record, "text": text[:SAMPLE_CHARACTERS]})
        )

    def samples(self) -> dict[str, list[list[Any]]]:
        """For each reason pairs of a rank and a record, as JSON."""
        return {r: sorted(([-rank, record] for rank, _, record in s), key=_rank) for r, s in self._samples.items()}


def joined_samples(of_shards: Iterable[Mapping[str, list[list[Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """The samples of a whole corpus, from those of its shards, in the order of the corpus."""
    merged: dict[str, list[list[Any]]] = {}
    for samples in of_shards:
        for reason, ranked in samples.items():
            merged[reason] = sorted([*merged.get(reason, []), *ranked], key=_rank)[:SAMPLES]
    records = {reason: [record for _, record in merged[reason]] for reason in REASONS if reason in merged}
    return {reason: sorted(r, key=lambda one: (one["shard"], one["document"])) for reason, r in records.items()}


def _rank(ranked: list[Any]) -> tuple[int, int, int]:
    return ranked[0], ranked[1]["shard"], ranked[1]["document"]

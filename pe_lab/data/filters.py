"""Filters of documents: by length, by language and against duplicates; how many each dropped, and samples of them.

Duplicates are found from a fingerprint of every document, shard by shard, then the groups of all of them. Exact
duplicates have the same hash. Near duplicates have MinHash signatures (Broder 1997, "On the resemblance and containment
of documents") that agree in a share of their numbers, which estimates the Jaccard similarity of the shingles: of all
sequences of `shingle_words` words. Candidates are found by locality-sensitive hashing in bands (Leskovec, Rajaraman,
Ullman, "Mining of Massive Datasets", 3.4). Of a group, which similar pairs join, the first document is kept.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8, UInt32, UInt64

from pe_lab.data.shards import tensor_places
from pe_lab.data.sources.source import Document
from pe_lab.data.tokenizers import encodable
from pe_lab.errors import ConfigError, DataError, UnsupportedError, did_you_mean
from pe_lab.storage import AnyPath, is_remote, read_bytes, write_file

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
WORD = re.compile(r"\w+")
SEED = 0  # of the permutations
RECALL = 0.98  # of the pairs at the threshold, that become candidates
EXACT, NEAR = REASONS.index("exact_duplicate") + 1, REASONS.index("near_duplicate") + 1


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

    def __init__(self, filters: Filters, shard: int, name: str):
        self._filters, self._shard, self._name = filters, shard, name
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, list[list[Any]]] = {}  # pairs of a rank and a record, as JSON, by the reason

    def add(self, reason: str, number: int, text: str, about: Mapping[str, Any]) -> None:
        """Counts document `number` of the shard; `about` describes it further."""
        self.counts[reason] += 1
        digest = hashlib.blake2b(f"{self._shard} {number} {reason}".encode(), digest_size=6).digest()
        rank = int.from_bytes(digest, "big")
        samples = self.samples.setdefault(reason, [])
        if len(samples) == SAMPLES and rank >= samples[-1][0]:
            return
        if reason == "language":
            about = dict(zip(("language", "probability"), self._filters.found_language(text), strict=True))
        record = {"input": self._name, "shard": self._shard, "document": number, "characters": len(text)}
        bisect.insort(samples, [rank, {**record, **about, "text": text[:SAMPLE_CHARACTERS]}], key=_rank)
        del samples[SAMPLES:]


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


# ---------------------------------------------------------------------------------------------------------------------
# Duplicates


def minhash() -> Any:
    """The library's class of signatures; `UnsupportedError` if it is not installed."""
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise UnsupportedError("--near-duplicates needs rensa: pip install 'pe-lab[filters]'.") from error
    return RMinHash


def shingles(text: str, words: int) -> list[str]:
    """Every sequence of that many words; of a shorter text all its words, of a text without words none."""
    found = WORD.findall(text.lower())
    if len(found) <= words:
        return [" ".join(found)] if found else []
    return [" ".join(found[i : i + words]) for i in range(len(found) - words + 1)]


def signatures(texts: Sequence[str], filters: Filters) -> UInt32[np.ndarray, "texts permutations"]:
    """The MinHash signatures of some texts."""
    sets = [shingles(text, filters.shingle_words) for text in texts]
    matrix = minhash().digest_matrix_from_token_sets(sets, filters.permutations, SEED)
    return np.asarray(matrix.to_rows(), np.uint32).reshape(len(texts), filters.permutations)


class Fingerprints(NamedTuple):
    """What is compared of the documents of one input shard; files of it and of `Decisions` are safetensors."""

    reason: UInt8[np.ndarray, " documents"]  # 0, or 1 + the index in REASONS of why it is dropped already
    hash: Int64[np.ndarray, " two"]  # two for each document that is not, which equal documents have alike
    comparable: UInt8[np.ndarray, " kept"]  # whether such a document has words
    signature: UInt32[np.ndarray, " permutations"]  # of each comparable one, one after another


class Decisions(NamedTuple):
    """Which documents of one input shard are dropped."""

    reason: UInt8[np.ndarray, " documents"]  # 0: it is kept
    first: Int64[np.ndarray, " documents"]  # of a duplicate: the one that is kept, shard * 2^40 + document; else -1


def write_arrays(path: AnyPath, arrays: Fingerprints | Decisions) -> None:
    """Writes the arrays of a named tuple, whole or not at all."""
    from safetensors.numpy import save

    write_file(path, save({name: np.ascontiguousarray(array) for name, array in arrays._asdict().items()}))


def read_arrays(path: AnyPath, kind: type[Any]) -> Any:
    """What `write_arrays` wrote; on a disk it is mapped into memory."""
    content = np.frombuffer(read_bytes(path), np.uint8) if is_remote(path) else np.memmap(path, np.uint8, mode="r")
    arrays = {}
    for name, (dtype, start, elements) in tensor_places(content).items():
        arrays[name] = content[start : start + elements * dtype.itemsize].view(dtype)
    return kind(**arrays)


def decide(found: Sequence[Fingerprints], filters: Filters) -> Iterator[Decisions]:
    """The decisions for every shard of a corpus, in order. Memory: about 40 bytes for each document."""
    kept = [np.flatnonzero(f.reason == 0) for f in found]
    hashes = np.concatenate([np.asarray(f.hash).reshape(-1, 2) for f in found])
    place = np.concatenate([(np.int64(i) << 40) + k for i, k in enumerate(kept)])
    reason, first = np.zeros(len(place), np.uint8), np.full(len(place), -1, np.int64)
    if filters.exact_duplicates and len(place):
        _mark(_first_of_equal(hashes), EXACT, reason, first)
    if filters.near_duplicates and len(place):
        comparable = np.concatenate([np.asarray(f.comparable) for f in found]) != 0
        rows = _Rows([f.signature for f in found], filters.permutations)
        joined = _first_of_similar(rows, (reason == 0)[comparable], filters)
        of_all = np.arange(len(place))
        of_all[comparable] = np.flatnonzero(comparable)[joined]
        _mark(of_all, NEAR, reason, first)
    first = np.where(first < 0, -1, place[first])
    start = 0
    for f, k in zip(found, kept, strict=True):
        decisions = Decisions(np.array(f.reason), np.full(len(f.reason), -1, np.int64))
        decisions.reason[k], decisions.first[k] = reason[start : start + len(k)], first[start : start + len(k)]
        start += len(k)
        yield decisions


def _mark(first_of: Int[np.ndarray, " n"], why: int, reason: UInt8[np.ndarray, " n"], first: Int64[np.ndarray, " n"]):
    """Marks the documents that are not the first of their group."""
    later = (first_of != np.arange(len(first_of))) & (reason == 0)
    reason[later], first[later] = why, first_of[later]


def _first_of_equal(hashes: Int64[np.ndarray, "n two"]) -> Int64[np.ndarray, " n"]:
    """For each document the first one with its hash."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: the first of a group comes first
    ordered = hashes[order]
    begins = np.r_[True, (ordered[1:] != ordered[:-1]).any(1)]
    first = np.empty(len(order), np.int64)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


class _Rows:
    """The signatures of a corpus, which stay in the files of its shards."""

    def __init__(self, parts: Sequence[UInt32[np.ndarray, " _"]], permutations: int):
        self._parts = [np.asarray(part).reshape(-1, permutations) for part in parts]
        self._starts = np.cumsum([0] + [len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def columns(self, start: int, stop: int) -> UInt32[np.ndarray, "n columns"]:
        return np.concatenate([part[:, start:stop] for part in self._parts])

    def rows(self, numbers: Int64[np.ndarray, " k"]) -> UInt32[np.ndarray, "k permutations"]:
        part = np.searchsorted(self._starts, numbers, side="right") - 1
        return np.stack([self._parts[p][n - self._starts[p]] for p, n in zip(part, numbers, strict=True)])


def bands(threshold: float, permutations: int) -> tuple[int, int]:
    """The number of bands and of rows in each: as many rows as leave `RECALL` of the pairs at the threshold."""
    choices = [(permutations // rows, rows) for rows in range(1, permutations + 1)]
    enough = [(b, r) for b, r in choices if 1 - (1 - threshold**r) ** b >= RECALL]
    return enough[-1] if enough else choices[0]


def _first_of_similar(rows: _Rows, chosen: Bool[np.ndarray, " n"], filters: Filters) -> Int64[np.ndarray, " n"]:
    """For each document the first of its group, where similar pairs of chosen documents are in one group."""
    parent = np.arange(len(rows))

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return int(n)

    count, width = bands(filters.near_duplicates, filters.permutations)
    candidates = np.flatnonzero(chosen)
    agreeing = filters.near_duplicates * filters.permutations - 1e-9
    for band in range(count):
        mixed = _mixed(rows.columns(band * width, (band + 1) * width)[candidates])
        order = np.argsort(mixed, kind="stable")
        ends = np.flatnonzero(np.r_[mixed[order][1:] != mixed[order][:-1], True]) + 1
        starts = np.r_[0, ends[:-1]]
        for start, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
            bucket = candidates[order[start:end]]
            while len(bucket) > 1:  # the first of the bucket with all that are similar to it; then the others
                roots = np.array([root(int(n)) for n in bucket])
                if (roots == roots[0]).all():
                    break
                signature = rows.rows(bucket)
                similar = (signature == signature[0]).sum(1) >= agreeing
                for other in roots[similar]:
                    one, two = sorted((root(int(roots[0])), root(int(other))))
                    parent[two] = one
                bucket = bucket[~similar]
    return np.array([root(n) for n in range(len(parent))], np.int64)


def _mixed(columns: UInt32[np.ndarray, "n width"]) -> UInt64[np.ndarray, " n"]:
    """A hash of each row."""
    mixed = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed

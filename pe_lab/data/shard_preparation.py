"""From one shard of a corpus to token shards and statistics: a pure function of a plan, run by whoever may.

The files of a preparation, under the directory that is being filled:

| file | written | holds |
|---|---|---|
| `.work/plan.json` | first | the `PreparationPlan`: all that a worker needs beside the number of a shard |
| `tokenizer/` | before the plan | the tokenizer |
| `.work/fingerprints-00003.safetensors` | where duplicates are dropped | what is compared of the documents of shard 3 |
| `.work/decisions-00003.safetensors` | when all fingerprints are there | which of them are dropped |
| `train-00003-00000.safetensors` | | the tokens of shard 3, or of its first documents |
| `.work/shard-00003.json` | after the tokens of shard 3 | its statistics |
| `dropped/REASON.jsonl`, `metadata.json` | when all statistics are there | samples; the description of the whole |

Every file is written whole or not at all, and has the same bytes whoever writes it: a step whose file is there is done.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from pe_lab import storage
from pe_lab.config import SourceConfig
from pe_lab.data.chat import encode_chat
from pe_lab.data.filters import (
    REASONS,
    Decisions,
    Dropped,
    Filters,
    Fingerprints,
    key_of,
    read_arrays,
    signatures,
    text_of,
    write_arrays,
)
from pe_lab.data.shards import SPLITS, TOKENIZER_DIRECTORY, Shard, write_shard
from pe_lab.data.sources import DataSource, Document, InputShard, open_source
from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.errors import DataError
from pe_lab.storage import AnyPath, read_json, write_json

WORK = ".work"  # the directory of what is not part of prepared data
PLAN_FILE = "plan.json"
SHARD_TOKENS = 2**24  # of a token shard, at least, where an input shard has as many
BATCH_CHARACTERS = 1_000_000  # of one call of the tokenizer
PIECE_CHARACTERS = 1_000_000  # longer documents are encoded in pieces that end at line ends, one after another
Report = Callable[[int, int], None]  # is told of documents and tokens as they are done


@dataclass(frozen=True)
class PreparationPlan:
    """All that the prepared data depend on."""

    source: SourceConfig
    identity: Any  # `DataSource.identity`, as JSON
    shards: tuple[InputShard, ...]
    documents: tuple[int | None, ...]  # how many to read of each shard; None: all
    tokenizer: str  # its specification
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    validation_fraction: float
    limit_documents: int | None
    filters: Filters
    libraries: Mapping[str, str]  # `Filters.libraries`, and `chat_fingerprint` of a chat's template

    @property
    def dtype(self) -> np.dtype:
        """The type of the tokens on disk."""
        return np.dtype("uint16" if self.vocab_size <= 2**16 else "uint32")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON, for `from_json`."""
        source = {"source": self.source.source, "column": self.source.column, "options": dict(self.source.options)}
        source |= {"template": self.source.template, "chat": self.source.chat}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "source": source, "filters": self.filters.settings()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PreparationPlan:
        """From `to_json`."""
        shards, documents = tuple(InputShard(*shard) for shard in content["shards"]), tuple(content["documents"])
        source, filters = SourceConfig(**content["source"]), Filters(**content["filters"])
        return cls(**{**content, "source": source, "shards": shards, "documents": documents, "filters": filters})


class PlanAddress(NamedTuple):
    """Where to work: a directory, and the digest of the plan in it. It opens the same everywhere."""

    directory: str
    plan: str


class OpenPlan(NamedTuple):
    """A plan in the directory that it fills, with what it names opened."""

    address: PlanAddress
    directory: AnyPath
    plan: PreparationPlan
    source: DataSource
    tokenizer: Tokenizer

    def file(self, kind: str, shard: int) -> AnyPath:
        """The path of a file of one shard: `shard`, `fingerprints` or `decisions`."""
        suffix = "json" if kind == "shard" else "safetensors"
        return self.directory / WORK / f"{kind}-{shard:05d}.{suffix}"

    def documents(self, shard: int) -> Iterator[Document]:
        """The documents to read of one shard; `DataError` at one that cannot be read or is too long for the filters."""
        name = self.plan.shards[shard].name
        try:
            for number, document in enumerate(
                islice(self.source.read(self.plan.shards[shard]), self.plan.documents[shard])
            ):
                self.plan.filters.check_length(document, f"{name}, document {number}")
                yield document
        except OSError as error:  # else it would be taken for one of the output
            raise DataError(f"data source '{self.plan.source.source}', {name}: {error}.") from error

    def count(self) -> int | None:
        """The number of documents to read; None if it is not known."""
        limits = [limit for limit in self.plan.documents if limit is not None]
        return sum(limits) if len(limits) == len(self.plan.documents) else self.source.count()


@functools.lru_cache(maxsize=2)
def open_plan(address: PlanAddress) -> OpenPlan:
    """The plan in a directory, opened; workers keep it from shard to shard."""
    directory = storage.path("--out", address.directory)
    plan = PreparationPlan.from_json(read_json(directory / WORK / PLAN_FILE))
    tokenizer = load_saved_tokenizer(directory / TOKENIZER_DIRECTORY)
    return OpenPlan(address, directory, plan, open_source(plan.source), tokenizer)


def fingerprint_shard(opened: OpenPlan, shard: int, report: Report) -> None:
    """Writes the fingerprints of the documents of one shard that no filter of single documents drops."""
    filters = opened.plan.filters
    reasons, hashes, found = bytearray(), bytearray(), []
    for batch in _batches(opened.documents(shard), lambda document: len(document.text) or 1_000):
        texts = []
        for document in batch:
            reason = filters.reason(text := text_of(document))
            reasons.append(REASONS.index(reason) + 1 if reason else 0)
            if not reason:
                hashes += hashlib.blake2b(key_of(document).encode(), digest_size=16).digest()
                texts.append(text)
        if filters.near_duplicates:
            found.append(signatures(texts, filters))
        report(len(batch), 0)
    signature = np.concatenate([*found, np.zeros((0, filters.permutations), np.uint32)])
    comparable = (signature != np.uint32(2**32 - 1)).any(1)
    arrays = Fingerprints(
        np.frombuffer(bytes(reasons), np.uint8),
        np.frombuffer(bytes(hashes), "<i8"),
        comparable.astype(np.uint8),
        signature[comparable].ravel(),
    )
    write_arrays(opened.file("fingerprints", shard), arrays)


class Split:
    """Assigns documents to train and validation by their hash, so that equal documents share a split.

    Until both splits have a document, the one whose hash is nearest to the boundary waits (unless not `waits`). If all
    documents of a corpus fall into one split, it changes to the other (`released` says whether there is another
    document). Of a corpus of one document the end is held out. With a fraction of 0 nothing is.
    """

    def __init__(self, fraction: float, waits: bool):
        self._fraction, self._waits, self._waiting = fraction, waits, []
        self.side = ""  # the split of all documents so far; "" if there is none
        self.both = self.released = False
        self.nearest = 2.0  # the distance of the waiting document from the boundary

    def place(self, key: str, item: Any) -> Iterator[tuple[str, Any]]:
        """Pairs of a split and an item whose split is decided now; `key` decides that of `item`."""
        if self._fraction == 0:
            self.side = "train"
            yield "train", item
            return
        score = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") / 2**64
        split = "validation" if score < self._fraction else "train"
        gap = abs(score - self._fraction)
        if self.both:
            yield split, item
        elif self.side and split != self.side:
            self.both = True
            yield from self.rest()
            yield split, item
        elif gap < self.nearest:
            self.released = bool(self.side)
            yield from self.rest(split)
            self.side, self.nearest, self._waiting = split, gap, [item]
        elif gap == self.nearest:
            self._waiting.append(item)
        else:
            self.released = True
            yield split, item
        if not self._waits:
            yield from self.rest()

    def rest(self, split: str = "") -> Iterator[tuple[str, Any]]:
        """The waiting items, in `split`, or the split of their hash."""
        waiting, self._waiting = self._waiting, []
        return ((split or self.side, item) for item in waiting)


class _Encoded(NamedTuple):
    """A document with its tokens, ended by EOS, and whether each is a target (None: all are)."""

    key: str
    ids: Int[np.ndarray, " n"]
    loss: Bool[np.ndarray, " n"] | None


def prepare_shard(opened: OpenPlan, shard: int, report: Report, ending: str) -> None:
    """Writes the token shards of one shard of the corpus, and last its statistics.

    Args:
      opened: the plan, opened.
      shard: the number of the input shard.
      report: is told of documents and tokens as they are done.
      ending: what becomes of the documents nearest to the boundary if all are in one split: `keep` them there, `move`
        them to the other one, `cut` off their end for validation (once in the corpus, in the first shard that has
        them), or `cut` it and drop it, `cut again`. See `Split`.
    """
    plan, where = opened.plan, opened.plan.shards[shard].name
    dropped = Dropped(plan.filters, shard, where)
    writers = {split: _Writer(opened, split, shard) for split in SPLITS}
    content, characters, kept = hashlib.blake2b(digest_size=16), 0, 0
    split = Split(plan.validation_fraction, waits=len(plan.shards) == 1 or ending == "move")

    def write(pairs: Iterable[tuple[str, _Encoded]]) -> None:
        for name, item in pairs:
            writers[name].add(item)

    for batch in _batches(_chosen(opened, shard, dropped), lambda one: len(one[1].text) or 1_000):
        names = [f"{where}, document {number}" for number, _, _ in batch]
        encoded, tokens = _encode(opened.tokenizer, [document for _, document, _ in batch], names), 0
        for (number, document, text), item in zip(batch, encoded, strict=True):
            if reason := plan.filters.reason_of_tokens(len(item.ids) - 1):
                dropped.add(reason, number, text, {"tokens": len(item.ids) - 1})
                continue
            content.update(len(item.key).to_bytes(8, "little") + item.key.encode())
            characters += len(text)
            kept, tokens = kept + 1, tokens + len(item.ids)
            placed = list(split.place(item.key, item))
            if ending.startswith("cut"):
                placed = _cut(opened.tokenizer, document, item, plan.validation_fraction, ending == "cut" and kept == 1)
            write(placed)
        report(len(batch), tokens)
    if not ending.startswith("cut"):
        other = "validation" if split.side == "train" else "train"
        write(split.rest(other if ending == "move" else ""))
    for writer in writers.values():
        writer.close()
    statistics = {
        "documents": {name: writer.documents for name, writer in writers.items()},
        "characters": characters,
        "content": content.hexdigest(),
        "read": kept + dropped.counts.total(),
        "dropped": dict(dropped.counts),
        "samples": dropped.samples,
        "split": {"side": split.side, "both": split.both, "released": split.released, "nearest": split.nearest},
        "ending": ending,
        "shards": {name: [dataclasses.asdict(s) for s in writer.shards] for name, writer in writers.items()},
    }
    write_json(opened.file("shard", shard), statistics)


def run_step(address: PlanAddress, step: str, shard: int, report: Report, ending: str) -> None:
    """Runs one step of a plan for one shard: `fingerprints`, or `shard`, whose `ending` is given."""
    opened = open_plan(address)
    if step == "fingerprints":
        fingerprint_shard(opened, shard, report)
    else:
        prepare_shard(opened, shard, report, ending)


def _chosen(opened: OpenPlan, shard: int, dropped: Dropped) -> Iterator[tuple[int, Document, str]]:
    """The number, the document and its text of each that no filter before the tokenizer drops."""
    filters, decisions = opened.plan.filters, None
    if filters.duplicates:
        decisions = read_arrays(opened.file("decisions", shard), Decisions)
    for number, document in enumerate(opened.documents(shard)):
        text, first = text_of(document), -1
        if decisions is None:
            reason = filters.reason(text)
        else:
            code, first = decisions.reason[number], int(decisions.first[number])
            reason = REASONS[code - 1] if code else ""
        if not reason:
            yield number, document, text
            continue
        kept = {"shard": first >> 40, "document": first & (2**40 - 1)}
        dropped.add(reason, number, text, {"kept": kept} if first >= 0 else {})


def _batches(items: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    batch, characters = [], 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, documents: list[Document], names: Sequence[str]) -> Iterator[_Encoded]:
    """The documents with their tokens; `names` are for messages."""
    keys = [key_of(document) for document in documents]
    pieces = [_pieces(key) if d.messages is None else [] for key, d in zip(keys, documents, strict=True)]
    batches = _batches((piece for group in pieces for piece in group), len)
    encoded = (ids for batch in batches for ids in tokenizer.encode_batch(batch))
    eos = np.array([tokenizer.eos_id], np.int32)
    for key, document, group, name in zip(keys, documents, pieces, names, strict=True):
        loss = None
        if document.messages is None:
            ids = np.concatenate([*(next(encoded) for _ in group), eos])
        else:
            try:
                ids, loss = encode_chat(tokenizer, document.messages)
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
            if not len(ids) or ids[-1] != tokenizer.eos_id:
                ids, loss = np.append(ids, tokenizer.eos_id), np.append(loss, False)
        yield _Encoded(key, ids, loss)


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _cut(
    tokenizer: Tokenizer, document: Document, item: _Encoded, fraction: float, held_out: bool
) -> Iterator[tuple[str, _Encoded]]:
    """The beginning of a document for training and, if it is `held_out`, its end for validation."""
    if document.messages is None:
        cut = max(1, int(len(item.key) * (1 - fraction)))
        begin, end = item.key[:cut], item.key[cut:]
        parts = [("train", begin)] + ([("validation", end)] if end and held_out else [])
        encoded = _encode(tokenizer, [Document(part) for _, part in parts], ["its beginning", "its end"][: len(parts)])
        yield from zip((split for split, _ in parts), encoded, strict=True)
        return
    cut = max(1, int(len(item.ids) * (1 - fraction)))
    eos = (np.array([tokenizer.eos_id], item.ids.dtype), np.array([False]))
    yield "train", _Encoded("", np.append(item.ids[:cut], eos[0]), np.append(item.loss[:cut], eos[1]))
    if held_out and cut < len(item.ids) - 1:
        yield "validation", _Encoded("", item.ids[cut:], item.loss[cut:])


class _Writer:
    """Writes the documents of one split of one input shard, with a new file every `SHARD_TOKENS`."""

    def __init__(self, opened: OpenPlan, split: str, shard: int):
        self._opened, self._name = opened, f"{split}-{shard:05d}"
        self._ids: list[np.ndarray] = []
        self._loss: list[np.ndarray | None] = []
        self._pending = self.documents = 0
        self.shards: list[Shard] = []

    def add(self, item: _Encoded) -> None:
        self._ids.append(item.ids.astype(self._opened.plan.dtype))
        self._loss.append(item.loss)
        self.documents += 1
        self._pending += len(item.ids)
        if self._pending >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Writes the last file; `shards` is then complete."""
        if not self._ids:
            return
        path = self._opened.directory / f"{self._name}-{len(self.shards):05d}.safetensors"
        loss = None
        if any(one is not None for one in self._loss):
            pairs = zip(self._loss, self._ids, strict=True)
            loss = [np.ones(len(ids), bool) if one is None else one for one, ids in pairs]
        self.shards.append(write_shard(path, self._ids, self._opened.plan.dtype, loss))
        self._ids, self._loss, self._pending = [], [], 0

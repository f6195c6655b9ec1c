"""Prepared data: token shards, with a `metadata.json` and the tokenizer.

A shard is a safetensors file with the tensors

| tensor | type, shape | holds |
|---|---|---|
| `tokens` | uint16 or uint32 [tokens] | the tokens of its documents, each ended by EOS |
| `ends` | int64 [documents] | the number of tokens up to the end of each document |
| `crc32c` | uint32 [blocks] | the CRC-32C of each block of `BLOCK_TOKENS` tokens |
| `loss` | uint8 [ceil(tokens / 8)] | a bit for each token, lowest first: 1 where it is a target; absent: all are |

and metadata.json has the digest of each file. `ShardStream` maps `tokens` into memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer, UInt, UInt32

from pe_lab.config import from_dict
from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.errors import ConfigError, DataError, excerpt
from pe_lab.storage import AnyPath, is_remote, listing, local_copy, read_json, write_file, write_json
from pe_lab.storage.manifest import SEAL, Digest, Manifest, crc32c, digest_file, seal_broken, sealed

FORMAT_VERSION = 3
METADATA_FILE = "metadata.json"
TOKENIZER_DIRECTORY = "tokenizer"
SPLITS = ("train", "validation")
BLOCK_TOKENS = 4096  # of a checksum: 8 or 16 kB
INT64 = 2**63 - 1
COUNT = {"bounds": (0, INT64)}  # of what is no negative number
DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64}
MOST_HEADER_BYTES = 10_000
LONG = 128  # tokens of a piece that is copied by itself, as NumPy takes more to find many than to copy them


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int = field(metadata={"bounds": (1, INT64)})
    bytes: int = field(metadata=COUNT)
    documents: int = field(metadata=COUNT)  # that end in it
    crc32c: str  # of the file
    index_crc32c: str  # of the file without `tokens`


@dataclass(frozen=True)
class Metadata:
    """The description of a prepared directory: its contents and its origin."""

    source: str
    column: str
    identity: Mapping[str, Any]  # `DataSource.identity` at that time
    tokenizer: str  # its specification
    tokenizer_fingerprint: str
    vocab_size: int = field(metadata=COUNT)
    eos_id: int = field(metadata=COUNT)
    dtype: Literal["uint16", "uint32"]
    validation_fraction: float = field(metadata={"bounds": (0, 1)})
    limit_documents: int | None
    documents: Mapping[str, int]  # per split
    tokens: Mapping[str, int]  # per split, with EOS
    characters: int = field(metadata=COUNT)
    content: str  # a hash of every document that was kept, in order, and of the filters
    shards: Mapping[str, tuple[Shard, ...]]  # per split
    python: str
    template: str = ""  # of the source
    chat: str = ""
    filters: Mapping[str, Any] = field(default_factory=dict)  # `Filters.settings`
    dropped: Mapping[str, int] = field(default_factory=dict)  # documents, by the filter
    format: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order, with equal held-out documents."""
        return f"{self.content}-{self.tokenizer_fingerprint}-{self.validation_fraction}"


def read_metadata(directory: AnyPath) -> Metadata:
    """The description of a prepared directory; `DataError` if it is missing, damaged, or of another version."""
    path, advice = directory / METADATA_FILE, f"Prepare the data with python -m pe_lab.prepare --out={directory}."
    content = read_json(path, advice)
    if (found := content.get("format")) != FORMAT_VERSION:
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT_VERSION}. {advice}")
    if seal_broken(content):
        raise DataError(f"{path} is damaged: it does not have the content that was written. {advice}")
    try:
        del content[SEAL]
        shards = {split: tuple(from_dict(Shard, s, "a shard") for s in content["shards"][split]) for split in SPLITS}
        metadata = from_dict(Metadata, content | {"shards": shards}, "it")
        _check_counts(metadata)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged: {excerpt(str(error).splitlines()[0], 300).rstrip('.')}. {advice}"
        ) from error
    return metadata


def _check_counts(metadata: Metadata) -> None:
    """`ValueError` for a description that contradicts itself."""
    for split in SPLITS:
        shards = metadata.shards[split]
        for shard in shards:
            if not re.fullmatch(r"[\w.-]{1,100}", shard.file) or not shard.tokens <= shard.bytes:
                raise ValueError(f"the shard {excerpt(repr(shard.file), 60)}")
        counts = (metadata.documents[split], metadata.tokens[split])
        if counts != (sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)):
            raise ValueError(f"the documents or tokens of {split} are not those of its shards")


def manifest_of_prepared(metadata: Metadata) -> Manifest:
    """The digests of the shards as a manifest."""
    shards = [shard for split in SPLITS for shard in metadata.shards[split]]
    return Manifest({shard.file: Digest(shard.bytes, shard.crc32c) for shard in shards})


def write_metadata(directory: AnyPath, metadata: Metadata) -> None:
    """Writes metadata.json, with a digest of itself."""
    write_json(directory / METADATA_FILE, sealed(dataclasses.asdict(metadata)))


def write_shard(
    path: AnyPath,
    documents: Sequence[Integer[np.ndarray, " _"]],
    dtype: np.dtype,
    loss: Sequence[Bool[np.ndarray, " _"]] | None = None,
) -> Shard:
    """Writes documents, each with its EOS, as one shard file, whole or not at all.

    Args:
      path: ends in `.safetensors`.
      loss: for each document, whether each of its tokens counts as a target; None: all do.
    """
    from safetensors.numpy import save

    tokens = np.concatenate(documents).astype(dtype)
    starts = range(0, len(tokens), BLOCK_TOKENS)
    tensors = {
        "tokens": tokens,
        "ends": np.cumsum([len(document) for document in documents], dtype=np.int64),
        "crc32c": np.array([int(crc32c(tokens[i : i + BLOCK_TOKENS].tobytes()), 16) for i in starts], np.uint32),
    }
    if loss is not None:
        tensors["loss"] = np.packbits(np.concatenate(loss), bitorder="little")
    content = save(tensors)
    write_file(path, content)
    digests = {"crc32c": crc32c(content), "index_crc32c": index_crc32c(content)}
    return Shard(path.name, len(tokens), len(content), len(documents), **digests)


def tensor_places(content: bytes | np.ndarray) -> dict[str, tuple[np.dtype, int, int]]:
    """The dtype, the first byte and the number of elements of each tensor of a safetensors file, all one-dimensional.

    Raises:
      ValueError: the header is damaged, or does not fit the size of the file.
    """
    places = {}
    try:
        (size,) = struct.unpack("<Q", bytes(content[:8]))
        if size > min(MOST_HEADER_BYTES, len(content) - 8):
            raise ValueError("its size")
        for name, tensor in json.loads(bytes(content[8 : 8 + size])).items():
            dtype, (elements,), (start, stop) = DTYPES[tensor["dtype"]], tensor["shape"], tensor["data_offsets"]
            places[name] = (np.dtype(dtype).newbyteorder("<"), 8 + size + start, elements)
            if not 0 <= start <= stop <= len(content) - 8 - size or stop - start != elements * np.dtype(dtype).itemsize:
                raise ValueError(f"the place of {excerpt(repr(name), 40)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"its header is damaged ({excerpt(repr(error), 100)})") from error
    return places


def index_crc32c(content: bytes | np.ndarray) -> str:
    """The CRC-32C of a shard file without its tokens, whose blocks have their own. `ValueError` as `tensor_places`."""
    dtype, start, tokens = tensor_places(content)["tokens"]
    return crc32c(bytes(content[:start]) + bytes(content[start + tokens * dtype.itemsize :]))


class _Mapped(NamedTuple):
    """A shard file mapped into memory."""

    tokens: UInt[np.ndarray, " tokens"]
    ends: Int64[np.ndarray, " documents"]
    crc32c: UInt32[np.ndarray, " blocks"]
    loss: UInt[np.ndarray, " bytes"] | None
    unverified: Bool[np.ndarray, " blocks"]  # blocks that nobody has read


class TokenStream(ABC):
    """Random access to the tokens of one split, of whole documents one after another.

    Attributes:
      tokens: how many.
      has_loss: whether only some tokens are targets.
      ends: the number of tokens up to the end of each document.

    Raises:
      DataError: from every method that reads: a shard is damaged, or is missing.
    """

    tokens: int
    has_loss: bool
    ends: Int64[np.ndarray, " documents"]

    def gather(self, starts: Int[np.ndarray, " n"], length: int) -> UInt[np.ndarray, "n length"]:
        """The `length` tokens from each start; all must lie inside the stream."""
        return self.gather_pieces(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " n"]:
        """The tokens start..stop - 1, in the stored dtype."""
        stop = min(stop, self.tokens)
        some = np.arange(start < stop)  # none or one
        return self.gather_pieces(start + some, stop - start + some)

    @abstractmethod
    def gather_pieces(
        self, starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """The tokens of pieces of the stream, one piece after another; a piece may reach over several documents."""

    @abstractmethod
    def loss(self, places: Int64[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Whether each of the tokens at some places counts as a target."""


class ShardStream(TokenStream):
    """All tokens of a split, from its shards. Blocks are verified when they are read for the first time."""

    def __init__(self, directory: AnyPath, metadata: Metadata, split: str):
        self._directory, self._shards = directory, metadata.shards[split]
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._first = np.cumsum([0] + [shard.tokens for shard in self._shards])
        self.tokens = int(self._first[-1])
        self.has_loss = bool(metadata.chat)  # whether only some tokens are targets
        self._mapped = functools.cache(self._map)

    def gather_pieces(
        self, starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        shard, starts, lengths = self._in_shards(np.asarray(starts, np.int64), np.asarray(lengths, np.int64))
        stops = np.cumsum(lengths)
        found = np.empty(int(lengths.sum()), self._dtype)
        for number in np.unique(shard).tolist():
            mine = np.flatnonzero(shard == number)
            inside, each = starts[mine] - self._first[number], lengths[mine]
            self._verify(number, inside, inside + each)
            tokens = self._mapped(number).tokens
            if each.sum() < LONG * len(mine):
                first, within = np.cumsum(each) - each, np.arange(int(each.sum()))
                found[np.repeat((stops[mine] - each) - first, each) + within] = tokens[
                    np.repeat(inside - first, each) + within
                ]
                continue
            for stop, start, length in zip(stops[mine].tolist(), inside.tolist(), each.tolist(), strict=True):
                found[stop - length : stop] = tokens[start : start + length]
        return found

    def _in_shards(
        self, starts: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
        """Pieces that are cut where a shard ends: the shard of each, its start in the stream and its length."""
        stops = starts + lengths
        first = np.searchsorted(self._first, starts, side="right") - 1
        shards = np.searchsorted(self._first, stops) - first  # that have a part of each piece
        if (shards == 1).all():
            return first, starts, lengths
        which = np.repeat(np.arange(len(starts)), shards)
        shard = np.arange(len(which)) + (first - (np.cumsum(shards) - shards))[which]
        starts, stops = np.maximum(starts[which], self._first[shard]), np.minimum(stops[which], self._first[shard + 1])
        return shard, starts, stops - starts

    @functools.cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        parts = [self._mapped(i).ends + self._first[i] for i in range(len(self._shards))]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def loss(self, places: Int64[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        found = np.ones(places.shape, bool)
        shard = np.searchsorted(self._first, places, side="right") - 1
        for number in np.unique(shard).tolist():
            if (bits := self._mapped(number).loss) is not None:
                mine = shard == number
                inside = places[mine] - self._first[number]
                found[mine] = bits[inside >> 3] >> (inside & 7).astype(np.uint8) & 1
        return found

    def _verify(self, number: int, starts: Int64[np.ndarray, " n"], stops: Int64[np.ndarray, " n"]) -> None:
        """Compares the blocks of a shard that have the tokens of some ranges with their checksums."""
        mapped = self._mapped(number)
        if not mapped.unverified.any():
            return
        first, last = starts // BLOCK_TOKENS, -(-stops // BLOCK_TOKENS)
        wanted = np.zeros(len(mapped.unverified) + 1, np.int64)
        np.add.at(wanted, first, 1)
        np.subtract.at(wanted, last, 1)
        blocks = np.flatnonzero((np.cumsum(wanted[:-1]) > 0) & mapped.unverified)
        for block in blocks.tolist():
            content = mapped.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            if google_crc32c.value(content.tobytes()) != mapped.crc32c[block]:
                raise self._damaged(self._shards[number], f"block {block} is not the one that was written")
        mapped.unverified[blocks] = False

    def _damaged(self, shard: Shard, reason: object) -> DataError:
        return DataError(
            f"{self._directory / shard.file} is damaged: {reason}. Prepare the data again in another directory, or "
            "copy the file again."
        )

    def _map(self, number: int) -> _Mapped:
        shard = self._shards[number]
        try:
            path = self._directory / shard.file
            mapped = np.memmap(self._fetch(shard) if is_remote(path) else path, np.uint8, mode="r")
            content = np.asarray(mapped)  # whose slices are made faster
            if index_crc32c(content) != shard.index_crc32c:
                raise ValueError("it is not the file that was written")
            tensors = {
                name: content[start : start + count * dtype.itemsize].view(dtype)
                for name, (dtype, start, count) in tensor_places(content).items()
            }
            tokens, ends, checksums = tensors["tokens"], tensors["ends"], tensors["crc32c"]
            if (len(tokens), tokens.dtype, len(ends)) != (shard.tokens, self._dtype, shard.documents):
                raise ValueError("it does not have the tokens that metadata.json lists")
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(shard, str(error).splitlines()[0]) from error
        return _Mapped(tokens, ends, checksums, tensors.get("loss"), np.ones(len(checksums), bool))

    def _fetch(self, shard: Shard) -> Path:
        """A local copy of a shard on an object store."""

        def check(copied: Path) -> None:
            if digest_file(copied).crc32c != shard.crc32c:
                raise OSError("its digest is not the one that was written")

        return local_copy(self._directory / shard.file, check)


class LongDocuments(TokenStream):
    """The documents of a `TokenStream` of at least `min_tokens` tokens, EOS included, as a stream of their own."""

    def __init__(self, stream: TokenStream, min_tokens: int):
        self._stream, self.has_loss = stream, stream.has_loss
        sizes = np.diff(stream.ends, prepend=0)
        kept = sizes >= min_tokens
        self.ends: Int64[np.ndarray, " documents"] = np.cumsum(sizes[kept])
        self.tokens = int(self.ends[-1]) if len(self.ends) else 0
        self._shift = (stream.ends - sizes)[kept] - (self.ends - sizes[kept])  # of each document's places

    def gather_pieces(
        self, starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        starts, stops = np.asarray(starts, np.int64), np.asarray(starts, np.int64) + lengths
        first = np.searchsorted(self.ends, starts, side="right")
        parts = np.maximum(np.searchsorted(self.ends, stops) - first + 1, 1)  # documents that each piece reaches over
        which = np.repeat(np.arange(len(starts)), parts)
        document = np.minimum(
            np.arange(len(which)) + (first - (np.cumsum(parts) - parts))[which], max(len(self.ends) - 1, 0)
        )
        begins = np.maximum(starts[which], np.append(0, self.ends)[document])
        lengths = np.minimum(stops[which], self.ends[document]) - begins
        return self._stream.gather_pieces(begins + self._shift[document], np.maximum(lengths, 0))

    def loss(self, places: Int64[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        return self._stream.loss(places + self._shift[np.searchsorted(self.ends, places, side="right")])


@dataclass(frozen=True)
class Prepared:
    """An open prepared directory."""

    directory: AnyPath
    metadata: Metadata
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]

    def of_long_documents(self, min_tokens: int) -> Prepared:
        """The same without documents of fewer than `min_tokens` tokens; `DataError` where none is left to train on."""
        streams = {split: LongDocuments(stream, min_tokens) for split, stream in self.streams.items()}
        if not streams["train"].tokens:
            longest = int(np.diff(self.streams["train"].ends, prepend=0).max(initial=0))
            count = self.metadata.documents["train"]
            raise DataError(
                f"{self.directory}: no document has {min_tokens:,} tokens; the longest of {count:,} has {longest:,}. "
                "Give data with longer documents, or a smaller min_tokens."
            )
        metadata = replace(
            self.metadata,
            content=f"{self.metadata.content}-from-{min_tokens}",
            documents={split: len(stream.ends) for split, stream in streams.items()},
            tokens={split: stream.tokens for split, stream in streams.items()},
        )
        return replace(self, metadata=metadata, streams=streams)

    def tokens(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """The tokens start..stop - 1 of a split."""
        return self.streams[split].read(start, stop).astype(np.int32)


def open_prepared(directory: AnyPath) -> Prepared:
    """Opens a prepared directory after checking the size of every file.

    Raises:
      DataError: the metadata, the tokenizer or a shard is missing, damaged, or does not fit the others.
    """
    metadata, files = read_metadata(directory), listing(directory)
    for shard in (s for split in SPLITS for s in metadata.shards[split]):
        path = directory / shard.file
        advice = "Prepare the data again in another directory, or copy the file again."
        if shard.file not in files:
            raise DataError(f"{path} is missing. {advice}")
        if (size := files[shard.file].size) != shard.bytes:
            raise DataError(f"{path} is truncated or changed: {size} bytes, {shard.bytes} expected. {advice}")
    tokenizer = load_saved_tokenizer(directory / TOKENIZER_DIRECTORY)
    if tokenizer.fingerprint != metadata.tokenizer_fingerprint:
        raise DataError(
            f"{directory} was prepared with tokenizer {metadata.tokenizer_fingerprint}, but holds "
            f"{tokenizer.fingerprint}. Delete it and prepare the data again."
        )
    streams = {split: ShardStream(directory, metadata, split) for split in SPLITS}
    return Prepared(directory, metadata, tokenizer, streams)

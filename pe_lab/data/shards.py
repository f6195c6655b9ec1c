"""Prepared data: token shards, with a `metadata.json` and the tokenizer.

A shard is a safetensors file with the tensors

| tensor | type, shape | holds |
|---|---|---|
| `tokens` | uint16 or uint32 [tokens] | the tokens of its documents, each ended by EOS |
| `ends` | int64 [documents] | the number of tokens up to the end of each document |
| `crc32c` | uint32 [blocks] | the CRC-32C of each block of `BLOCK_TOKENS` tokens |
| `loss` | uint8 [ceil(tokens / 8)] | a bit for each token, lowest first: 1 where it is a target; absent: all are |

and metadata.json has the digest of each file. `data/token_stream.py` maps `tokens` into memory. Formats 1 and 2 had
records in ArrayRecord files, which `data/record_stream.py` reads.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Integer

from pe_lab.data.record_stream import RecordStream
from pe_lab.data.token_stream import BLOCK_TOKENS, TokenStream, index_crc32c
from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.errors import DataError, excerpt
from pe_lab.storage import AnyPath, listing, read_json, write_file, write_json
from pe_lab.storage.manifest import SEAL, Digest, Manifest, crc32c, seal_broken, sealed

FORMAT_VERSION = 3
FORMATS = (1, 2, 3)  # 1 has no digests; 1 and 2 have ArrayRecord files
METADATA_FILE = "metadata.json"
TOKENIZER_DIRECTORY = "tokenizer"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    bytes: int
    documents: int = 0  # documents that end in it
    crc32c: str = ""  # of the file; "": not known
    index_crc32c: str = ""  # of the file without `tokens`
    records: int = 0  # formats 1 and 2: ArrayRecord's
    records_crc32c: str = ""  # formats 1 and 2: of the file that has the CRC-32C of each record

    @property
    def records_file(self) -> str:
        """The file that has the CRC-32C of each record."""
        return str(Path(self.file).with_suffix(".crc32c"))


@dataclass(frozen=True)
class Metadata:
    """The description of a prepared directory: its contents and its origin."""

    source: str
    column: str
    identity: Any  # `Source.identity` at that time
    tokenizer: str  # its specification
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    dtype: str  # "uint16" | "uint32"
    validation_fraction: float
    limit_documents: int | None
    documents: Mapping[str, int]  # per split
    tokens: Mapping[str, int]  # per split, with EOS
    characters: int
    content: str  # a hash of every document that was kept, in order, and of the filters
    shards: Mapping[str, tuple[Shard, ...]]  # per split
    python: str
    created: str = ""  # formats 1 and 2
    record_tokens: int = 0  # formats 1 and 2
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
    if (found := content.get("format")) not in FORMATS:
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT_VERSION}. {advice}")
    if found > 1 and seal_broken(content):
        raise DataError(f"{path} is damaged: it does not have the content that was written. {advice}")
    try:
        shards = {split: tuple(Shard(**s) for s in content["shards"][split]) for split in SPLITS}
        metadata = Metadata(**{key: item for key, item in content.items() if key != SEAL} | {"shards": shards})
        defect = _defect(metadata)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {str(error).splitlines()[0]}. {advice}") from error
    if defect:
        raise DataError(f"{path} is damaged: {defect}. {advice}")
    return metadata


def _defect(metadata: Metadata) -> str:
    """The key of a description that has another type, or contradicts another key; "" if there is none."""

    def wrong(value: Any, kind: type) -> bool:
        return not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 2**62)

    shards = [shard for split in SPLITS for shard in metadata.shards[split]]
    strings = ("source", "column", "template", "chat", "tokenizer", "tokenizer_fingerprint", "content", "python")
    typed = {str: (*strings, "created"), dict: ("filters", "dropped")}
    typed[int] = ("vocab_size", "eos_id", "characters", "record_tokens")
    for kind, names in typed.items():
        for name in names:
            if wrong(getattr(metadata, name), kind):
                return name
    for counts in (metadata.documents, metadata.tokens):
        if any(wrong(counts[split], int) for split in SPLITS):
            return "documents or tokens"
    for shard in shards:
        numbers = (shard.tokens, shard.bytes, shard.documents, shard.records)
        if wrong(shard.file, str) or any(wrong(n, int) for n in numbers):
            return f"the shard {excerpt(repr(shard.file), 60)}"
        most = shard.records * metadata.record_tokens if metadata.format < 3 else shard.bytes
        if not re.fullmatch(r"[\w.-]{1,100}", shard.file) or not 0 < shard.tokens <= most:
            return f"the shard {excerpt(repr(shard.file), 60)}"
    for split in SPLITS:
        if metadata.tokens[split] != sum(shard.tokens for shard in metadata.shards[split]):
            return f"the tokens of {split} are not those of its shards"
    fraction = metadata.validation_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        return "validation_fraction"
    if metadata.dtype not in ("uint16", "uint32") or not 0 <= metadata.record_tokens <= 2**24:
        return "dtype or record_tokens"
    return "" if metadata.limit_documents is None or not wrong(metadata.limit_documents, int) else "limit_documents"


def manifest_of_prepared(metadata: Metadata) -> Manifest | None:
    """The digests of the shards as a manifest; None for data of an earlier version."""
    shards = [shard for split in SPLITS for shard in metadata.shards[split]]
    if not all(shard.crc32c for shard in shards):
        return None
    files = {shard.file: Digest(shard.bytes, shard.crc32c) for shard in shards}
    of_records = [shard for shard in shards if shard.records_crc32c]
    return Manifest(files | {s.records_file: Digest(4 * s.records, s.records_crc32c) for s in of_records})


def write_metadata(directory: AnyPath, metadata: Metadata) -> None:
    """Writes metadata.json, with a digest of itself."""
    content = dataclasses.asdict(metadata)
    del content["record_tokens"], content["created"]
    for shard in (shard for split in SPLITS for shard in content["shards"][split]):
        del shard["records"], shard["records_crc32c"]
    write_json(directory / METADATA_FILE, sealed(content))


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


@dataclass(frozen=True)
class Prepared:
    """An open prepared directory."""

    directory: AnyPath
    metadata: Metadata
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream | RecordStream]

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
    kind = TokenStream if metadata.format >= 3 else RecordStream
    streams = {split: kind(directory, metadata, split) for split in SPLITS}
    return Prepared(directory, metadata, tokenizer, streams)

"""Preparation of data: the documents of a source become token shards in a new directory, or in the cache."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.config import SourceConfig
from pe_lab.data.shards import (
    METADATA_FILE,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Metadata,
    ShardWriter,
    read_metadata,
    write_metadata,
)
from pe_lab.data.sources import Source, open_source
from pe_lab.data.tokenizers import (
    KIND_FILE,
    Tokenizer,
    encodable,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)
from pe_lab.errors import ConfigError, DataError
from pe_lab.storage import AnyPath, is_file, new_directory, unfinished
from pe_lab.terminal import Progress, console

BATCH_CHARACTERS = 1_000_000  # of one call of the tokenizer
PIECE_CHARACTERS = 4_000_000  # longer documents are encoded in pieces that end at line ends
PATIENCE_SECONDS = 600  # without a change in the directory, until a waiting process gives up


def prepare(
    source: Source,
    column: str,
    tokenizer: Tokenizer,
    specification: str,
    directory: AnyPath,
    validation_fraction: float,
    limit_documents: int | None = None,
) -> Metadata:
    """Writes the prepared data of `source` to `directory`, or nothing at an error.

    The hash of a document decides its split, see `split_documents`.

    Raises:
      DataError: the corpus is empty or cannot be read.
      ConfigError: the fraction is not in [0, 1], or the directory cannot be written.
    """
    if not 0 <= validation_fraction <= 1:
        raise ConfigError(f"validation_fraction={validation_fraction} must lie in [0, 1].")
    with new_directory(directory, marker=METADATA_FILE) as building:
        dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
        writers = {split: ShardWriter(building, split, dtype) for split in SPLITS}
        content = hashlib.blake2b(digest_size=16)
        characters = 0

        def counted() -> Iterator[str]:
            nonlocal characters
            for number, document in enumerate(source.documents()):
                if number == limit_documents:
                    return
                document = encodable(document.text)
                content.update(len(document).to_bytes(8, "little") + document.encode())
                characters += len(document)
                yield document

        total = min((n for n in (source.count(), limit_documents) if n is not None), default=None)
        with Progress(console(stderr=True), f"preparing {source.name}", total) as progress:
            start = time.perf_counter()
            for batch in _batches(split_documents(counted(), validation_fraction)):
                texts = [text for _, text in batch]
                for (split, _), ids in zip(batch, _encode(tokenizer, texts), strict=True):
                    writers[split].add(np.append(ids, np.int32(tokenizer.eos_id)))
                documents, tokens = (sum(getattr(w, n) for w in writers.values()) for n in ("documents", "tokens"))
                seconds = max(time.perf_counter() - start, 1e-9)
                speed = f"{tokens:,} tokens ({tokens / seconds:,.0f}/s), {seconds:.0f} s"
                progress.update(documents, f"{documents:,} documents, {speed}")
        for writer in writers.values():
            writer.close()
        if not sum(w.documents for w in writers.values()):
            raise DataError(f"data source {source.name!r} is empty: no document has text.")
        metadata = Metadata(
            source=source.name,
            column=column,
            identity=json.loads(json.dumps(source.identity())),
            tokenizer=specification,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            dtype=dtype.name,
            validation_fraction=validation_fraction,
            limit_documents=limit_documents,
            documents={split: w.documents for split, w in writers.items()},
            tokens={split: w.tokens for split, w in writers.items()},
            characters=characters,
            content=content.hexdigest(),
            shards={split: tuple(w.shards) for split, w in writers.items()},
            python=sys.version.split()[0],
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        save_tokenizer(tokenizer, building / TOKENIZER_DIRECTORY)
        write_metadata(building, metadata)
    return read_metadata(directory)  # of another process, if that was faster


def split_documents(documents: Iterable[str], fraction: float) -> Iterator[tuple[str, str]]:
    """Pairs (split, document). The hash of a document decides, so equal documents share a split.

    If all documents fall into one split, the one whose hash is nearest to the boundary changes to the other, so that
    neither split of two different documents is empty. The end of a single document is held out. With `fraction` 0
    nothing is held out.
    """
    if fraction == 0:
        yield from (("train", document) for document in documents)
        return
    side, nearest, waiting, released, both = "", 2.0, [], False, False
    for document in documents:
        score = int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little") / 2**64
        split = "validation" if score < fraction else "train"
        gap = abs(score - fraction)
        if both:
            yield split, document
        elif side and split != side:
            both = True
            yield from ((side, d) for d in waiting)
            yield split, document
        elif gap < nearest:
            released = bool(side)
            yield from ((split, d) for d in waiting)
            side, nearest, waiting = split, gap, [document]
        elif gap == nearest:
            waiting.append(document)
        else:
            released = True
            yield split, document
    if both or not waiting:
        return
    if released:
        yield from (("validation" if side == "train" else "train", d) for d in waiting)
        return
    cut = max(1, int(len(waiting[0]) * (1 - fraction)))
    yield from (("train", d[:cut]) for d in waiting)
    if waiting[0][cut:]:
        yield "validation", waiting[0][cut:]


def _batches(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for pair in pairs:
        batch.append(pair)
        characters += len(pair[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The token ids of each text."""
    pieces = [_pieces(text) for text in texts]
    encoded = iter(tokenizer.encode_batch([piece for group in pieces for piece in group]))
    return [np.concatenate([next(encoded) for _ in group]) for group in pieces]


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def ensure_prepared(
    config: SourceConfig,
    tokenizer: Tokenizer,
    specification: str,
    cache_dir: Path,
    validation_fraction: float,
    process_index: int = 0,
) -> Path:
    """The directory of a source's shards in the cache. If it is missing, process 0 prepares it and the others wait.

    The name of the directory contains a hash of everything that the shards depend on.

    Raises:
      DataError: the source cannot be prepared, or process 0 does not prepare it.
    """
    source = open_source(config)
    options = dict(config.options)
    key = [config.source, config.column, options, source.identity(), tokenizer.fingerprint, validation_fraction]
    name = re.sub(r"[^A-Za-z0-9]+", "-", config.source).strip("-")[:40].lower() or "source"
    directory = cache_dir / f"{name}-{_hash(key)}"

    def make() -> None:
        prepare(source, config.column, tokenizer, specification, directory, validation_fraction)

    return _cached(directory, METADATA_FILE, process_index, make)


def ensure_tokenizer(
    specification: str, configs: Sequence[SourceConfig], cache_dir: Path, process_index: int = 0
) -> Tokenizer:
    """The tokenizer of a specification; `sentencepiece:train:SIZE` is trained on the sources once, by process 0.

    Raises:
      UserError: the tokenizer cannot be read or trained.
    """
    size = training_size(specification)
    if size is None:
        return load_tokenizer(specification)
    sources = [open_source(config) for config in configs]
    if not sources:
        raise ConfigError(
            f"data.tokenizer={specification!r} has no text to train on. Add a text source, or use tokenizer=bytes."
        )
    key = [size, [[s.name, c.column, s.identity()] for s, c in zip(sources, configs, strict=True)]]
    directory = cache_dir / f"tokenizer-sentencepiece-{size}-{_hash(key)}"

    def make() -> None:
        documents = (encodable(document.text) for source in sources for document in source.documents())
        trained = train_sentencepiece(documents, size, ", ".join(s.name for s in sources))
        with new_directory(directory, marker=KIND_FILE) as building:
            save_tokenizer(trained, building)

    return load_saved_tokenizer(_cached(directory, KIND_FILE, process_index, make))


def _cached(directory: Path, marker: str, process_index: int, make: Callable[[], None]) -> Path:
    """The directory; if it has no file `marker`, process 0 makes it and the others wait."""
    if is_file(directory / marker):
        return directory
    if process_index == 0:
        make()
        return directory
    last_change = time.time()
    while not is_file(directory / marker):
        time.sleep(0.2)
        for building in unfinished(directory):
            with contextlib.suppress(OSError):
                last_change = max(last_change, *(p.stat().st_mtime for p in (building, *building.iterdir())))
        if time.time() - last_change > PATIENCE_SECONDS:
            raise DataError(
                f"Waited {PATIENCE_SECONDS:.0f} s for process 0 to write {directory}, without any change there. "
                "Put data.cache_dir on a file system that all hosts share, or run python -m pe_lab.prepare on "
                "each host and set data.prepared."
            )
    return directory


def _hash(key: Any) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()

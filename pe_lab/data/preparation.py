"""Writing a prepared directory: documents to tokens to shards, beside and then renamed, by one process."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
)
from pe_lab.data.sources import Source, open_source
from pe_lab.data.tokenizers import (
    KIND_FILE,
    Tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)
from pe_lab.errors import UserError
from pe_lab.storage import new_directory, unfinished

BATCH_CHARACTERS = 1_000_000  # text handed to the tokenizer at once
PIECE_CHARACTERS = 4_000_000  # a longer document is encoded in pieces, cut at line ends
PATIENCE_SECONDS = 600  # a process waiting for another's shards gives up after this long without a sign of work


def prepare(
    source: Source,
    column: str,
    tokenizer: Tokenizer,
    specification: str,
    directory: Path,
    validation_fraction: float,
    limit_documents: int | None = None,
) -> Metadata:
    """Writes `directory` from the documents of `source`, or leaves nothing behind.

    A document is held out for validation by its hash alone, see `split_documents`.

    Raises:
      UserError: the corpus is empty or cannot be read, or the fraction or the directory is unusable.
    """
    if not 0 <= validation_fraction <= 1:
        raise UserError(f"validation_fraction={validation_fraction} must lie in [0, 1].")
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
                document = encodable(document)
                content.update(len(document).to_bytes(8, "little") + document.encode())
                characters += len(document)
                yield document

        with _progress(source, limit_documents) as advance:
            for batch in _batches(split_documents(counted(), validation_fraction)):
                texts = [text for _, text in batch]
                for (split, _), ids in zip(batch, _encode(tokenizer, texts), strict=True):
                    writers[split].add(np.append(ids, np.int32(tokenizer.eos_id)))
                advance(len(batch), sum(w.tokens for w in writers.values()))
        for writer in writers.values():
            writer.close()
        if not sum(w.documents for w in writers.values()):
            raise UserError(f"data source {source.name!r} is empty: it has no document with text in it.")
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
            record_tokens=writers["train"].record_tokens,
            shards={split: tuple(w.shards) for split, w in writers.items()},
            python=sys.version.split()[0],
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        save_tokenizer(tokenizer, building / TOKENIZER_DIRECTORY)
        (building / METADATA_FILE).write_text(metadata.to_json(), encoding="utf-8")
    return read_metadata(directory)  # another process may have been first


def split_documents(documents: Iterable[str], fraction: float) -> Iterator[tuple[str, str]]:
    """Pairs (split, document), by the document's hash, so that equal documents share a split.

    Chance may put everything on one side. Then the document nearest to the boundary changes sides, so that
    with two different documents neither split is empty; of one document alone the end is held out. `fraction`
    0 holds out nothing.
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


def encodable(document: str) -> str:
    """The document without lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        document.encode()
        return document
    except UnicodeEncodeError:
        return document.encode("utf-8", "replace").decode()


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
    """Token ids of each text."""
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


@contextlib.contextmanager
def _progress(source: Source, limit: int | None) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr. Calls: (documents since the last call, tokens so far)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    count = source.count()
    total = count if limit is None else min(limit, limit if count is None else count)
    columns = (
        TextColumn("preparing {task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed:.0f} documents"),
        TextColumn("{task.fields[tokens]:,} tokens ({task.fields[speed]:,.0f}/s)"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        name = source.name if len(source.name) <= 24 else "…" + source.name[-23:]
        task = progress.add_task(name, total=total, tokens=0, speed=0.0)
        start = time.perf_counter()

        def advance(documents: int, tokens: int) -> None:
            progress.update(
                task, advance=documents, tokens=tokens, speed=tokens / max(time.perf_counter() - start, 1e-9)
            )

        yield advance
        done = int(progress.tasks[0].completed)
        progress.update(task, total=done)


def _last_touched(building: Path) -> float:
    return max(p.stat().st_mtime for p in (building, *building.iterdir()))


def ensure_prepared(
    config: SourceConfig,
    tokenizer: Tokenizer,
    specification: str,
    cache_dir: Path,
    validation_fraction: float,
    process_index: int = 0,
) -> Path:
    """The cached shards of a source, written first if need be: by process 0, while the others wait.

    The directory's name has a hash of everything the shards depend on: another corpus is another directory.

    Raises:
      UserError: the source cannot be prepared, or process 0 shows no sign of preparing it.
    """
    source = open_source(config)
    key = [
        config.source,
        config.column,
        dict(config.options),
        source.identity(),
        tokenizer.fingerprint,
        validation_fraction,
    ]
    directory = cache_dir / f"{_slug(config.source)}-{_hash(key)}"
    if not (directory / METADATA_FILE).is_file():
        if process_index == 0:
            prepare(source, config.column, tokenizer, specification, directory, validation_fraction)
        else:
            _wait_for(directory, METADATA_FILE)
    return directory


def ensure_tokenizer(
    specification: str, configs: Iterable[SourceConfig], cache_dir: Path, process_index: int = 0
) -> Tokenizer:
    """The tokenizer of a specification, trained first (on the sources, by process 0) if it says so.

    Raises:
      UserError: the tokenizer cannot be read or trained.
    """
    size = training_size(specification)
    if size is None:
        return load_tokenizer(specification)
    sources = [open_source(config) for config in configs]
    if not sources:
        raise UserError(
            f"data.tokenizer={specification!r} has no text to train on. Add a text source, or use tokenizer=bytes."
        )
    key = [size, [[s.name, c.column, s.identity()] for s, c in zip(sources, configs, strict=True)]]
    directory = cache_dir / f"tokenizer-sentencepiece-{size}-{_hash(key)}"
    if not (directory / KIND_FILE).is_file():
        if process_index == 0:
            documents = (encodable(document) for source in sources for document in source.documents())
            trained = train_sentencepiece(documents, size, ", ".join(s.name for s in sources))
            with new_directory(directory, marker=KIND_FILE) as building:
                save_tokenizer(trained, building)
        else:
            _wait_for(directory, KIND_FILE)
    return load_saved_tokenizer(directory)


def _wait_for(directory: Path, marker: str) -> None:
    last_sign = time.time()
    while not (directory / marker).is_file():
        time.sleep(0.2)
        for building in unfinished(directory):
            with contextlib.suppress(OSError):
                last_sign = max(last_sign, _last_touched(building))
        if time.time() - last_sign > PATIENCE_SECONDS:
            raise UserError(
                f"Waited {PATIENCE_SECONDS:.0f} s for process 0 to write {directory}, with no sign of it. "
                "Put data.cache_dir on a file system all hosts share, or run python -m pe_lab.prepare on "
                "each host and set data.prepared."
            )


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40].lower() or "source"


def _hash(key: Any) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()

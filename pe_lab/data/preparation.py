"""Preparation of data: the documents of a source become token shards in a new directory, or in the cache.

The directory is filled beside its place, step after step, shard after shard (`data/shard_preparation.py`), by whoever
is to run them (`data/executors.py`), and then described (`data/gathering.py`). What was interrupted goes on where it
stopped: finished shards are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import SourceConfig, to_json
from pe_lab.data.chat import chat_fingerprint
from pe_lab.data.executors import Executor, in_this_process
from pe_lab.data.filters import Filters, text_of
from pe_lab.data.gathering import (
    damage_of,
    decide_duplicates,
    finished_shards,
    gather,
    left_shards,
    publish,
    statistics_of,
)
from pe_lab.data.shard_preparation import PLAN_FILE, WORK, Place, Plan, Work, open_work
from pe_lab.data.shards import METADATA_FILE, TOKENIZER_DIRECTORY, Metadata, read_metadata
from pe_lab.data.sources import open_source
from pe_lab.data.tokenizers import (
    KIND_FILE,
    Tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)
from pe_lab.errors import ConfigError, DataError, UserError, redacted, resource
from pe_lab.storage import (
    AnyPath,
    LeaseTaken,
    is_file,
    is_remote,
    lease,
    listing,
    new_directory,
    read_json,
    remove,
    remove_tree,
    unfinished,
    write_json,
)
from pe_lab.terminal import Progress, console

PATIENCE_SECONDS = 600  # without a change in the directory, until a waiting process gives up
LEASE_SECONDS = 1.0  # between two attempts to take the lease of another process


def prepare(
    config: SourceConfig,
    tokenizer: Tokenizer,
    specification: str,
    directory: AnyPath,
    validation_fraction: float,
    limit_documents: int | None = None,
    filters: Filters | None = None,
    executor: Executor = in_this_process,
    task: tuple[int, int] = (0, 1),
) -> Metadata | None:
    """Writes the prepared data of a source to `directory`, which is there when it is whole.

    The hash of a document decides its split, see `Split`. The files are the same, whoever runs the shards.

    Args:
      config: the source.
      tokenizer: encodes the documents.
      specification: its name, for the description.
      directory: does not exist, or is empty, or this preparation was interrupted.
      validation_fraction: of the documents, held out.
      limit_documents: read only so many, the first ones.
      filters: which documents are dropped.
      executor: runs the shards.
      task: (i, n): this is task i of n, which does every n-th shard. The last one to end finishes the directory.

    Returns:
      The description; None if other tasks have to do their shards first.

    Raises:
      DataError: the corpus is empty or cannot be read, or every document was dropped.
      ConfigError: an argument is wrong, the directory cannot be written, or other arguments began it.
    """
    filters = filters or Filters()
    if not 0 <= validation_fraction <= 1:
        raise ConfigError(f"validation_fraction={validation_fraction} must lie in [0, 1].")
    filters.check()
    plan = make_plan(config, tokenizer, specification, validation_fraction, limit_documents, filters)
    directory = directory if is_remote(directory) else directory.absolute()
    building, alone = building_directory(directory), task[1] == 1
    whole = contextlib.nullcontext if alone else lambda: _writing(directory)  # what one task does for all

    def finished() -> Metadata | None:
        with whole():  # another task may be about to put the directory into its place
            return read_metadata(directory) if is_file(directory / METADATA_FILE) else None

    with _explained(directory), _writing(directory) if alone else contextlib.nullcontext():
        fresh = not is_file(building / WORK / PLAN_FILE)
        try:
            with whole():
                _finish(directory)
                if is_file(directory / METADATA_FILE):  # another process was faster
                    return read_metadata(directory)
                place = _begin(building, plan, tokenizer, directory)
                mine = range(len(plan.shards))[task[0] :: task[1]]
                left = set(mine) - finished_shards(building, "shard")
            work = open_work(place)
            # A task that has done its share writes nothing: the others may end at any moment.
            if alone or left:
                if filters.duplicates:
                    _run(work, place, "fingerprints", mine, executor)
                    if left_shards(work, "fingerprints"):
                        return None
                    with whole():
                        decide_duplicates(work)
                _run(work, place, "shard", mine, executor)
            if left_shards(work, "shard"):
                return finished()
            with whole():
                if not is_file(directory / METADATA_FILE):
                    gather(work, directory, lambda shards: _run(work, place, "shard", shards, executor, shards))
        except (UserError, OSError):
            if not alone and (metadata := finished()):  # what this task was about to read is no more
                return metadata
            if alone and fresh and not any(finished_shards(building, step) for step in ("fingerprints", "shard")):
                remove_tree(building)
            raise
    return read_metadata(directory)


def building_directory(directory: AnyPath) -> AnyPath:
    """Where the files of `directory` are until it is whole: on an object store in it, without metadata.json."""
    return directory if is_remote(directory) else directory.with_name(f".{directory.name}.preparing")


def begun(directory: AnyPath) -> tuple[str, str] | None:
    """The tokenizer of an interrupted preparation, by its name and as it was saved; None if none was interrupted."""
    building = building_directory(directory)
    try:
        return read_json(building / WORK / PLAN_FILE)["tokenizer"], f"saved:{building / TOKENIZER_DIRECTORY}"
    except DataError:
        if is_file(building / WORK / PLAN_FILE):
            raise
    return None


def finish_interrupted(directory: AnyPath) -> None:
    """Puts a directory into its place that was whole when its process was killed; one that is alive is waited for."""
    if _is_whole(directory):
        with _writing(directory):
            _finish(directory)


def _finish(directory: AnyPath) -> None:
    if _is_whole(directory):
        publish(building_directory(directory), directory)


def _is_whole(directory: AnyPath) -> bool:
    building = building_directory(directory)
    return is_file(building / METADATA_FILE) and (building != directory or bool(listing(building / WORK)))


def make_plan(
    config: SourceConfig,
    tokenizer: Tokenizer,
    specification: str,
    validation_fraction: float,
    limit_documents: int | None,
    filters: Filters,
) -> Plan:
    """The plan of a preparation. With a limit, the first documents of the source are counted."""
    source = open_source(config)
    shards, documents = source.shards(), []
    for shard in shards if limit_documents is not None else ():
        left = limit_documents - sum(documents)
        documents.append(sum(1 for _ in itertools.islice(source.read(shard), left)))
        if left == documents[-1]:
            break
    return Plan(
        config,
        json.loads(json.dumps(source.identity())),
        tuple(shards[: len(documents)] if limit_documents is not None else shards),
        tuple(documents) if limit_documents is not None else (None,) * len(shards),
        specification,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eos_id,
        validation_fraction,
        limit_documents,
        filters,
        filters.libraries() | ({"chat_template": chat_fingerprint(tokenizer)} if config.chat else {}),
    )


@contextlib.contextmanager
def _explained(directory: AnyPath) -> Iterator[None]:
    """Makes an error of the disk a `ConfigError`, and removes the parents that were made for nothing."""
    parents = [] if is_remote(directory) else [p for p in directory.parents if not p.exists()]
    try:
        yield
    except BaseException as error:
        for parent in parents:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"'{directory}' cannot be written ({error.strerror or error}).") from error
        raise


@contextlib.contextmanager
def _writing(directory: AnyPath) -> Iterator[None]:
    """Holds the lease of a directory that is being prepared, once the process that has it ends."""
    path, show = directory.with_name(f".{directory.name}.lease"), console(stderr=True)
    with contextlib.ExitStack() as stack:
        owner = ""
        while True:
            try:
                stack.enter_context(lease(path, show.print, lambda message: None))
                break
            except LeaseTaken as taken:
                if taken.owner != owner:
                    show.print(f"{directory} is being prepared by {taken.owner}: waiting")
                owner = taken.owner
                time.sleep(LEASE_SECONDS)
        yield


def _begin(building: AnyPath, plan: Plan, tokenizer: Tokenizer, directory: AnyPath) -> Place:
    """Writes the tokenizer and the plan, or compares the plan with the one that is there.

    The plan has the addresses as they are given, for the processes that read them, so on a disk only its owner reads
    it; it is removed with the shards' files when the data are whole. Credentials may be others than when it was begun.
    """
    wanted, path = json.loads(json.dumps(plan.to_json())), building / WORK / PLAN_FILE
    place = Place(str(building), _hash(wanted))
    if not is_file(path):
        save_tokenizer(tokenizer, building / TOKENIZER_DIRECTORY)
        write_json(path, wanted, private=True)
        return place
    found = read_json(path)
    for name in wanted:
        if to_json(wanted[name]) == to_json(found.get(name)):
            continue
        changed = "the files of the source have changed since"
        if name not in ("identity", "shards", "documents"):
            changed = f"it had begun with {name}={_short(found.get(name))}, not {_short(wanted[name])}"
        advice = f"Choose another directory; or, to begin anew, remove {path.parent if is_remote(path) else building}."
        raise ConfigError(f"The preparation of '{directory}' was interrupted, and {changed}. {advice}")
    if found != wanted:
        write_json(path, wanted, private=True)
    return place


def _short(value: Any) -> str:
    shown = json.dumps(to_json(value))
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


def _run(
    work: Work,
    place: Place,
    step: str,
    shards: Collection[int],
    executor: Executor,
    endings: Mapping[int, str] | None = None,
) -> None:
    """Runs a step for those of the shards for which it is not done yet, and shows the progress."""
    done = finished_shards(work.directory, step) & set(shards)
    before = 0  # documents
    for shard in sorted(done) if step == "shard" else ():
        statistics = statistics_of(work, shard)
        if damage_of(work, statistics):
            remove(work.file(step, shard))
            done.discard(shard)
        else:
            before += statistics["read"]
    left = {shard: (endings or {}).get(shard, "keep") for shard in shards if shard not in done}
    if not left:
        return
    total = work.count() if step == "shard" and len(shards) == len(work.plan.shards) else None
    name = f"{'preparing' if step == 'shard' else 'comparing'} {work.source.name}"
    documents, tokens, finished, begun = 0, 0, len(done), time.perf_counter()
    unit = (total, before) if total else (len(shards), len(done))
    with Progress(console(stderr=True), name, *unit) as progress:

        def show() -> None:
            seconds = max(time.perf_counter() - begun, 1e-9)
            speed = f", {tokens:,} tokens ({tokens / seconds:,.0f}/s)" if step == "shard" else ""
            progress.update(
                before + documents if total else finished, f"{documents:,} documents{speed}, {seconds:.0f} s"
            )

        def report(more_documents: int, more_tokens: int) -> None:
            nonlocal documents, tokens
            documents, tokens = documents + more_documents, tokens + more_tokens
            show()

        for number in executor(place, step, left, report):
            finished += number
            show()


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
    options, shown = dict(config.options), redacted(config.source)
    key = [
        resource(config.source),
        config.column,
        options,
        source.identity(),
        tokenizer.fingerprint,
        validation_fraction,
    ]
    key += [chat_fingerprint(tokenizer)] if config.chat else []
    name = re.sub(r"[^A-Za-z0-9]+", "-", shown).strip("-")[:40].lower() or "source"
    directory = cache_dir / f"{name}-{_hash(key)}"

    def make() -> None:
        prepare(config, tokenizer, specification, directory, validation_fraction)

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
    key = [size, [[resource(s.name), c.column, s.identity()] for s, c in zip(sources, configs, strict=True)]]
    directory = cache_dir / f"tokenizer-sentencepiece-{size}-{_hash(key)}"

    def make() -> None:
        documents = (text_of(document) for source in sources for document in source.documents())
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
        being_filled = [building_directory(directory), building_directory(directory) / WORK, *unfinished(directory)]
        for building in being_filled if not is_remote(directory) else ():
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

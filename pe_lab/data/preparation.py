"""Preparation of data: the documents of a source become token shards in a new directory.

The directory is filled beside its place, step after step, shard after shard (`data/shard_preparation.py`), by whoever
is to run them (`data/executors.py`), and then described. What was interrupted goes on where it stopped: finished shards
are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pe_lab.config import SourceConfig, to_json
from pe_lab.data.chat import chat_fingerprint
from pe_lab.data.executors import Executor, in_this_process
from pe_lab.data.filters import REASONS, Filters, Fingerprints, decide, joined_samples, read_arrays, write_arrays
from pe_lab.data.shard_preparation import PLAN_FILE, WORK, OpenPlan, PlanAddress, PreparationPlan, open_plan
from pe_lab.data.shards import (
    METADATA_FILE,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Metadata,
    Shard,
    read_metadata,
    write_metadata,
)
from pe_lab.data.sources import DataSource, InputShard, open_source
from pe_lab.data.tokenizers import Tokenizer, save_tokenizer
from pe_lab.errors import ConfigError, DataError, UserError, redacted
from pe_lab.storage import (
    AnyPath,
    LeaseTaken,
    is_file,
    is_remote,
    lease,
    listing,
    read_json,
    remove,
    remove_tree,
    write_json,
    write_records,
)
from pe_lab.terminal import Progress, console

LEASE_SECONDS = 1.0  # between two attempts to take the lease of another process
DROPPED = "dropped"  # the directory of the samples of dropped documents


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
      specification: the name of the tokenizer, for the description.
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
    source = open_source(config)
    shards = source.shards()
    documents: list[int | None] = [None] * len(shards)
    if limit_documents is not None:
        shards, documents = _first_documents(source, limit_documents)
    plan = PreparationPlan(
        config,
        json.loads(json.dumps(source.identity())),
        tuple(shards),
        tuple(documents),
        specification,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eos_id,
        validation_fraction,
        limit_documents,
        filters,
        filters.libraries() | ({"chat_template": chat_fingerprint(tokenizer)} if config.chat else {}),
    )
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
                address = _begin(building, plan, tokenizer, directory)
                mine = dict.fromkeys(range(len(plan.shards))[task[0] :: task[1]], "keep")
                left = mine.keys() - finished_shards(building, "shard")
            opened = open_plan(address)
            # A task that has done its share writes nothing: the others may end at any moment.
            if alone or left:
                if filters.duplicates:
                    _run(opened, "fingerprints", mine, executor)
                    if left_shards(opened, "fingerprints"):
                        return None
                    with whole():
                        decide_duplicates(opened)
                _run(opened, "shard", mine, executor)
            if left_shards(opened, "shard"):
                return finished()
            with whole():
                if not is_file(directory / METADATA_FILE):
                    gather(opened, directory, executor)
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


def _first_documents(source: DataSource, limit: int) -> tuple[list[InputShard], list[int | None]]:
    """The shards that have the first documents of a source, and how many of them each has."""
    shards, documents = source.shards(), []
    for shard in shards:
        left = limit - sum(documents)
        documents.append(sum(1 for _ in itertools.islice(source.read(shard), left)))
        if left == documents[-1]:
            break
    return shards[: len(documents)], documents


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


def _begin(building: AnyPath, plan: PreparationPlan, tokenizer: Tokenizer, directory: AnyPath) -> PlanAddress:
    """Writes the tokenizer and the plan, or compares the plan with the one that is there.

    The plan has the addresses as they are given, for the processes that read them, so on a disk only its owner reads
    it; it is removed with the shards' files when the data are whole. Credentials may be others than when it was begun.
    """
    wanted, path = json.loads(json.dumps(plan.to_json())), building / WORK / PLAN_FILE
    address = PlanAddress(str(building), digest_of(wanted))
    if not is_file(path):
        save_tokenizer(tokenizer, building / TOKENIZER_DIRECTORY)
        write_json(path, wanted, private=True)
        return address
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
    return address


def _short(value: Any) -> str:
    shown = json.dumps(to_json(value))
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


def _run(opened: OpenPlan, step: str, shards: Mapping[int, str], executor: Executor) -> None:
    """Runs a step for those of the shards, each with its ending, for which it is not done; shows the progress."""
    done = finished_shards(opened.directory, step) & shards.keys()
    before = 0  # documents
    for shard in sorted(done) if step == "shard" else ():
        statistics = statistics_of(opened, shard)
        if damage_of(opened, statistics):
            remove(opened.file(step, shard))
            done.discard(shard)
        else:
            before += statistics["read"]
    left = {shard: ending for shard, ending in shards.items() if shard not in done}
    if not left:
        return
    total = opened.count() if step == "shard" and len(shards) == len(opened.plan.shards) else None
    name = f"{'preparing' if step == 'shard' else 'comparing'} {opened.source.name}"
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

        for number in executor(opened.address, step, left, report):
            finished += number
            show()


def digest_of(key: Any) -> str:
    """A short hash of what can be JSON."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The end: what the shards are together, from what is on disk, and the directory in its place


def finished_shards(building: AnyPath, kind: str) -> set[int]:
    """The numbers of the shards for which a file of that kind is there."""
    names = (re.fullmatch(rf"{kind}-(\d+)\.\w+", name) for name in listing(building / WORK))
    return {int(name[1]) for name in names if name}


def left_shards(opened: OpenPlan, kind: str) -> list[int]:
    finished = finished_shards(opened.directory, kind)
    return [shard for shard in range(len(opened.plan.shards)) if shard not in finished]


def statistics_of(opened: OpenPlan, shard: int) -> dict[str, Any]:
    return read_json(opened.file("shard", shard), "Remove it, and repeat the command.")


def damage_of(opened: OpenPlan, statistics: Mapping[str, Any]) -> str:
    """What is wrong with the token shards of an input shard, by their headers; "" if nothing is."""
    for shard in (Shard(**shard) for split in SPLITS for shard in statistics["shards"][split]):
        try:
            with (opened.directory / shard.file).open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                size = file.seek(0, 2)
            written = (header["tokens"]["shape"], header["ends"]["shape"], size)
        except (OSError, ValueError, KeyError, struct.error):
            return f"{shard.file} is missing or damaged"
        if written != ([shard.tokens], [shard.documents], shard.bytes):
            return f"{shard.file} is not what was written"
    return ""


def decide_duplicates(opened: OpenPlan) -> None:
    """Writes for each shard which of its documents are duplicates."""
    if not left_shards(opened, "decisions"):
        return
    shards = range(len(opened.plan.shards))
    found = [read_arrays(opened.file("fingerprints", shard), Fingerprints) for shard in shards]
    for shard, decisions in zip(shards, decide(found, opened.plan.filters), strict=True):
        write_arrays(opened.file("decisions", shard), decisions)


def endings(splits: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The ending of every shard (see `prepare_shard`), by what `Split` found in each."""
    chosen = dict.fromkeys(range(len(splits)), "keep")
    with_documents = {i: split for i, split in enumerate(splits) if split["side"]}
    sides = {split["side"] for split in with_documents.values()}
    nearest = min((split["nearest"] for split in with_documents.values()), default=2.0)
    if len(sides) != 1 or nearest > 1 or any(split["both"] for split in splits):
        return chosen
    at = [i for i, split in with_documents.items() if split["nearest"] == nearest]
    if len(at) < len(with_documents) or any(split["released"] for split in splits):
        return chosen | dict.fromkeys(at, "move")
    return chosen | dict.fromkeys(at, "cut again") | {at[0]: "cut"}


def gather(opened: OpenPlan, directory: AnyPath, executor: Executor) -> None:
    """Describes the shards, all of which are written, and puts the directory into its place.

    Args:
      opened: the plan, opened.
      directory: where the directory of `opened` is to be.
      executor: prepares some shards again, with another ending each.

    Raises:
      DataError: no document is left, or a shard is damaged.
    """
    plan, shards = opened.plan, range(len(opened.plan.shards))
    statistics, samples = _read_statistics(opened)
    wanted = endings([one["split"] for one in statistics])
    wanted = {shard: ending for shard, ending in wanted.items() if statistics[shard]["ending"] != ending}
    if wanted:  # one split is empty: another pass over the shards of one document
        for shard in wanted:
            remove(opened.file("shard", shard))
        _run(opened, "shard", wanted, executor)
        statistics, samples = _read_statistics(opened)
    for shard, one in enumerate(statistics):
        if damage := damage_of(opened, one):
            remove(opened.file("shard", shard))
            raise DataError(f"{directory}: {damage}. Repeat the command, which prepares the shard again.")
    files = {split: tuple(Shard(**s) for one in statistics for s in one["shards"][split]) for split in SPLITS}
    dropped = sum((Counter(one["dropped"]) for one in statistics), Counter())
    if not any(files.values()):
        remove_tree(opened.directory)
        if not dropped:
            raise DataError(f"data source {opened.source.name!r} is empty: no document has text.")
        reasons = ", ".join(f"{reason} {dropped[reason]:,}" for reason in REASONS if dropped[reason])
        raise DataError(
            f"Every document of {opened.source.name!r} was dropped by the filters ({reasons}). Loosen them, or look at "
            "the corpus."
        )
    empty = [plan.shards[shard].name for shard in shards if not statistics[shard]["read"]]
    if empty:
        more = f" and {len(empty) - 3:,} more" if len(empty) > 3 else ""
        console(stderr=True).print(f"no documents in {', '.join(empty[:3])}{more}")
    for reason, records in samples.items():
        write_records(opened.directory / DROPPED / f"{reason}.jsonl", records)
    write_metadata(
        opened.directory,
        Metadata(
            source=redacted(opened.source.name),
            column=plan.source.column,
            template=plan.source.template,
            chat=plan.source.chat,
            identity=plan.identity,
            tokenizer=plan.tokenizer,
            tokenizer_fingerprint=plan.tokenizer_fingerprint,
            vocab_size=plan.vocab_size,
            eos_id=plan.eos_id,
            dtype=plan.dtype.name,
            validation_fraction=plan.validation_fraction,
            limit_documents=plan.limit_documents,
            filters=plan.filters.settings(),
            dropped={reason: dropped[reason] for reason in REASONS if dropped[reason]},
            documents={split: sum(shard.documents for shard in files[split]) for split in SPLITS},
            tokens={split: sum(shard.tokens for shard in files[split]) for split in SPLITS},
            characters=sum(one["characters"] for one in statistics),
            content=_content(plan, statistics),
            shards=files,
            python=sys.version.split()[0],
        ),
    )
    publish(opened.directory, directory)


def _read_statistics(opened: OpenPlan) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The statistics of every shard, and the samples of the whole corpus."""
    statistics: list[dict[str, Any]] = []

    def samples() -> Iterator[dict[str, Any]]:
        for shard in range(len(opened.plan.shards)):
            statistics.append(statistics_of(opened, shard))
            yield statistics[-1].pop("samples")

    return statistics, joined_samples(samples())


def _content(plan: PreparationPlan, statistics: Sequence[Mapping[str, Any]]) -> str:
    """A hash of every document that was kept, of filters and templates; of one shard without them, that of its own."""
    settings = [plan.filters.settings(), plan.source.template, plan.source.chat]
    settings += [plan.libraries["chat_template"]] if plan.source.chat else []
    of_shards = [one["content"] for one in statistics]
    if len(of_shards) == 1 and not any(settings):
        return of_shards[0]
    return hashlib.blake2b(json.dumps([of_shards, *settings], sort_keys=True).encode(), digest_size=16).hexdigest()


def publish(building: AnyPath, directory: AnyPath) -> None:
    """Makes a directory that has its metadata.json the prepared one, without what only the preparation needed."""
    metadata = read_metadata(building)
    known = {METADATA_FILE} | {shard.file for split in SPLITS for shard in metadata.shards[split]}
    for name in listing(building) if building != directory else ():
        if name not in known and not name.startswith((f"{TOKENIZER_DIRECTORY}/", f"{DROPPED}/", f"{WORK}/")):
            remove(building / name)  # of a killed process
    remove_tree(building / WORK)
    if building != directory:
        try:
            building.rename(directory)
        except OSError:
            if not is_file(directory / METADATA_FILE):
                raise
            remove_tree(building)

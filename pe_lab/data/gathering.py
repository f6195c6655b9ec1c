"""The end of a preparation: what its shards are together, from what is on disk, and the directory in its place."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pe_lab.data.duplicates import Fingerprints, decide, read_arrays, write_arrays
from pe_lab.data.filters import REASONS, joined_samples
from pe_lab.data.shard_preparation import WORK, Plan, Work
from pe_lab.data.shards import (
    METADATA_FILE,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Metadata,
    Shard,
    read_metadata,
    write_metadata,
)
from pe_lab.errors import DataError, redacted
from pe_lab.storage import AnyPath, is_file, listing, read_json, remove, remove_tree, write_records
from pe_lab.terminal import console

DROPPED = "dropped"  # the directory of the samples of dropped documents


def finished_shards(building: AnyPath, kind: str) -> set[int]:
    """The numbers of the shards for which a file of that kind is there."""
    names = (re.fullmatch(rf"{kind}-(\d+)\.\w+", name) for name in listing(building / WORK))
    return {int(name[1]) for name in names if name}


def left_shards(work: Work, kind: str) -> list[int]:
    finished = finished_shards(work.directory, kind)
    return [shard for shard in range(len(work.plan.shards)) if shard not in finished]


def statistics_of(work: Work, shard: int) -> dict[str, Any]:
    return read_json(work.file("shard", shard), "Remove it, and repeat the command.")


def damage_of(work: Work, statistics: Mapping[str, Any]) -> str:
    """What is wrong with the token shards of an input shard, by their headers; "" if nothing is."""
    for shard in (Shard(**shard) for split in SPLITS for shard in statistics["shards"][split]):
        try:
            with (work.directory / shard.file).open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                size = file.seek(0, 2)
            written = (header["tokens"]["shape"], header["ends"]["shape"], size)
        except (OSError, ValueError, KeyError, struct.error):
            return f"{shard.file} is missing or damaged"
        if written != ([shard.tokens], [shard.documents], shard.bytes):
            return f"{shard.file} is not what was written"
    return ""


def decide_duplicates(work: Work) -> None:
    """Writes for each shard which of its documents are duplicates."""
    if not left_shards(work, "decisions"):
        return
    shards = range(len(work.plan.shards))
    found = [read_arrays(work.file("fingerprints", shard), Fingerprints) for shard in shards]
    for shard, decisions in zip(shards, decide(found, work.plan.filters), strict=True):
        write_arrays(work.file("decisions", shard), decisions)


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


def gather(work: Work, directory: AnyPath, again: Callable[[dict[int, str]], None]) -> None:
    """Describes the shards, all of which are written, and puts the directory into its place.

    Args:
      work: the opened plan.
      directory: where the directory of `work` is to be.
      again: prepares some shards again, with another ending each.

    Raises:
      DataError: no document is left, or a shard is damaged.
    """
    plan, shards = work.plan, range(len(work.plan.shards))
    statistics, samples = _read_statistics(work)
    wanted = endings([one["split"] for one in statistics])
    wanted = {shard: ending for shard, ending in wanted.items() if statistics[shard]["ending"] != ending}
    if wanted:  # one split is empty: another pass over the shards of one document
        for shard in wanted:
            remove(work.file("shard", shard))
        again(wanted)
        statistics, samples = _read_statistics(work)
    for shard, one in enumerate(statistics):
        if damage := damage_of(work, one):
            remove(work.file("shard", shard))
            raise DataError(f"{directory}: {damage}. Repeat the command, which prepares the shard again.")
    files = {split: tuple(Shard(**s) for one in statistics for s in one["shards"][split]) for split in SPLITS}
    dropped = sum((Counter(one["dropped"]) for one in statistics), Counter())
    if not any(files.values()):
        remove_tree(work.directory)
        if not dropped:
            raise DataError(f"data source {work.source.name!r} is empty: no document has text.")
        reasons = ", ".join(f"{reason} {dropped[reason]:,}" for reason in REASONS if dropped[reason])
        raise DataError(
            f"Every document of {work.source.name!r} was dropped by the filters ({reasons}). Loosen them, or look at "
            "the corpus."
        )
    empty = [plan.shards[shard].name for shard in shards if not statistics[shard]["read"]]
    if empty:
        more = f" and {len(empty) - 3:,} more" if len(empty) > 3 else ""
        console(stderr=True).print(f"no documents in {', '.join(empty[:3])}{more}")
    for reason, records in samples.items():
        write_records(work.directory / DROPPED / f"{reason}.jsonl", records)
    write_metadata(
        work.directory,
        Metadata(
            source=redacted(work.source.name),
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
    publish(work.directory, directory)


def _read_statistics(work: Work) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The statistics of every shard, and the samples of the whole corpus."""
    statistics: list[dict[str, Any]] = []

    def samples() -> Iterator[dict[str, Any]]:
        for shard in range(len(work.plan.shards)):
            statistics.append(statistics_of(work, shard))
            yield statistics[-1].pop("samples")

    return statistics, joined_samples(samples())


def _content(plan: Plan, statistics: Sequence[Mapping[str, Any]]) -> str:
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

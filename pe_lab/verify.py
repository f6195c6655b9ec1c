"""`python -m pe_lab.verify PATH...`: compares checkpoints, prepared data, exports and logs with their digests."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pe_lab import storage
from pe_lab.checkpoints.locating import (
    DIRECTORY,
    FORMER,
    UNREADABLE,
    absent_arrays,
    is_checkpoint,
    is_step,
    quick_damage,
    read_manifest,
    read_metadata,
    steps_in,
    stored_metadata,
    tokenizer_directory,
)
from pe_lab.data.shards import METADATA_FILE, Metadata, manifest_of_prepared
from pe_lab.data.shards import read_metadata as read_prepared
from pe_lab.data.tokenizers import load_saved_tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError, StoreError, UserError
from pe_lab.storage import AnyPath, children, exists, is_file, is_remote, log_exists, read_json, read_records
from pe_lab.storage.manifest import MANIFEST, Manifest, seal_broken
from pe_lab.storage.run_files import LEDGER_FILE, LOGS, PHASE_FILE, RUN_FILE, log_damage, whole_records
from pe_lab.terminal import argument_parser, byte_progress, works_on

DESCRIPTION = """\
Reads every file of the checkpoints, prepared data and exports under the paths, and compares its size and digest with
those that were written with it. Also whether the arrays of a checkpoint are found in its files; and of runs, run.json,
phase.json, and metrics.jsonl up to the last checkpoint. speed.jsonl, spikes.jsonl and ledger.jsonl have no digests, and
are read as JSON lines. Evaluations, analyses and the files of trackers are not looked at.
Exit status 0: all are whole; 1: something is damaged, or has no digests. Runs that train meanwhile can be verified: a
checkpoint that is being written, or that they delete, is not counted."""

WHOLE, DAMAGED, UNKNOWN, UNCOMMITTED = "whole", "DAMAGED", "no digests", "uncommitted"


class VerifyTarget(NamedTuple):
    """A directory to verify.

    Attributes:
      kind: checkpoint, prepared data, export, run or phase; the last two are their own files and logs.
      manifest: None for one without digests.
      found: the state and why, where they are known from opening it.
    """

    path: AnyPath
    kind: str
    manifest: Manifest | None
    found: tuple[str, str] | None = None


class Finding(NamedTuple):
    """What was found about a target: WHOLE, DAMAGED, UNKNOWN or UNCOMMITTED, and why."""

    target: VerifyTarget
    state: str
    why: str


def targets(path: AnyPath) -> Iterator[VerifyTarget]:
    """Everything under a path that has digests, or should have them."""
    if is_step(path) and (path.parent.name == DIRECTORY or is_checkpoint(path)):
        yield _checkpoint(path)
    elif is_file(path / METADATA_FILE):
        yield _prepared(path)
    elif is_file(path / MANIFEST):
        yield _opened(path, "export", lambda: Manifest.read(path))
    elif is_file(path / "config.json") and any(child.suffix == ".safetensors" for child in children(path)):
        yield VerifyTarget(path, "export", None, (UNKNOWN, "written by another program"))
    else:
        if is_file(path / RUN_FILE) or log_exists(path / LEDGER_FILE):
            yield _run(path)
        if is_file(path / PHASE_FILE) or log_exists(path / "metrics.jsonl"):
            yield _phase(path)
        for child in sorted(children(path)):
            under_way = path.name == DIRECTORY and not is_step(child)  # a save, or a deletion
            if not (is_file(child) or child.name.startswith(".") or child.name in (UNREADABLE, FORMER) or under_way):
                yield from targets(child)


def _opened(path: AnyPath, kind: str, read: Callable[[], Manifest]) -> VerifyTarget:
    """The target of a directory whose manifest `read` reads."""
    try:
        return VerifyTarget(path, kind, read())
    except StoreError:
        raise  # it tells nothing of the files
    except UserError as error:
        return VerifyTarget(path, kind, None, (DAMAGED, str(error)))


def _checkpoint(path: AnyPath) -> VerifyTarget:
    def read() -> Manifest:
        manifest = read_manifest(path)
        saved, expected = tokenizer_directory(path), read_metadata(path).get("tokenizer")
        if saved and expected and (found := load_saved_tokenizer(saved).fingerprint) != expected:
            raise ConfigError(f"its tokenizer '{saved}' is {found}; it was trained with {expected}")
        return manifest

    return _opened(path, "checkpoint", read)


def _run(path: AnyPath) -> VerifyTarget:
    """run.json and the ledger of a run."""
    damage = _sealed_damage(path / RUN_FILE)
    if not damage and log_exists(path / LEDGER_FILE):
        try:
            records = list(read_records(path / LEDGER_FILE, partial=True))
            if len(whole_records(records)) < len(records):
                damage = f"{path / LEDGER_FILE} has records without their numbers"
        except DataError as error:
            damage = str(error)
    lines = f"; as JSON lines: {LEDGER_FILE}" if log_exists(path / LEDGER_FILE) else ""
    return VerifyTarget(path, "run", None, (DAMAGED, damage) if damage else (WHOLE, f"{RUN_FILE}{lines}"))


def _phase(path: AnyPath) -> VerifyTarget:
    """phase.json and the logs of a phase."""
    kept = path / DIRECTORY
    step = next((step for step in reversed(steps_in(kept)) if not quick_damage(kept / str(step))), 0)
    expected = None
    if step:
        with contextlib.suppress(CheckpointError):  # which is reported by itself
            expected = stored_metadata(kept / str(step)).get("log")
    others = [name for name in LOGS if name != "metrics" and log_exists(path / f"{name}.jsonl")]
    found = [_sealed_damage(path / PHASE_FILE), log_damage(path, "metrics", step, expected)]
    found += [log_damage(path, name) for name in others]
    lines = [f"{name}.jsonl" for name in others]
    read = f"{PHASE_FILE}, metrics.jsonl up to step {step}" if expected else PHASE_FILE
    lines += [] if expected else ["metrics.jsonl"]
    damage = next(filter(None, found), "")
    whole = (WHOLE, f"{read}; as JSON lines: {', '.join(lines)}")
    return VerifyTarget(path, "phase", None, (DAMAGED, damage) if damage else whole)


def _sealed_damage(path: AnyPath) -> str:
    """What is wrong with a JSON file that `sealed` made; "" if nothing is."""
    try:
        content = read_json(path)
    except DataError as error:
        return str(error)
    return f"'{path}' does not have the content that was written" if seal_broken(content) else ""


def _prepared(path: AnyPath) -> VerifyTarget:
    def read() -> Manifest:
        metadata: Metadata = read_prepared(path)
        if (found := load_saved_tokenizer(path / "tokenizer").fingerprint) != metadata.tokenizer_fingerprint:
            raise ConfigError(f"its tokenizer is {found}; it was prepared with {metadata.tokenizer_fingerprint}")
        return manifest_of_prepared(metadata)

    return _opened(path, "prepared data", read)


def verify(target: VerifyTarget, done: Callable[[int], None] = lambda size: None) -> Finding:
    """Reads all files of a target; `done` is called with the number of bytes of each block."""
    finding = _compared(target, done)
    if finding.state == DAMAGED and target.kind == "checkpoint":
        if not exists(target.path):
            return Finding(target, UNCOMMITTED, "deleted meanwhile")
        if is_remote(target.path) and not is_file(target.path / MANIFEST):
            return Finding(target, UNCOMMITTED, "no manifest: a save under way, a killed one, or a deletion")
    return finding


def _compared(target: VerifyTarget, done: Callable[[int], None]) -> Finding:
    if target.manifest is None:
        return Finding(target, *target.found)
    if damage := target.manifest.damage(target.path, done=done):
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        return Finding(target, DAMAGED, f"{damage[0]}{more}")
    if target.kind == "checkpoint":
        try:
            if absent := absent_arrays(target.path, target.manifest):
                return Finding(target, DAMAGED, f"{absent[0]} is not found in its files, though they are unchanged")
        except CheckpointError as error:
            return Finding(target, DAMAGED, str(error))
    return Finding(target, WHOLE, f"{target.manifest.size / 1e9:.3g} GB in {len(target.manifest.files)} files")


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    parser = argument_parser("verify", DESCRIPTION)
    parser.add_argument("paths", nargs="+", help="runs, phases, checkpoints, prepared data, exports")
    return parser


@works_on
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    found: list[VerifyTarget] = []
    for path in (storage.path("PATH", text) for text in args.paths):
        if not exists(path):
            raise ConfigError(f"There is no directory '{path}'.")
        under = list(targets(path))
        if not under:
            raise ConfigError(
                f"'{path}' has no checkpoint, prepared data or export. Give the directory of a run, of one of its "
                "checkpoints, of pe_lab.prepare, or of pe_lab.convert."
            )
        found += under
    size = sum(target.manifest.size for target in found if target.manifest)
    with byte_progress("verifying", size) as done:
        findings = [verify(target, done) for target in found]
    for finding in findings:
        print(f"{finding.state:11}  {finding.target.kind} {finding.target.path}: {finding.why}")
    counts = {state: sum(v.state == state for v in findings) for state in (WHOLE, DAMAGED, UNKNOWN, UNCOMMITTED)}
    print(", ".join(f"{count} {state.lower()}" for state, count in counts.items() if count))
    return 0 if counts[WHOLE] and counts[WHOLE] + counts[UNCOMMITTED] == len(findings) else 1


if __name__ == "__main__":
    sys.exit(main())

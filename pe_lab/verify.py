"""`python -m pe_lab.verify PATH...`: compares checkpoints, prepared data and exports with their digests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pe_lab import storage
from pe_lab.checkpoints.locating import (
    DIRECTORY,
    FORMER,
    UNREADABLE,
    is_checkpoint,
    is_step,
    read_manifest,
    read_metadata,
)
from pe_lab.checkpoints.locating import tokenizer_directory as tokenizer_of
from pe_lab.data.shards import METADATA_FILE, Metadata, manifest_of_prepared
from pe_lab.data.shards import read_metadata as read_prepared
from pe_lab.data.tokenizers import load_saved_tokenizer
from pe_lab.errors import ConfigError, StoreError, UserError
from pe_lab.storage import AnyPath, children, exists, is_file, is_remote
from pe_lab.storage.manifest import MANIFEST, Manifest
from pe_lab.terminal import Progress, argument_parser, command, console

DESCRIPTION = """\
Reads every file of the checkpoints, prepared data and exports under the paths, and compares its size and digest with
those that were written with it. Exit status 0: all are whole; 1: something is damaged, or has no digests. Runs that
train meanwhile can be verified: a checkpoint that is being written, or that they delete, is not counted."""

WHOLE, DAMAGED, UNKNOWN, UNCOMMITTED = "whole", "DAMAGED", "no digests", "uncommitted"


class Target(NamedTuple):
    """A directory to verify. `manifest` is None for one without digests; `damage` was found while it was opened."""

    path: AnyPath
    kind: str  # checkpoint, prepared data or export
    manifest: Manifest | None
    damage: str = ""


class Verdict(NamedTuple):
    """What was found about a target: WHOLE, DAMAGED, UNKNOWN or UNCOMMITTED, and why."""

    target: Target
    state: str
    why: str


def targets(path: AnyPath) -> Iterator[Target]:
    """Everything under a path that has digests, or should have them."""
    if is_step(path) and (path.parent.name == DIRECTORY or is_checkpoint(path)):
        yield _checkpoint(path)
    elif is_file(path / METADATA_FILE):
        yield _prepared(path)
    elif is_file(path / MANIFEST):
        yield _opened(path, "export", lambda: Manifest.read(path))
    elif is_file(path / "config.json") and any(child.suffix == ".safetensors" for child in children(path)):
        yield Target(path, "export", None)
    else:
        for child in sorted(children(path)):
            under_way = path.name == DIRECTORY and not is_step(child)  # a save, or a deletion
            if not (is_file(child) or child.name.startswith(".") or child.name in (UNREADABLE, FORMER) or under_way):
                yield from targets(child)


def _opened(path: AnyPath, kind: str, read: Callable[[], Manifest | None]) -> Target:
    """The target of a directory whose manifest `read` reads."""
    try:
        return Target(path, kind, read())
    except StoreError:
        raise  # it tells nothing of the files
    except UserError as error:
        return Target(path, kind, None, str(error))


def _checkpoint(path: AnyPath) -> Target:
    def read() -> Manifest | None:
        manifest = read_manifest(path)
        saved, expected = tokenizer_of(path), read_metadata(path).get("tokenizer")
        if saved and expected and (found := load_saved_tokenizer(saved).fingerprint) != expected:
            raise ConfigError(f"its tokenizer '{saved}' is {found}; it was trained with {expected}")
        return manifest

    return _opened(path, "checkpoint", read)


def _prepared(path: AnyPath) -> Target:
    def read() -> Manifest | None:
        metadata: Metadata = read_prepared(path)
        if (found := load_saved_tokenizer(path / "tokenizer").fingerprint) != metadata.tokenizer_fingerprint:
            raise ConfigError(f"its tokenizer is {found}; it was prepared with {metadata.tokenizer_fingerprint}")
        return manifest_of_prepared(metadata)

    return _opened(path, "prepared data", read)


def verify(target: Target, done: Callable[[int], None] = lambda size: None) -> Verdict:
    """Reads all files of a target; `done` is called with the number of bytes of each block."""
    verdict = _compared(target, done)
    if verdict.state == DAMAGED and target.kind == "checkpoint":
        if not exists(target.path):
            return Verdict(target, UNCOMMITTED, "deleted meanwhile")
        if is_remote(target.path) and not is_file(target.path / MANIFEST):
            return Verdict(target, UNCOMMITTED, "no manifest: a save under way, a killed one, or a deletion")
    return verdict


def _compared(target: Target, done: Callable[[int], None]) -> Verdict:
    if target.damage:
        return Verdict(target, DAMAGED, target.damage)
    if target.manifest is None:
        return Verdict(target, UNKNOWN, "written by an earlier version, or by another program")
    if damage := target.manifest.damage(target.path, done=done):
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        return Verdict(target, DAMAGED, f"{damage[0]}{more}")
    return Verdict(target, WHOLE, f"{target.manifest.size / 1e9:.3g} GB in {len(target.manifest.files)} files")


@command
def main(argv: Sequence[str]) -> int:
    parser = argument_parser("verify", DESCRIPTION)
    parser.add_argument("paths", nargs="+", help="runs, phases, checkpoints, prepared data, exports")
    args = parser.parse_args(argv)
    found: list[Target] = []
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
    read = 0
    verdicts = []
    with Progress(console(stderr=True), "verifying", size) as progress:

        def done(more: int) -> None:
            nonlocal read
            read += more
            progress.update(read, f"{read / 1e9:.1f} of {size / 1e9:.1f} GB")

        for target in found:
            verdicts.append(verify(target, done))
    for verdict in verdicts:
        print(f"{verdict.state:11}  {verdict.target.kind} {verdict.target.path}: {verdict.why}")
    counts = {state: sum(v.state == state for v in verdicts) for state in (WHOLE, DAMAGED, UNKNOWN, UNCOMMITTED)}
    print(", ".join(f"{count} {state.lower()}" for state, count in counts.items() if count))
    return 0 if counts[WHOLE] and counts[WHOLE] + counts[UNCOMMITTED] == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What commands have written, without what a clock or a random name has changed; and what a case has come to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pe_lab.errors import UserError
from pe_lab.storage.manifest import MANIFEST, Manifest

CHECKPOINTS = "checkpoints"
# Keys of JSON objects that differ between two undisturbed runs: times, random names, and digests over these.
VOLATILE_KEYS = {"id", "time", "created", "crc32c", "seconds"}
# Files that tell of the session, not of the result; manifests are compared with the files that they describe.
VOLATILE_FILES = {"speed.jsonl", "ledger.jsonl", "run.json", "lease.json", MANIFEST}
VOLATILE_DIRECTORIES = {"tensorboard", "unreadable"}
UNFINISHED = re.compile(r"\.(saving|deleting|partial-|.*\.preparing|.*\.lease)")

# `detected`: not trained on, and what reads the file says that it is damaged.
GREEN = ("same bytes", "mended", "harmless", "refused", "detected")


class Row(NamedTuple):
    """One line of the table.

    Attributes:
      case: `kill-17`; the same number does the same again.
      what: the command and what was done to it.
      where: the moment, or the file.
      happened: what the commands did.
      verdict: one of `GREEN`, or what is wrong.
    """

    case: str
    what: str
    where: str
    happened: str
    verdict: str

    @property
    def green(self) -> bool:
        return self.verdict in GREEN


def steps(directory: Path) -> list[int]:
    """The steps of the committed checkpoints in a `checkpoints` directory, ascending."""
    return sorted(int(p.parent.name) for p in directory.glob(f"*/{MANIFEST}") if p.parent.name.isdigit())


def arrays(item: Path) -> dict[str, bytes]:
    """The arrays of `params` or `optimizer` of a checkpoint, as tensorstore reads them on its own: {name: bytes}."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{item.absolute()}/"}).result()
    return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


def plain(value: Any) -> Any:
    """A JSON value without `VOLATILE_KEYS`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if key not in VOLATILE_KEYS}
    return [plain(item) for item in value] if isinstance(value, list) else value


def parsed(text: bytes) -> Any:
    """`plain` JSON, or the text itself where it is damaged."""
    try:
        return plain(json.loads(text))
    except ValueError:
        return text


def damaged(checkpoint: Path) -> str:
    """What a checkpoint's manifest says against its files; "" if it is whole."""
    try:
        return "; ".join(map(str, Manifest.read(checkpoint).damage(checkpoint)))
    except UserError as error:
        return str(error)


def content(directory: Path) -> dict[str, Any]:
    """{name: value} of all that the commands have written under a directory, for `differences`.

    Of a phase: the last checkpoint, and earlier ones that are whole. Leftovers of unfinished writes are listed too.
    """
    return dict(_content(directory, ""))


def _content(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    if UNFINISHED.search(path.name):
        yield f"left over: {name}", True
    elif path.is_dir() and path.name == CHECKPOINTS:
        found = steps(path)
        for step in found:
            if wrong := damaged(path / str(step)):
                if step == found[-1]:
                    yield f"{name}/{step}", wrong
                continue
            for item in ("params", "optimizer"):
                if (path / str(step) / item).is_dir():
                    yield from ((f"{name}/{step}/{item} {k}", v) for k, v in arrays(path / str(step) / item).items())
            yield f"{name}/{step}/metadata", parsed((path / str(step) / "metadata/metadata").read_bytes())
        yield from ((f"left over: {name}/{p.name}", True) for p in path.iterdir() if UNFINISHED.search(p.name))
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if child.name not in VOLATILE_DIRECTORIES and ".damaged-" not in child.name:
                yield from _content(child, f"{name}/{child.name}".lstrip("/"))
    elif path.name == "phase.json":
        record = parsed(path.read_bytes())
        known = ("phase", "status", "steps", "describe", "mixture")
        yield name, {key: record.get(key) for key in known} if isinstance(record, dict) else record
    elif path.suffix == ".json" and path.name not in VOLATILE_FILES:
        yield name, parsed(path.read_bytes())
    elif path.suffix == ".jsonl" and path.name not in VOLATILE_FILES:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            yield f"{name}, line {number}", parsed(line)
    elif path.name not in VOLATILE_FILES and not path.name.startswith(".") and ".damaged-" not in path.name:
        yield name, path.read_bytes()


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The names whose values differ, are missing or are too many.

    Earlier checkpoints may be missing, if they are damaged, and may be too many: a process that is killed between the
    commit of its last checkpoint and the deletion of an old one leaves that, whole.
    """
    newest: dict[str, int] = {}
    for name in expected:
        if match := CHECKPOINT.match(name):
            newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))

    def earlier(name: str) -> bool:
        match = CHECKPOINT.match(name)
        return bool(match) and int(match[2]) < newest.get(match[1], 0)

    wrong = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    wrong += [f"{name} is missing" for name in expected.keys() - found.keys() if not earlier(name)]
    wrong += [f"{name} is too much" for name in found.keys() - expected.keys() if not earlier(name)]
    return sorted(wrong)


CHECKPOINT = re.compile(rf"(.*\b{CHECKPOINTS})/(\d+)(?:/|$)")

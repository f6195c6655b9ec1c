"""What `--from` means: which checkpoints, and where the rows of what is measured on them go."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pe_lab.checkpoints import find_checkpoints, is_external, resolve
from pe_lab.errors import UserError

MARK = "source.json"  # in the directory of somebody else's checkpoint: what was read


@dataclass(frozen=True)
class Place:
    """One path of `--from`.

    Attributes:
      root: the directory whose `evaluation` the rows go to.
      paths: the checkpoints that are meant, as `pe_lab.load` takes them.
      run: what rows call it: the name in its run.json, else the directory's.
      shown: the same, but different for different roots.
      foreign: what `root` is of, where the checkpoint is somebody else's.
    """

    root: Path
    paths: tuple[str, ...]
    run: str
    shown: str
    foreign: str | None = None

    def mark(self) -> None:
        """Says in the directory whose it is: another checkpoint of the same name gets another one."""
        if self.foreign is None or (self.root / MARK).exists():
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / MARK).write_text(json.dumps({"source": self.foreign}) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.root} cannot be written ({error.strerror}). Give a directory with --out.") from None


def locate(given: str | Path) -> Place:
    """The checkpoints that a path means.

    A run directory means the last checkpoint of each phase; a phase, a directory made by surgery, or a single
    checkpoint mean that one. Somebody else's checkpoint is itself; its results go to `runs/NAME`.

    Raises:
      UserError: nothing is there, or no checkpoint yet.
    """
    if is_external(given):
        return _foreign(str(given))
    directory = Path(given)
    if not directory.is_dir():
        raise UserError(
            f"--from '{given}' is not a directory. Give a run, a phase of it, a checkpoint, hf:DIR or gguf:FILE."
        )
    directory = directory.resolve()
    if (directory / "run.json").is_file():
        found = find_checkpoints(directory)
        if not found:
            raise UserError(f"--from '{given}' has no checkpoint yet. Train it first (python -m pe_lab.train).")
        return _ours(directory, tuple(str(path) for path in found))
    phase, step = resolve(directory)
    phase = phase.resolve()
    above = [phase, *list(phase.parents)[:2]]  # checkpoints, phase, run
    root = next((path for path in above if (path / "run.json").is_file()), phase.parent)
    return _ours(root, (str(phase / str(step)),))


def locate_all(given: str) -> list[Place]:
    """The places of a comma-separated `--from`; those of one name are told apart by their directories.

    Raises:
      UserError: see `locate`; or nothing is given.
    """
    sources = [part.strip() for part in given.split(",") if part.strip()]
    if not sources:
        raise UserError(f"--from='{given}' names nothing. Give runs, checkpoints, hf:DIR or gguf:FILE.")
    return distinguished([locate(source) for source in sources])


def distinguished(places: Sequence[Place]) -> list[Place]:
    """The same, `shown` by so much of the directory as tells roots of one name apart."""
    roots: dict[str, set[Path]] = {}
    for place in places:
        roots.setdefault(place.run, set()).add(place.root.resolve())
    found = []
    for place in places:
        alike, parts = sorted(roots[place.run]), 1
        while len(alike) > 1 and len({root.parts[-parts:] for root in alike}) < len(alike):
            parts += 1
        name = place.run if len(alike) == 1 else "-".join(place.root.resolve().parts[-parts:])
        found.append(replace(place, shown=name))
    return found


def _ours(root: Path, paths: tuple[str, ...]) -> Place:
    try:
        name = str(json.loads((root / "run.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        name = root.name
    return Place(root, paths, name, name)


def _foreign(given: str) -> Place:
    """Somebody else's checkpoint: `runs/NAME`, or with more of its path where that name is taken by another."""
    text = given.partition(":")[2] if given.startswith(("hf:", "gguf:")) else given
    here = Path(text).expanduser()
    source = str(here.resolve()) if here.exists() else text
    for name in _names(Path(source)):
        root = Path("runs") / name
        if _read_mark(root) in (None, source) and not (root / "run.json").exists():
            return Place(root, (given,), name, name, source)
    raise UserError(f"--from '{given}': every directory of its name in runs is another model's. Give --out=DIR.")


def _names(path: Path) -> Iterator[str]:
    """The last part of a path without the suffix of a file, the last two, three ..."""
    parts = [*path.parts[:-1], path.name.removesuffix(".gguf")]
    parts = [part for part in parts if part not in ("/", "")]
    for count in range(1, len(parts) + 1):
        yield "-".join(parts[-count:])


def _read_mark(root: Path) -> str | None:
    try:
        return str(json.loads((root / MARK).read_text(encoding="utf-8"))["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

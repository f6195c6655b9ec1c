"""What a study finds, and the files that it writes: `study.json`, `study.npz`, and parts that a resumed study reads."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pe_lab.analysis.figures import Figure, from_arrays, to_arrays
from pe_lab.errors import DataError, StoreError
from pe_lab.parallel import is_first, on_first
from pe_lab.results.records import digest
from pe_lab.storage import AnyPath, read_bytes, read_json, write_file, write_files

FORMAT = 1  # of study.json; counted up when its keys change
Arrays = Mapping[str, np.ndarray]
Identity = Mapping[str, Any]  # of a part: what its numbers depend on


@dataclass(frozen=True)
class TextTable:
    """A short table for the terminal and the report: the first `words` columns are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclass(frozen=True)
class Findings:
    """What a study found.

    Attributes:
      sentences: the results in a few plain sentences, with numbers and intervals.
      tables: short tables.
      figures: what is drawn.
      numbers: every array by name. `shapes` names their axes, such as `[V, L, H, R] variant, layer, query head, pair`.
      metadata: further results as JSON.
      files: other files to write, by name.
      failed: a check failed: the command ends with status 1.
    """

    sentences: tuple[str, ...]
    tables: tuple[TextTable, ...]
    figures: tuple[Figure, ...]
    numbers: Arrays = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True)
class Study:
    """A study of `pe_lab.analyze`.

    Attributes:
      name: as in `--study=name`.
      summary: one line for --help.
      source: the papers' sections and figures.
      options: adds the study's own flags.
      run: what it finds; it gets a `session.Session` if `models`, else the parsed command line. None: nothing was
        measured (--dry-run), and nothing is written.
      models: whether it measures models, named by `--from`.
    """

    name: str
    summary: str
    source: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Any], Findings | None]
    models: bool = True


class Parts:
    """Measured parts of a study on disk, one file each, so that a study that was ended goes on where it was.

    A part is named by a digest of its identity: the weights, the layers' encodings, the sequence, the settings. Equal
    identities have equal results. A file is written whole or not at all; a damaged one is measured again.

    Args:
      directory: of the files.
      again: whether parts that exist are measured again.
    """

    def __init__(self, directory: AnyPath, again: bool = False):
        self.directory, self._again = directory, again
        self._fresh: set[str] = set()

    def path(self, identity: Identity) -> AnyPath:
        """The file of a part."""
        return self.directory / f"{digest(identity)}.npz"

    def find(self, identity: Identity) -> dict[str, np.ndarray] | None:
        """The arrays of a part that was measured; None if it was not, or is to be measured again."""
        path = self.path(identity)
        if self._again and path.name not in self._fresh:
            return None
        try:
            with np.load(io.BytesIO(read_bytes(path))) as stored:
                return dict(stored)
        except StoreError:
            raise
        except (OSError, ValueError, EOFError, KeyError):
            return None
        except Exception as error:  # zipfile's and zlib's own errors share no class
            if type(error).__module__ in ("zipfile", "zlib"):
                return None
            raise

    def find_all(self, identities: Sequence[Identity]) -> dict[str, dict[str, np.ndarray]]:
        """The parts that were measured, by the digest of their identity."""

        def found() -> dict[str, dict[str, np.ndarray]]:
            parts = {digest(identity): self.find(identity) for identity in identities}
            return {name: part for name, part in parts.items() if part is not None}

        return on_first(found)

    def put(self, identity: Identity, arrays: Arrays) -> None:
        """Writes a part. Of several processes the first one does."""
        if not is_first():
            return
        path = self.path(identity)
        write_file(path, packed(arrays), "Give another directory with --out.")
        self._fresh.add(path.name)


def packed(arrays: Arrays) -> bytes:
    """Arrays as the bytes of a compressed .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: np.asarray(value) for name, value in arrays.items()})
    return buffer.getvalue()


def write_study(out: AnyPath, name: str, findings: Findings, about: Mapping[str, Any]) -> list[AnyPath]:
    """Writes `study.json` and `study.npz`, and the findings' other files; returns their paths.

    Args:
      about: how the numbers were made: command, checkpoints with lineage, sequences, seconds, versions.
    """
    arrays = {f"numbers/{key}": value for key, value in findings.numbers.items()}
    figures = []
    for figure in findings.figures:
        plain, drawn = to_arrays(figure)
        figures.append(plain)
        arrays |= {f"figures/{figure.name}/{key}": value for key, value in drawn.items()}
    written = {
        "format": FORMAT,
        "study": name,
        "about": about,
        "sentences": findings.sentences,
        "tables": [dataclasses.asdict(table) for table in findings.tables],
        "figures": figures,
        "shapes": findings.shapes,
        "metadata": findings.metadata,
    }
    text = json.dumps(_plain(written), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files = {"study.json": text, "study.npz": packed(arrays), **findings.files}
    return write_files({out / file: data for file, data in files.items()}, "Give another --out.")


def _plain(value: Any) -> Any:
    """The value with null for the numbers that JSON cannot hold."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Written:
    """A study as its files hold it."""

    name: str
    about: Mapping[str, Any]
    findings: Findings


def read_study(directory: AnyPath) -> Written:
    """The study that `write_study` wrote into a directory.

    Raises:
      DataError: a file is missing, damaged, or of another version.
    """
    path, advice = directory / "study.json", "Run the study again (python -m pe_lab.analyze)."
    value = read_json(path, advice)
    if value.get("format") != FORMAT:
        raise DataError(f"{path} has format {value.get('format')}, and this pe_lab reads {FORMAT}. {advice}")
    try:
        with np.load(io.BytesIO(read_bytes(directory / "study.npz"))) as stored:
            arrays = dict(stored)
        figures = tuple(_figure(plain, arrays) for plain in value["figures"])
        tables = tuple(_table(table) for table in value["tables"])
        numbers = {k.removeprefix("numbers/"): v for k, v in arrays.items() if k.startswith("numbers/")}
        findings = Findings(tuple(value["sentences"]), tables, figures, numbers, value["shapes"], value["metadata"])
        return Written(str(value["study"]), value["about"], findings)
    except Exception as error:
        raise DataError(f"{directory} holds no whole study ({type(error).__name__}: {error}). {advice}") from None


def _figure(plain: Mapping[str, Any], arrays: Arrays) -> Figure:
    prefix = f"figures/{plain['name']}/"
    return from_arrays(plain, {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})


def _table(table: Mapping[str, Any]) -> TextTable:
    rows: Sequence[Sequence[str]] = table["rows"]
    return TextTable(table["title"], tuple(table["header"]), tuple(map(tuple, rows)), table["words"])

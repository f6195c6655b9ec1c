"""What an analysis found: sentences, tables, and figures as data; and the files that hold it."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pe_lab.errors import DataError
from pe_lab.results.figures import Figure, from_arrays, to_arrays
from pe_lab.results.records import finite
from pe_lab.results.table import TextTable
from pe_lab.storage import AnyPath, read_bytes, read_json, write_files

FORMAT = 1  # of analysis.json; counted up when its keys change
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Findings:
    """What an analysis found.

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


def packed(arrays: Arrays) -> bytes:
    """Arrays as the bytes of a compressed .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: np.asarray(value) for name, value in arrays.items()})
    return buffer.getvalue()


def write_findings(out: AnyPath, name: str, findings: Findings, about: Mapping[str, Any]) -> list[AnyPath]:
    """Writes `analysis.json` and `analysis.npz`, and the findings' other files; returns their paths.

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
        "analysis": name,
        "about": about,
        "sentences": findings.sentences,
        "tables": [dataclasses.asdict(table) for table in findings.tables],
        "figures": figures,
        "shapes": findings.shapes,
        "metadata": findings.metadata,
    }
    text = json.dumps(finite(written, None), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    files = {"analysis.json": text, "analysis.npz": packed(arrays), **findings.files}
    return write_files({out / file: data for file, data in files.items()}, "Give another --out.")


@dataclass(frozen=True)
class Written:
    """An analysis as its files hold it."""

    name: str
    about: Mapping[str, Any]
    findings: Findings


def read_findings(directory: AnyPath) -> Written:
    """The analysis that `write_findings` wrote into a directory.

    Raises:
      DataError: a file is missing, damaged, or of another version.
    """
    path, advice = directory / "analysis.json", "Run the analysis again (python -m pe_lab.analyze)."
    value = read_json(path, advice)
    if value.get("format") != FORMAT:
        raise DataError(f"{path} has format {value.get('format')}, and this pe_lab reads {FORMAT}. {advice}")
    try:
        with np.load(io.BytesIO(read_bytes(directory / "analysis.npz"))) as stored:
            arrays = dict(stored)
        figures = tuple(_figure(plain, arrays) for plain in value["figures"])
        tables = tuple(_table(table) for table in value["tables"])
        numbers = {k.removeprefix("numbers/"): v for k, v in arrays.items() if k.startswith("numbers/")}
        findings = Findings(tuple(value["sentences"]), tables, figures, numbers, value["shapes"], value["metadata"])
        return Written(str(value["analysis"]), value["about"], findings)
    except Exception as error:
        raise DataError(f"{directory} holds no whole analysis ({type(error).__name__}: {error}). {advice}") from None


def _figure(plain: Mapping[str, Any], arrays: Arrays) -> Figure:
    prefix = f"figures/{plain['name']}/"
    return from_arrays(plain, {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})


def _table(table: Mapping[str, Any]) -> TextTable:
    rows: Sequence[Sequence[str]] = table["rows"]
    return TextTable(table["title"], tuple(table["header"]), tuple(map(tuple, rows)), table["words"])

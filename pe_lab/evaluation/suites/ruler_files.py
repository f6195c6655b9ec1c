"""RULER's files: predictions of any model scored by RULER's rules, and answers and prompts written for its scripts.

The formats and rules are those of scripts/data/synthetic, scripts/pred/call_api.py and scripts/eval/evaluate.py of
NVIDIA/RULER.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.errors import DataError, did_you_mean
from pe_lab.evaluation.generation.tasks import Sample
from pe_lab.evaluation.scoring.metrics import CONTROL, string_match_all, string_match_part
from pe_lab.results.records import Record, SampleRecord
from pe_lab.results.statistics import mean_of
from pe_lab.storage import read_records, write_records
from pe_lab.terminal import console

_CHUNK = re.compile(r"(.*[^_]+)-(\d+)")
# A task's name up to its first underscore -> the beginning of the answer prefix in a prompt, and RULER's new tokens.
_ANSWERS = {
    "niah": (" The special magic", 128),
    "vt": (" Answer: According to", 30),
    "cwe": (" Answer: The top 10", 120),
    "fwe": (" Answer: According to", 50),
    "qa": (" Answer:", 32),
}
PREDICTION_ADVICE = "A line is an object with `pred`, the model's answer, and `outputs`, the list of right answers."


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """The records of a prediction file; each has at least `pred`, a string, and `outputs`, a list of strings.

    Raises:
      DataError: the file cannot be read, or a line is no such object.
    """
    records = read_records(path, "prediction of RULER", PREDICTION_ADVICE, check=_wrong)
    return [record if "outputs" in record else record | {"outputs": [record["output"]]} for record in records]


def _wrong(record: dict[str, Any]) -> str:
    """Describes a defect of a prediction; "" if there is none. Instead of `outputs` it may have one `output`."""
    if not isinstance(record.get("pred"), str):
        return "`pred` is no text" if "pred" in record else "no `pred`"
    outputs = record.get("outputs", [record["output"]] if "output" in record else None)
    if not isinstance(outputs, list) or not outputs or not all(isinstance(output, str) for output in outputs):
        return "no `outputs`" if outputs is None else "`outputs` is no list of texts"
    return ""


def score_predictions(directory: Path, tasks: Sequence[str]) -> list[Record]:
    """The scores of all prediction files in a directory, one result record a task.

    Args:
      directory: has `<task>.jsonl` or `<task>-<chunk>.jsonl`, or directories of them such as 4096/pred. Other files
        are ignored, as RULER does.

    Returns:
      Records whose `length` is the nearest directory with a number for its name (else None), whose `label` has the
      directories above that one, and whose `score` has the four decimals of RULER's per cents; `nulls` counts blank
      predictions.

    Raises:
      DataError: there is no such file, a task has both a whole file and chunks, or a file is damaged.
    """
    if not directory.is_dir():
        raise DataError(f"{directory} is no directory of RULER's predictions.")
    found: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(directory.rglob("*.jsonl")):
        chunk = _CHUNK.fullmatch(path.stem)
        task = chunk.group(1) if chunk else path.stem
        if task in tasks:
            found.setdefault((path.parent, task), []).append(path)
    if not found:
        others = sorted({path.stem for path in directory.rglob("*.jsonl")})
        hint = f"{others[0]}.jsonl is none. {did_you_mean(others[0], tasks)}" if others else "It has no .jsonl files."
        raise DataError(f"{directory} has no predictions of a task of RULER, such as pred/vt.jsonl. {hint}")
    scored = []
    for (folder, task), paths in found.items():
        if len(paths) > 1 and folder / f"{task}.jsonl" in paths:
            raise DataError(f"{folder} has {task}.jsonl and chunks of it. RULER would drop the first: move one away.")
        records = [record for path in paths for record in read_predictions(path)]
        if not records:
            raise DataError(f"{paths[0]} is empty.")
        metric = string_match_part if task.startswith("qa_") else string_match_all
        scores = [metric(record["pred"], record["outputs"]) for record in records]
        mean = mean_of(scores)
        assert mean is not None
        inside = folder.resolve().relative_to(directory.resolve()).parts
        above = itertools.takewhile(lambda part: not part.isdecimal() and part != "pred", inside)
        scored.append(
            {
                "suite": "ruler",
                "source": task,
                "run": directory.name,
                "label": "/".join(above) or "predictions",
                "metric": "string_match",
                "length": _length(folder),
                "score": round(sum(scores) / len(scores) * 100, 2) / 100,
                "low": mean.low,
                "high": mean.high,
                "samples": len(records),
                "nulls": sum(not CONTROL.sub("\n", record["pred"]).strip() for record in records),
            }
        )
    return sorted(scored, key=lambda record: (record["length"] or 0, tasks.index(record["source"])))


def _length(directory: Path) -> int | None:
    names = [directory.resolve().name, *(parent.name for parent in directory.resolve().parents)]
    return next((int(name) for name in names if name.isdecimal()), None)


def write_answers(
    directory: Path, run: str, groups: Iterable[tuple[Any, Sequence[Sample], list[SampleRecord]]]
) -> None:
    """Writes the answers to RULER's tasks as its prediction files, `RUN-CHECKPOINT-LABEL/LENGTH/pred/TASK.jsonl`, and
    the prompts beside them.

    Args:
      run: its name.
      groups: those of RULER's tasks, as `Prompted.answered` gives them.
    """
    for group, samples, answered in groups:
        name = f"{run}-{group.variant.subject.path}-{group.variant.label}"
        where = directory / re.sub(r"\W+", "-", name).strip("-") / str(group.length)
        write_predictions(where / "pred" / f"{group.task.name}.jsonl", group.task.name, answered)
        write_prompts(where / "data" / group.task.name / "validation.jsonl", group.task.name, samples)
    console().print(f"RULER's files: {directory}")


def write_predictions(path: Path, task: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes sample records as a prediction file for RULER's evaluate.py: `<task>.jsonl` in a directory of one length.

    Raises:
      DataError: the file cannot be written.
    """
    _, new_tokens = _ANSWERS[task.split("_")[0]]
    write_records(
        path,
        (
            {
                "index": record["index"],
                "pred": record["output"],
                "input": record.get("input", ""),
                "outputs": list(record["references"]),
                "others": {},
                "truncation": -1,
                "length": record["tokens"] + new_tokens,
            }
            for record in records
        ),
    )


def write_prompts(path: Path, task: str, samples: Iterable[Sample]) -> None:
    """Writes samples as `<task>/validation.jsonl`, the data that RULER's call_api.py reads.

    The beginning of the answer in a prompt is its `answer_prefix`; a length includes the answer's.

    Raises:
      DataError: the file cannot be written.
    """
    beginning, _ = _ANSWERS[task.split("_")[0]]

    def records() -> Iterable[dict[str, Any]]:
        for sample in samples:
            at = sample.text.rfind(beginning)
            length = len(sample.tokens) + sample.max_new_tokens
            yield {
                "index": sample.index,
                "input": sample.text[:at],
                "outputs": list(sample.references),
                "length": length,
                "length_w_model_temp": length,
                "answer_prefix": sample.text[at:],
            }

    write_records(path, records(), "Give another directory.")

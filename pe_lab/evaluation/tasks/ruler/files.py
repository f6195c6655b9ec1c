"""RULER's files: its predictions read and scored as RULER scores them, ours written for its scripts to read.

The formats and the rules are those of scripts/data/synthetic, scripts/pred/call_api.py and scripts/eval/evaluate.py of
NVIDIA/RULER.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation.scoring.metrics import string_match_all, string_match_part
from pe_lab.evaluation.tasks.ruler.suite import TASKS
from pe_lab.evaluation.tasks.task import Sample
from pe_lab.results.intervals import mean_of
from pe_lab.storage import write_records

_CHUNK = re.compile(r"(.*[^_]+)-(\d+)")
# task, or the part of its name before the first underscore -> where the answer's beginning begins in a prompt
_ANSWER = {
    "niah": " The special magic",
    "vt": " Answer: According to",
    "cwe": " Answer: The top 10",
    "fwe": " Answer: According to",
    "qa": " Answer:",
}
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_CONTROL = re.compile(r"[\x00-\x1f]")


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """The lines of a prediction file; each has at least `pred`, a string, and `outputs`, strings.

    Raises:
      UserError: the file cannot be read, or a line is no such object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    lines = []
    for number, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        try:
            line = json.loads(written)
        except ValueError:
            line = None
        if isinstance(line, dict) and "outputs" not in line and "output" in line:
            line["outputs"] = [line["output"]]
        wrong = _what_is_wrong(line)
        if wrong:
            raise UserError(
                f"{path}, line {number}, is no prediction of RULER: {wrong}. A line is a JSON object with `pred`, what "
                "the model wrote, and `outputs`, the list of right answers."
            )
        lines.append(line)
    return lines


def _what_is_wrong(line: Any) -> str:
    if not isinstance(line, dict):
        return "no JSON object"
    if not isinstance(line.get("pred"), str):
        return "`pred` is no text" if "pred" in line else "no `pred`"
    outputs = line.get("outputs")
    if not isinstance(outputs, list) or not outputs or not all(isinstance(output, str) for output in outputs):
        return "`outputs` is no list of texts" if "outputs" in line else "no `outputs`"
    return ""


def metric_of(task: str) -> Callable[[str, Sequence[str]], float]:
    """RULER's metric of a task: any of the answers for questions, the share of the answers for all others."""
    return string_match_part if task.startswith("qa_") else string_match_all


def score_predictions(directory: Path) -> list[dict[str, Any]]:
    """A row for every task of RULER with predictions: `task`, `length`, `directory`, `score`, `mean` (with its
    interval), `nulls`, `samples`.

    `directory` has the files `<task>.jsonl`, or `<task>-<chunk>.jsonl`, or directories of such, as in 4096/pred. The
    length is the nearest directory whose name is a number, None where there is none. The score is in per cent with two
    decimals; a null is a blank prediction. Files of other names are passed over, as RULER does.

    Raises:
      UserError: there is no such file, a task has a whole file and chunks, or a file is not in the format.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory of RULER's predictions.")
    found: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(directory.rglob("*.jsonl")):
        chunk = _CHUNK.fullmatch(path.stem)
        task = chunk.group(1) if chunk else path.stem
        if task in TASKS:
            found.setdefault((path.parent, task), []).append(path)
    if not found:
        there = sorted({path.stem for path in directory.rglob("*.jsonl")})
        named = f"{there[0]}.jsonl is none. {did_you_mean(there[0], TASKS)}" if there else "It has no .jsonl files."
        raise UserError(f"{directory} has no predictions of a task of RULER, such as pred/vt.jsonl. {named}")
    rows = []
    for (where, task), paths in found.items():
        if len(paths) > 1 and where / f"{task}.jsonl" in paths:
            raise UserError(f"{where} has {task}.jsonl and chunks of it. RULER would drop the first: move one away.")
        lines = [line for path in paths for line in read_predictions(path)]
        if not lines:
            raise UserError(f"{paths[0]} is empty.")
        scores = [metric_of(task)(line["pred"], line["outputs"]) for line in lines]
        rows.append(
            {
                "task": task,
                "length": _length(where),
                "directory": str(where),
                "score": round(sum(scores) / len(scores) * 100, 2),
                "mean": mean_of(scores),
                "nulls": sum(not _CONTROL.sub("\n", line["pred"]).strip() for line in lines),
                "samples": len(lines),
            }
        )
    return sorted(rows, key=lambda row: (row["length"] or 0, TASKS.index(row["task"])))


def _length(directory: Path) -> int | None:
    names = [directory.resolve().name, *(parent.name for parent in directory.resolve().parents)]
    return next((int(name) for name in names if name.isdecimal()), None)


def write_predictions(path: Path, task: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes samples that were answered, for RULER's evaluate.py.

    Args:
      path: `<task>.jsonl`, in a directory of one length's.
      task: which of RULER's.
      lines: with `index`, `references`, `output`, `tokens` of the prompt, and `input`, the prompt as text, where it is
        known; what else they have is not written.

    Raises:
      UserError: the file cannot be written.
    """
    write_records(
        path,
        (
            {
                "index": line["index"],
                "pred": line["output"],
                "input": line.get("input", ""),
                "outputs": list(line["references"]),
                "others": {},
                "truncation": -1,
                "length": line["tokens"] + NEW_TOKENS[_kind(task)],
            }
            for line in lines
        ),
    )


def write_prompts(path: Path, task: str, samples: Iterable[Sample]) -> None:
    """Writes samples for RULER's call_api.py, or other programs that read its data: `<task>/validation.jsonl`.

    What a prompt says of the answer already is apart from it, in `answer_prefix`; a length includes the answer's.

    Raises:
      UserError: the file cannot be written.
    """

    def lines() -> Iterable[dict[str, Any]]:
        for sample in samples:
            at = sample.text.rfind(_ANSWER[_kind(task)])
            length = len(sample.tokens) + sample.max_new_tokens
            yield {
                "index": sample.index,
                "input": sample.text[:at],
                "outputs": list(sample.references),
                "length": length,
                "length_w_model_temp": length,
                "answer_prefix": sample.text[at:],
            }

    write_records(path, lines(), "Give another directory.")


def _kind(task: str) -> str:
    if task not in TASKS:
        raise UserError(f"{task} is no task of RULER. {did_you_mean(task, TASKS)}")
    return task.split("_")[0]

"""Datasets of the harness's tasks, read from a folder instead of the hub, and in the layout of their authors.

lm-evaluation-harness 0.4.13 has three benchmarks that do not open as they are: InfiniteBench's tasks name splits that
the dataset has not, and features in a form that `datasets` refuses; LongBench v2's read another copy than the
authors'; BABILong's import transformers, and take a length from metadata.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError
from pe_lab.storage import at_home

BABILONG = ("RMT-team/babilong-1k-samples", "RMT-team/babilong")  # 1,000 samples a task to 128k; 100 to 10M
INFINITEBENCH = "xinrongzhang2022/InfiniteBench"
LONGBENCH_2 = ("zai-org/LongBench-v2", "THUDM/LongBench-v2")  # of its authors, who have two names
LONGBENCH_2_COPY = "recursal/longbench-v2"  # which the harness's tasks name
# Benchmarks that cut a prompt in its middle, by the beginning of their tasks' names.
CUT_IN_THE_MIDDLE = ("longbench2", "infinitebench")

# The split that a task of InfiniteBench names -> the split of the dataset, and its file.
_ENGLISH = ("longbook_choice", "longbook_qa", "longbook_sum", "longdialogue_qa")
_INFINITEBENCH = {
    name: name
    for name in ("passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find", "longbook_qa_chn")
} | {f"{name}_en": f"{name}_eng" for name in _ENGLISH}

_SINGLE, _MULTI = "Single-Document QA", "Multi-Document QA"
# The configuration that a task of LongBench v2 names -> `domain` and `sub_domain` of the authors' records; a domain of
# None: any.
_LONGBENCH_2 = {
    "academic_single": (_SINGLE, "Academic"),
    "academic_multi": (_MULTI, "Academic"),
    "agent_history_qa": (None, "Agent history QA"),
    "code_repo_qa": (None, "Code repo QA"),
    "detective": (_SINGLE, "Detective"),
    "dialogue_history_qa": (None, "Dialogue history QA"),
    "event_ordering": (_SINGLE, "Event ordering"),
    "financial_multi": (_MULTI, "Financial"),
    "financial_single": (_SINGLE, "Financial"),
    "government_multi": (_MULTI, "Governmental"),
    "government_single": (_SINGLE, "Governmental"),
    "graph_reasoning": (None, "Knowledge graph reasoning"),
    "legal_multi": (_MULTI, "Legal"),
    "legal_single": (_SINGLE, "Legal"),
    "literary": (_SINGLE, "Literary"),
    "manyshot_learning": (None, "Many-shot learning"),
    "multinews": (_MULTI, "Multi-news"),
    "new_language_translation": (None, "New language translation"),
    "table_qa": (None, "Table QA"),
    "user_guide_qa": (None, "User guide QA"),
}


def split_length(name: str) -> tuple[str, str | None]:
    """The harness's name of a task or group, and the length after an @, which those of BABILong may have.

    Raises:
      ConfigError: a length for another task.
    """
    task, at, length = name.partition("@")
    if at and not (task.startswith("babilong") and length):
        raise ConfigError(f"--suite=lm_eval:{name}: only tasks of BABILong have lengths, such as babilong_longctx@4k.")
    return task, length or None


class LocalDatasets:
    """The datasets of a folder, as the hub has them: DIR/OWNER/NAME each.

    Attributes:
      used: the folders that the last task was opened from, by the dataset's name.

    Raises:
      ConfigError: there is no such folder.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = None if folder is None else at_home(str(folder)).resolve()
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"--lm-eval-data={folder}: there is no such folder. It holds OWNER/NAME of each dataset.")
        self.used: dict[str, Path] = {}
        self._records: dict[Path, list[dict[str, Any]]] = {}
        self._digest = functools.cache(_digest)

    def find(self, *names: str) -> Path | None:
        """The folder of the first of these datasets that is there."""
        for name in names if self.folder is not None else ():
            if (path := self.folder / name).is_dir():
                self.used[name] = path
                return path
        return None

    def digest(self) -> str | None:
        """A digest of all files of the datasets in `used`; None without any."""
        whole = hashlib.sha256()
        for name, folder in sorted(self.used.items()):
            whole.update(f"{name}:{self._digest(folder)}\n".encode())
        return whole.hexdigest()[:16] if self.used else None

    @contextlib.contextmanager
    def opened(self, length: str | None = None) -> Iterator[None]:
        """Tasks that are opened meanwhile read their datasets from here, and from the hub what is not here.

        `length` is the configuration of BABILong: 0k, 1k, 2k, 4k ...
        """
        import datasets

        original = datasets.load_dataset

        def load(path: str, name: str | None = None, **more: Any) -> Any:
            if path in BABILONG:
                return original(str(self.find(*BABILONG) or path), length or name, **more)
            if path == INFINITEBENCH:
                return self._infinitebench(original)
            if path == LONGBENCH_2_COPY and (folder := self.find(*LONGBENCH_2)):
                return self._longbench_2(folder, str(name))
            of_the_hub = path.count("/") == 1  # not a format, nor a folder that a task names
            return original(str((of_the_hub and self.find(path)) or path), name, **more)

        datasets.load_dataset = load
        try:
            yield
        finally:
            datasets.load_dataset = original

    def _infinitebench(self, original: Any) -> Any:
        from datasets import DatasetDict, Features, Sequence, Value

        text, texts = Value("string"), Sequence(Value("string"))
        features = Features({"id": Value("int64"), "context": text, "input": text, "answer": texts, "options": texts})
        folder = self.find(INFINITEBENCH)
        if folder is None:
            found = original(INFINITEBENCH, features=features)
        else:
            files = {split: folder / f"{split}.jsonl" for split in _INFINITEBENCH.values()}
            there = {split: str(path) for split, path in files.items() if path.is_file()}
            if not there:
                raise DataError(f"{folder} has no {next(iter(files.values())).name}, nor another file of InfiniteBench")
            found = original("json", data_files=there, features=features)
        named = {task: found[split] for task, split in _INFINITEBENCH.items() if split in found}
        return DatasetDict({**found, **named})

    def _longbench_2(self, folder: Path, configuration: str) -> Any:
        """The records of one task of LongBench v2, of the authors' data.json."""
        from datasets import Dataset, DatasetDict

        path = folder / "data.json"
        domain, sub_domain = _LONGBENCH_2[configuration]
        if path not in self._records:  # 465 MB, which twenty tasks read
            self._records[path] = _longbench_2_records(path)
        chosen = [
            record
            for record in self._records[path]
            if record["sub_domain"] == sub_domain and domain in (None, record["domain"])
        ]
        if not chosen:
            raise DataError(f"{path} has no record of {sub_domain!r}")
        return DatasetDict({"train": Dataset.from_list(chosen)})


def _digest(folder: Path) -> str:
    """A digest of all files of a folder but hidden ones."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            with path.open("rb") as file:
                whole.update(f"{inside}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def _longbench_2_records(path: Path) -> list[dict[str, Any]]:
    """The records of data.json, with their choices as a list."""
    kept = ("_id", "domain", "sub_domain", "difficulty", "length", "question", "answer", "context")
    try:
        return [
            {name: record[name] for name in kept} | {"choices": [record[f"choice_{letter}"] for letter in "ABCD"]}
            for record in json.loads(path.read_text(encoding="utf-8"))
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the list of LongBench v2's records ({error!r})") from None


def import_functions(yaml_path: str | Path) -> None:
    """Imports the functions of a task of BABILong where transformers is not installed.

    They import a tokenizer that none of them uses. A module of the harness is imported once; an empty transformers
    stands in for it meanwhile.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    if importlib.util.find_spec("transformers") is None:
        stand_in = types.ModuleType("transformers")
        stand_in.AutoTokenizer = None  # type: ignore[attr-defined]
        sys.modules["transformers"] = stand_in
        try:
            load_yaml(yaml_path, resolve_func=True)
        finally:
            del sys.modules["transformers"]

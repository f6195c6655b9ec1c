"""Tasks of lm-evaluation-harness: the lists that papers report, and opening tasks with their data."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError, UnsupportedError, did_you_mean
from pe_lab.evaluation.lm_eval.local_datasets import (
    BABILONG,
    INFINITEBENCH,
    LONGBENCH_2,
    LONGBENCH_2_COPY,
    LocalDatasets,
    import_functions,
    split_length,
)
from pe_lab.storage import at_home

YAML = (".yaml", ".yml")

# droPE-six: DroPE, appendix C.2, which measured them with LightEval: its prompts are not the harness's.
# partial-rope-ten: the partial RoPE paper, table 3, zero-shot.
TASK_LISTS = {
    "droPE-six": ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande"),
    "partial-rope-ten": (
        "arc_challenge",
        "arc_easy",
        "logiqa",
        "lambada_openai",
        "lambada_standard",
        "piqa",
        "sciq",
        "pubmedqa",
        "winogrande",
        "wsc",
    ),
}


def expand_tasks(names: Sequence[str]) -> list[str]:
    """The tasks of names, each once: those of a list for its name, in any capitals; other names unchanged.

    Raises:
      ConfigError: no name, or one that is nearly a list's.
    """
    lists = {name.lower(): name for name in TASK_LISTS}
    found: list[str] = []
    for name in filter(None, (name.strip() for name in names)):
        if name.lower() in lists:
            found += TASK_LISTS[lists[name.lower()]]
        # A stricter cutoff than did_you_mean's: `drop` is a task.
        elif near := difflib.get_close_matches(name.lower(), lists, n=1, cutoff=0.75):
            raise ConfigError(f"No list of tasks is called '{name}'. Did you mean '{lists[near[0]]}'?")
        else:
            found.append(name)
    if not found:
        raise ConfigError(f"No task is named. Name tasks of lm-evaluation-harness, or a list: {', '.join(TASK_LISTS)}.")
    return list(dict.fromkeys(found))


def open_tasks(
    names: Sequence[str], include_path: str | Path | None = None, data: LocalDatasets | None = None
) -> tuple[Any, dict[str, list[Any]], dict[str, str | None]]:
    """The harness's task manager, the tasks and groups with their data, and the digest of local data, by name.

    Args:
      names: of tasks, groups or tags of the harness; of BABILong with a length, such as babilong_qa1@4k.
      include_path: a folder of YAML files with further tasks, which take precedence over the harness's.
      data: datasets that are not read from the hub.

    Raises:
      ConfigError: an unknown task, or no such folder.
      DataError: a task whose dataset cannot be opened.
    """
    tasks = {name: split_length(name) for name in names}
    manager = _manager([task for task, _ in tasks.values()], include_path)
    known = manager.task_index
    for name, _ in tasks.values():
        if name not in known:
            also = f" (nor in {include_path})" if include_path else ""
            raise ConfigError(
                f"lm-evaluation-harness has no task '{name}'{also}. {_nearest(name, [*known, *TASK_LISTS])}"
            )
    data, opened, digests = data or LocalDatasets(), {}, {}
    for name, (task, length) in tasks.items():
        data.used = {}
        opened[name], digests[name] = _open(manager, task, data, length), data.digest()
    return manager, opened, digests


def harness_version() -> str:
    """The harness's release; `UnsupportedError` where it is not installed."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            "lm-evaluation-harness is needed. Install it: pip install 'pe-lab[eval]', or lm-eval alone."
        ) from None


def folder_digest(include_path: str | Path | None, besides: Path | None = None) -> str | None:
    """A digest of a folder of tasks, and of files elsewhere that its YAML files name; None without a folder.

    Files in the directory `besides`, of the results, do not count.

    Raises:
      ConfigError: there is no such folder.
      DataError: a file in it cannot be read.
    """
    if include_path is None:
        return None
    folder, whole = _folder(include_path), hashlib.sha256()
    inside = {path: path.relative_to(folder).as_posix() for path in _files(folder)}
    named = (name for path in inside if path.suffix in YAML for name in _named(path))
    # The contents hold the paths in a YAML file, and not the files at these paths.
    for path, name in sorted({**{path: str(path) for path in named}, **inside}.items(), key=lambda item: item[1]):
        if besides is None or besides.resolve() not in path.parents:
            with _reading(path), open(path, "rb") as file:
                whole.update(f"{name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    """All files of a folder but hidden ones and Python's caches."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path


def _named(yaml: Path) -> Iterator[Path]:
    """Files that a YAML file names: data, or tasks that it includes. Its tags cannot be parsed here: it is searched."""
    with _reading(yaml):
        text = yaml.read_text(encoding="utf-8", errors="replace")
    for name in dict.fromkeys(re.findall(r"""[^\s'",:{}\[\]]+\.\w+""", text)):
        for path in (at_home(name), yaml.parent / name):
            if len(name) < 4096 and path.is_file():
                yield path.resolve()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}, of the folder of tasks, cannot be read ({error.strerror}).") from None


def _folder(include_path: str | Path) -> Path:
    folder = at_home(str(include_path)).resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"The folder of tasks '{include_path}' is not there. Give one that holds YAML files of tasks."
        )
    return folder


def _manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    if include_path is None:
        return _task_manager(None, True)
    folder = _folder(include_path)
    contents = tuple((str(path), path.stat().st_mtime_ns) for path in _files(folder) if path.suffix in YAML)
    # The harness's own files are read only where they are needed: reading thousands of them takes seconds.
    local = _task_manager(folder, False, contents)
    return local if set(names) <= set(local.all_subtasks) else _task_manager(folder, True, contents)


@functools.lru_cache(maxsize=8)
def _task_manager(include_path: Path | None, defaults: bool, contents: Any = None) -> Any:
    """The task manager of a folder; `contents` changes when the folder does, and makes a new one."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path and str(include_path), include_defaults=defaults)


def _open(manager: Any, name: str, data: LocalDatasets, length: str | None) -> list[Any]:
    """A task, a group, or the tasks of a tag, with their data."""
    entry = manager.task_index[name]
    try:
        if name.startswith("babilong"):
            import_functions(manager.task_index.get("babilong_qa1", entry).yaml_path)
        with data.opened(length):
            loaded = manager.load([name])
    except Exception as error:  # datasets, the hub and a task's own code raise their own errors
        config = entry.cfg or {}
        dataset = config.get("dataset_path") or _dataset_of(name)
        splits = [config[f"{kind}_split"] for kind in ("training", "validation", "test") if config.get(f"{kind}_split")]
        raise DataError(
            f"Task '{name}' cannot be opened{f', with its dataset {dataset!r}' if dataset else ''}: "
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}. "
            + _download(dataset)
            + by_hand("--lm-eval-tasks", str(entry.yaml_path or "THE TASK'S OWN YAML"), splits or ("test",))
        ) from error
    children = {child for group in loaded["group_map"].values() for child in group}
    groups = [group for group in loaded["groups"].values() if group.name not in children]
    return groups or list(loaded["tasks"].values())


def _dataset_of(name: str) -> str | None:
    """The dataset of a group, whose entry does not name it."""
    known = {"babilong": BABILONG[0], "longbench2": LONGBENCH_2_COPY, "infinitebench": INFINITEBENCH}
    return known.get(name.partition("_")[0])


def _download(dataset: str | None) -> str:
    """Advice to download a dataset of the hub."""
    if dataset is None or dataset.count("/") != 1:
        return ""
    name = LONGBENCH_2[0] if dataset == LONGBENCH_2_COPY else dataset
    return (
        f"Download it where there is a network (`hf download {name} --repo-type=dataset --local-dir=DIR/{name}`), and "
        "give --lm-eval-data=DIR. "
    )


def by_hand(option: str, yaml: str = "THE TASK'S OWN YAML", splits: Sequence[str] = ("test",)) -> str:
    """Advice for a task whose documents the hub does not give; `option` is the flag for the folder of tasks."""
    files = ", ".join(f"{split}: /absolute/{split}.jsonl" for split in splits)
    return (
        "Where there is no network, set HF_DATASETS_CACHE to a folder in which the dataset was downloaded before, and "
        "HF_DATASETS_OFFLINE=1. Or place the documents as JSON lines and write a YAML file with the lines "
        f"`include: {yaml}`, `dataset_path: json`, `dataset_name: null` and "
        f"`dataset_kwargs: {{data_files: {{{files}}}}}` (a split that is not there is null: `training_split: null`), "
        f"and give its folder: {option}=DIR."
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    """As `did_you_mean`, without a list of all names: there are thousands."""
    found = did_you_mean(name, known)
    return found if found.startswith("Did you mean") else "`lm-eval ls tasks` lists them all."

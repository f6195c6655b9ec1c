"""`pe_lab.sweep --on=slurm`: an array of jobs on a real SLURM, and the options that it refuses."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster
from tiny_runs import finish, records, start, write_recipe

from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.lab.sweeps import runners
from pe_lab.lab.sweeps.runners import Slurm
from pe_lab.lab.sweeps.running import CellTask, Stop
from pe_lab.lab.sweeps.state import read_outcome


@pytest.mark.parametrize(
    ("text", "minutes"), [("90", 90), ("90:30", 91), ("24:00:00", 1440), ("2-12", 3600), ("1-00:30:00", 1470)]
)
def test_time_limits_are_those_of_sbatch(text: str, minutes: int) -> None:
    assert Slurm({"time": text})._parameters["time"] == minutes


def test_options_are_passed_on() -> None:
    found = Slurm({"time": "60", "gpus-per-node": "1", "partition": "a100", "exclude": "n1", "licenses": "x"}, jobs=4)
    expected = {"time": 60, "gpus_per_node": 1, "partition": "a100", "exclude": "n1", "array_parallelism": 4}
    assert expected.items() <= found._parameters.items()
    assert found._parameters["additional_parameters"] == {"licenses": "x"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a time limit of each job"),
        ({"time": "soon"}, "is no time limit"),
        ({"time": "0:30"}, "less than a minute"),
        ({"time": "60", "nodes": "2"}, "one process on one node"),
    ],
)
def test_options_that_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Slurm(options)


def test_a_controller_that_is_busy_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs" / "slurm").mkdir(parents=True)
    (tmp_path / "logs" / "slurm" / "jobs.json").write_text('{"a": "7_0"}')
    answers: list[dict[str, str] | Exception] = [
        {"7_0": "PENDING"},
        UnsupportedError("timed out"),
        {"7_0": "RUNNING"},
        {},
    ]

    def queue() -> dict[str, str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(runners, "_queue", queue)
    monkeypatch.setattr(runners, "POLL_SECONDS", 0.0)
    seen: list[tuple[list[str], list[str]]] = []
    task = CellTask(str(tmp_path), "a", {"only": 1}, ["train"])
    Slurm({"time": "60"}).run([task], Stop(), lambda running, queued: seen.append((running, queued)))
    assert seen == [([], ["a"]), (["a"], []), ([], [])] and not answers


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster() as environment:
        yield environment


def wait_until(happened: Callable[[], bool], patience: float = 300) -> None:
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_preempted_cells_of_an_array_go_on(cluster: dict[str, str], tmp_path: Path) -> None:
    """A cell is sent what submitit asks SLURM for before a time limit, the other one is requeued: both save. 60 s."""
    sweep, recipe = tmp_path / "sweep", write_recipe(tmp_path / "recipe")
    command = [
        *("pe_lab.sweep", f"--config={recipe}", "--seeds=2", f"--workdir={sweep}", "--on=slurm", "--slurm-time=60"),
        *(
            "--config.phases.0.steps=400",
            "--config.checkpoint.every_steps=100",
            "--config.log.validate_every_steps=100",
        ),
    ]
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {key: cluster[key] for key in ("SLURM_CONF", "PATH")} | kept
    running = start(command, tmp_path, **environment)
    try:

        def ask(*words: str) -> str:
            return subprocess.run(words, env=cluster, capture_output=True, text=True, timeout=300, check=True).stdout

        def step(name: str) -> int:
            file = sweep / name / "pretrain" / "metrics.jsonl"
            return len(records(file)) if file.exists() else 0

        left = {"seed=0": ("scancel", "--signal=USR2"), "seed=1": ("scontrol", "requeue")}

        def interrupted() -> bool:
            """Each as soon as it trains: on a busy machine one is through before the other begins."""
            for name in [name for name in left if step(name) > 20]:
                job = ask("squeue", "--noheader", "--array", "--format=%i").split()[0].partition("_")[0]
                ask(*left.pop(name), f"{job}_{name[-1]}")
            return not left

        wait_until(interrupted)
        (out,) = finish([running])
    finally:
        running.kill()
    assert "2 of 2 cells complete" in out, out
    for name in ("seed=0", "seed=1"):
        log = (sweep / "logs" / f"{name}.log").read_text()
        assert log.count("== python -m pe_lab.train") == 2, log
        assert "SIGTERM: saving, then leaving" in log and "again: leaving" not in log, log
        assert read_outcome(sweep, name)["status"] == 0
    again = finish([start(command, tmp_path, **environment)])[0]
    assert "2 of 2 cells complete" in again and "SLURM jobs" not in again

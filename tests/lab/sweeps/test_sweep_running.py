"""Cells as processes, with a stand-in for training that starts in a hundredth of a second."""

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pe_lab.errors import ConfigError, DataError
from pe_lab.lab.sweeps import runners, running
from pe_lab.lab.sweeps.runners import Local, slots
from pe_lab.lab.sweeps.running import CellTask, Stop, run_task
from pe_lab.lab.sweeps.state import _is_held, file_of, has_failed, is_trained, read_outcome
from pe_lab.storage import lease

# Counts its starts; trains at once, when told to, or never; saves at SIGTERM.
TRAIN = """
import json, os, pathlib, signal, sys, time
run, how = pathlib.Path(sys.argv[1]), sys.argv[2]
run.mkdir(parents=True, exist_ok=True)
with open(run / "starts", "a") as file:
    file.write(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))]) + "\\n")
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(run / "ready").touch()
if how == "fails" and not (run / "mended").exists():
    print("error: The loss is nan.", flush=True)
    sys.exit(1)
while how == "waits" and not (run / "go").exists():
    time.sleep(0.01)
(run / "only").mkdir(exist_ok=True)
(run / "only" / "phase.json").write_text(json.dumps({"status": "complete", "steps": 3}))
"""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(runners, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.1)


@pytest.fixture
def task(tmp_path):
    def make(name="a", how="trains", **more):
        command = [sys.executable, "-S", "-c", TRAIN, str(tmp_path / name), how]
        before = read_outcome(tmp_path, name)
        return CellTask(str(tmp_path), name, {"only": 3}, command, cwd=str(tmp_path), before=before, **more)

    return make


def starts(directory, name="a"):
    file = directory / name / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(path):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def in_thread(function, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)))
    thread.start()
    return thread, found


def test_a_complete_cell_is_left_alone(task, tmp_path):
    assert run_task(task(), Stop()) == 0 == run_task(task(), Stop())
    assert len(starts(tmp_path)) == 1 and is_trained(tmp_path / "a", {"only": 3})
    assert not file_of(tmp_path, "a", "lease").exists()
    assert is_trained(tmp_path / "a", {"only": 2})  # `train --until`
    assert not is_trained(tmp_path / "a", {"only": 4}) and not is_trained(tmp_path / "a", {"only": 3, "second": 1})


def test_a_worker_may_be_elsewhere(task, tmp_path):
    """The directory of a sweep is relative to where its command was given."""
    assert run_task(dataclasses.replace(task(), directory="."), Stop()) == 0
    assert is_trained(tmp_path / "a", {"only": 3}) and file_of(tmp_path, "a", "log").exists()


def test_a_failed_cell_says_why(task, tmp_path):
    assert run_task(task(how="fails"), Stop()) == 1
    found = read_outcome(tmp_path, "a")
    assert has_failed(found) and (found["status"], found["error"]) == (1, "The loss is nan.")
    assert "error: The loss is nan." in (tmp_path / "logs" / "a.log").read_text()
    # Another sweep, which began before the failure, leaves the cell alone; a later one, asked to retry, does not.
    (tmp_path / "a" / "mended").touch()
    early = CellTask(**{**vars(task(how="fails")), "before": {}})
    assert run_task(early, Stop()) == 1 and len(starts(tmp_path)) == 1
    assert run_task(task(how="fails"), Stop()) == 0


def test_a_stop_lets_the_cell_save_and_it_goes_on_later(task, tmp_path):
    stop = Stop()
    thread, found = in_thread(run_task, task(how="waits"), stop)
    wait_for(tmp_path / "a" / "ready")
    stop.requests = 1
    thread.join(300)
    assert found == [75] and not has_failed(read_outcome(tmp_path, "a"))
    (tmp_path / "a" / "go").touch()
    assert run_task(task(how="waits"), Stop()) == 0 and len(starts(tmp_path)) == 2


def test_a_killed_cell_has_not_failed(task, tmp_path):
    stop = Stop()
    thread, found = in_thread(run_task, task(how="waits"), stop)
    wait_for(tmp_path / "a" / "ready")
    stop.process.kill()
    thread.join(300)
    outcome = read_outcome(tmp_path, "a")
    assert found == [-signal.SIGKILL] and outcome["error"] == "ended by SIGKILL" and not has_failed(outcome)


def test_the_evaluation_follows_once_for_its_options(task, tmp_path):
    evaluate = [sys.executable, "-S", "-c", "import pathlib; open('evaluated', 'a').write('.')"]
    for options in (["--suite=x"], ["--suite=x"], ["--suite=y"]):
        assert run_task(task(evaluate=evaluate, evaluation=options), Stop()) == 0
    assert (tmp_path / "evaluated").read_text() == ".." and read_outcome(tmp_path, "a")["evaluated"] == [
        ["--suite=x"],
        ["--suite=y"],
    ]
    failing = [sys.executable, "-S", "-c", "raise SystemExit('error: no suite')"]
    assert run_task(task("b", evaluate=failing, evaluation=[]), Stop()) == 1
    assert read_outcome(tmp_path, "b")["error"] == "the evaluation: no suite"


def test_two_sweeps_share_the_cells(task, tmp_path):
    tasks = [task(name) for name in "abcdef"]
    threads = [in_thread(Local(2).run, tasks, Stop(), lambda *_: None)[0] for _ in range(2)]
    for thread in threads:
        thread.join(300)
    assert {name: len(starts(tmp_path, name)) for name in "abcdef"} == dict.fromkeys("abcdef", 1)


def test_a_cell_whose_lease_cannot_be_written_stops_no_other(task, tmp_path, monkeypatch):
    def refuse(path, *arguments, **options):
        if path.name.startswith("a."):
            raise DataError("The disk is full.")
        return lease(path, *arguments, **options)

    monkeypatch.setattr(running, "lease", refuse)
    with pytest.raises(DataError, match="The disk is full"):
        Local(1).run([task("a"), task("b")], Stop(), lambda *_: None)
    assert len(starts(tmp_path, "b")) == 1


def test_no_cell_goes_on_without_its_sweep(task, tmp_path):
    def look(names):
        if (tmp_path / "a" / "ready").exists():
            raise RuntimeError("a fault of the display")

    with pytest.raises(RuntimeError, match="of the display"):
        Local(1).run([task(how="waits")], Stop(), look)
    assert read_outcome(tmp_path, "a")["status"] == 75


def test_a_cell_of_a_killed_sweep_is_waited_for(task, tmp_path):
    """Its process trains on, and has the lease of the run."""
    (tmp_path / "a").mkdir()
    with lease(tmp_path / "a" / "lease.json", print, print):
        thread, found = in_thread(run_task, task(), Stop())
        time.sleep(0.3)
        assert not starts(tmp_path) and file_of(tmp_path, "a", "lease").exists()
    thread.join(300)
    assert found == [0]


def test_the_lease_of_a_killed_sweep_counts_no_more(task, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    held = file_of(tmp_path, "a", "lease")
    with lease(held, print, print):
        owner = json.loads(held.read_text()) | {"key": "k"}
    held.write_text(json.dumps(owner | {"pid": dead.pid}))
    assert not _is_held(held)
    # Another process may have its number meanwhile.
    held.write_text(json.dumps(owner | {"started": "x"}))
    assert not _is_held(held)
    assert run_task(task(), Stop()) == 0
    with lease(held, print, print):
        assert run_task(task(), Stop()) is None


def test_nohup_keeps_its_meaning():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (stop := Stop()).signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requests == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requests == 1
            os.kill(os.getpid(), signal.SIGTERM)  # as make and timeout pass it on
            assert stop.requests == 1
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requests == 2
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("age", "live"), [(5, True), (3600, False)])
def test_a_lease_of_another_host_counts_while_it_is_renewed(task, tmp_path, age, live):
    renewed = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    held = file_of(tmp_path, "a", "lease")
    held.parent.mkdir()
    held.write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": renewed.isoformat()}))
    assert _is_held(held) is live


def test_slots_are_devices_or_cores(monkeypatch):
    cores = frozenset(os.sched_getaffinity(0))
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert [slot.cpus for slot in slots(1)] == [None]
    parts = [slot.cpus for slot in slots(2)]
    assert frozenset().union(*parts) <= cores and (len(cores) < 2 or not parts[0] & parts[1])
    assert len(slots(5)) == 5 and all(slot.cpus for slot in slots(5))
    monkeypatch.delattr("os.sched_getaffinity")  # macOS
    assert [slot.cpus for slot in slots(2)] == [None, None]

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots()] == ["0", "1", "2", "5"]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots(2)] == ["0,1", "2,5"]
    with pytest.raises(ConfigError, match="this machine has 4 GPUs"):
        slots(5)

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1,2,3")
    chips = [
        (slot.environment["TPU_VISIBLE_CHIPS"], slot.environment["TPU_CHIPS_PER_PROCESS_BOUNDS"]) for slot in slots(2)
    ]
    assert chips == [("0,1", "1,2,1"), ("2,3", "1,2,1")] and len(slots()) == 4
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1,2,3,4,5")
    with pytest.raises(ConfigError, match="3 TPU chips"):
        slots(2)


def test_a_process_gets_its_device_and_its_cores(task, tmp_path, monkeypatch):
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(runners, "slots", lambda jobs: [runners.Slot({"CUDA_VISIBLE_DEVICES": "7"}, frozenset({one}))])
    Local().run([task()], Stop(), lambda *_: None)
    assert starts(tmp_path) == [["7", [one]]] and len(os.sched_getaffinity(0)) >= 1

"""Trackers: what they are given, what happens when they block or fail, and W&B's own files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from etils import epath
from tiny_runs import REPOSITORY, compilations_kept, start, tiny, write_recipe  # noqa: F401

from pe_lab.config import Config, LogConfig, WandbConfig
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.training import trackers
from pe_lab.training.logs import PhaseLogs
from pe_lab.training.trackers import Background, Session, Wandb, check_trackers, open_trackers


def logs_of(directory, resume_step, left_out=(), config=None) -> PhaseLogs:
    """The logs of a phase, with the trackers of a config."""

    def opened(skip):
        return open_trackers(Session(directory, resume_step, skip, config or Config()), print)

    return PhaseLogs(directory, resume_step, left_out, trackers=opened)


class Listed(trackers.Tracker):
    """A tracker that keeps what it is given."""

    def __init__(self, *_):
        self.given, self.ended = [], False

    def write(self, step, numbers):
        self.given.append((step, dict(numbers)))

    def flush(self):
        self.given.append("flush")

    def close(self):
        self.ended = True

    abandon = close


def test_a_tracker_is_given_the_finite_numbers_of_metrics_and_speed_in_order(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Listed)
    logs = logs_of(tmp_path, 0)
    for step in range(300):
        logs.write("metrics", {"step": step, "loss": float(step)})
    logs.write("speed", {"step": 300, "mfu_full": None, "tokens_per_second": 7, "on": True, "bad": float("nan")})
    logs.write("metrics", {"step": 300, "event": "skip", "loss": 1.0})
    logs.write("spikes", {"step": 300, "position": 4})
    logs.flush()
    logs.close()
    (background,) = logs._trackers
    assert background.tracker.given == [
        *((step, {"loss": float(step)}) for step in range(300)), (300, {"tokens_per_second": 7}), "flush",
    ]  # fmt: skip
    assert background.tracker.ended


def test_a_tracker_that_blocks_stops_nothing_and_is_told_once(monkeypatch):
    monkeypatch.setattr(trackers, "QUEUE", 50)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    forever, told = threading.Event(), []

    class Blocks(Listed):
        def write(self, step, numbers):
            forever.wait()

    background = Background("slow", Blocks, told.append)
    for step in range(10_000):  # the test ends: nothing here waits for the tracker, which waits for ever
        background.write(step, {"loss": 1.0})
    background.flush()
    background.close()
    assert told == ["slow: it does not keep up. Training goes on; what it does not take is in the logs alone."]
    assert background.tracker.ended  # abandoned
    forever.set()


@pytest.mark.parametrize("where", ["__init__", "write", "flush", "close"])
def test_a_tracker_that_fails_is_told_once_and_takes_what_it_can(where):
    told = []

    class Fails(Listed):
        pass

    def fail(self, *_):
        raise OSError("no network\nand more")

    setattr(Fails, where, fail)
    background = Background("broken", Fails, told.append)
    for step in range(3):
        background.write(step, {"loss": 1.0})
        background.flush()
    background.close()
    assert told == ["broken: OSError: no network. Training goes on; what it does not take is in the logs alone."]
    assert not background._thread.is_alive()


def test_trackers_that_cannot_be_opened_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"config.log.trackers\[1\] is 'wandbb'. Did you mean 'wandb'\?"):
        check_trackers(("tensorboard", "wandbb"), "online", tmp_path)
    check_trackers(("wandb",), "offline", tmp_path)
    with pytest.raises(ConfigError, match="object store, where W&B writes no files"):
        check_trackers(("wandb",), "offline", epath.Path("gs://bucket/run"))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pe-lab\[wandb\]'"):
        check_trackers(("wandb",), "offline", tmp_path)
    check_trackers(("wandb",), "disabled", tmp_path)


def history(path: Path) -> list[dict[str, float]]:
    """The rows of a .wandb file: LevelDB's log format (crc, length, kind) of blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, part = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = (part if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            whole.append(Record.FromString(part))
    rows = [record.history.item for record in whole if record.WhichOneof("record_type") == "history"]
    found = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in row}
        for row in rows
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in found]


def offline(**changes) -> Config:
    return Config(log=LogConfig(trackers=("wandb",), wandb=WandbConfig(mode="offline", tags=("a", "b"))), **changes)


@pytest.mark.slow
def test_wandb_has_one_run_over_phases_and_starts(tmp_path):
    """With W&B's own library, three times: 10 s."""
    for phase, resume_step, records in (("one", 0, (0, 1, 2, 3)), ("one", 2, (3, 4)), ("two", 0, (0, 1))):
        (tmp_path / phase).mkdir(exist_ok=True)
        logs = logs_of(tmp_path / phase, resume_step, config=offline())
        for step in records:
            logs.write("metrics", {"step": step, "loss": 0.5 * step})
        logs.close()
    identity = json.loads((tmp_path / "wandb.json").read_text())["id"]
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))
    rows = [row for file in files for row in history(file)]
    # Step 3 was sent before the second start, and is the same then.
    assert rows == [
        *({"one/step": step, "one/loss": 0.5 * step} for step in (0, 1, 2, 3, 4)),
        *({"two/step": step, "two/loss": 0.5 * step} for step in (0, 1)),
    ]  # fmt: skip


def test_steps_after_a_rewind_are_sent_again(tmp_path, monkeypatch):
    sessions = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda session: sessions.append(session) or Listed())
    for resume_step, left_out in ((0, ()), (4, ()), (4, (5,))):
        logs = logs_of(tmp_path, resume_step, left_out, config=offline())
        for step in range(resume_step + 1, 8):
            logs.write("metrics", {"step": step, "loss": 1.0})
        logs.close()
    assert [(one.resume_step, one.skip) for one in sessions] == [(0, -1), (4, 7), (4, -1)]


def test_a_phase_that_starts_over_sends_its_first_step_once(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(Wandb, "__init__", lambda self, session: setattr(self, "_skip", session.skip))
    monkeypatch.setattr(Wandb, "_send", lambda self, record: sent.append(record["step"]))
    monkeypatch.setattr(Wandb, "close", lambda self: None)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Wandb)
    for last in (2, 3):
        logs = logs_of(tmp_path, 0, config=offline())
        for step in range(last + 1):
            logs.write("metrics", {"step": step, "loss": 1.0})
        logs.close()
    assert sent == [0, 1, 2, 3]


def test_trackers_end_even_if_a_log_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Listed)
    logs = logs_of(tmp_path, 0)
    monkeypatch.setattr(logs._logs["metrics"], "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logs.close()
    assert logs._trackers[0].tracker.ended


def alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = process.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def test_a_process_of_wandb_that_hangs_is_ended(tmp_path, monkeypatch):
    """Its pipe is full, and it would never end."""
    hangs = tmp_path / "wandb_writer.py"
    hangs.write_text("import time, subprocess\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)\n")
    monkeypatch.setattr(trackers, "WRITER", hangs)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.3)
    told = []
    background = Background("wandb", lambda: Wandb(Session(tmp_path / "one", 0, 0, offline())), told.append)
    for step in range(1, 2000):
        background.write(step, {f"number{n}": 1.0 for n in range(20)})
    while background.tracker is None:
        time.sleep(0.01)
    group = background.tracker._process.pid
    assert alive(group)
    background.close()
    assert told == [
        "wandb: it did not finish in 0.3 seconds. Training goes on; what it does not take is in the logs alone."
    ]
    end = time.monotonic() + 300  # a killed process takes a moment
    while alive(group) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(group)


def test_a_wandb_that_cannot_start_is_told_with_its_reason(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "wandb_writer.py").write_text("import sys\nsys.stdin.readline()\nraise SystemExit('No API key')\n")
    monkeypatch.setattr(trackers, "WRITER", tmp_path / "wandb_writer.py")
    told = []
    background = Background("wandb", lambda: Wandb(Session(tmp_path / "one", 0, 0, offline())), told.append)
    background.close()
    assert told == ["wandb: RuntimeError: No API key. Training goes on; what it does not take is in the logs alone."]


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True], ids=["ends", "killed"])
def test_training_leaves_no_process_of_wandb(tmp_path, kill):
    """Real training with real W&B, offline, ended and killed: 20 s each."""
    recipe = write_recipe(tmp_path)
    run = start(
        ["pe_lab.train", f"--config={recipe}", "--workdir=run", "--config.log.trackers=('wandb',)",
         "--config.log.wandb.mode=offline", f"--config.phases.0.steps={100_000 if kill else 8}"], cwd=tmp_path,
    )  # fmt: skip
    if kill:
        log = tmp_path / "run/pretrain/metrics.jsonl"
        while not (log.exists() and log.read_bytes().count(b'"loss"') > 20) and run.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        run.send_signal(signal.SIGKILL)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == (-9 if kill else 0), out
    (identity,) = {path.stem.partition("-")[2] for path in tmp_path.glob("run/wandb/offline-run-*/*.wandb")}
    end = time.monotonic() + 300
    while (left := _processes(str(tmp_path / "run"))) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left
    rows = [row for path in sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb")) for row in history(path)]
    assert {"pretrain/step", "pretrain/loss"} <= set().union(*rows) and identity


@pytest.mark.slow
def test_a_run_ends_with_a_tracker_that_blocks_for_ever(tmp_path):
    """In a process of its own: 15 s."""
    program = textwrap.dedent(f"""
        import sys, threading
        sys.path.insert(0, {str(REPOSITORY / "tests")!r})
        from pathlib import Path
        from tiny_runs import tiny, train
        from pe_lab.training import trackers
        class Blocks:
            def __init__(self, session): threading.Event().wait()
        trackers.TRACKERS["tensorboard"] = Blocks
        trackers.CLOSE_SECONDS = 1.0
        train(tiny(Path("recipe")), Path("run"))
        print("trained")
        """)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    assert " ".join(done.stdout.split()).count("tensorboard: it did not finish in 1 seconds") == 2  # phases


def _processes(workdir: str) -> list[str]:
    """The command lines of W&B's processes whose files are under `workdir`, or that pe_lab started for it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            opened = [os.readlink(fd) for fd in (process / "fd").iterdir()] if "wandb" in line else []
        except OSError:
            continue
        if any(path.startswith(workdir) for path in opened):
            found.append(line)
    return found

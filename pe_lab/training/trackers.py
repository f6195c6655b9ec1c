"""Trackers of a run, TensorBoard and Weights & Biases: copies of the logs for their viewers, never in a step's way."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.config import Config, to_json
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean, excerpt
from pe_lab.storage import AnyPath, is_remote, read_bytes, write_file, write_json

FLUSH_SECONDS = 120.0  # of TensorBoard's events
QUEUE = 10_000  # records that wait for a tracker; later ones are left out
CLOSE_SECONDS = 60.0  # that the end of a phase waits for a tracker
WANDB_SECONDS = 45.0  # of them, for W&B's last uploads
WANDB_FILE = "wandb.json"
WRITER = Path(__file__).with_name("wandb_writer.py")


class Tracker:
    """Where numbers are shown. Its methods run on a thread of their own, and may block or raise."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of one step."""

    def flush(self) -> None:
        """Writes what is buffered."""

    def close(self) -> None:
        """Writes what is buffered, and ends."""

    def abandon(self) -> None:
        """Ends at once, while another method may block; does not block itself."""


@dataclass(frozen=True)
class Session:
    """The start of a phase for which a tracker is opened."""

    directory: AnyPath  # of the phase
    resume_step: int
    skip: int  # steps up to this one (-1: none) were written earlier, and are computed again with the same result
    config: Config  # of the run


class Background:
    """A tracker on its own thread, behind a bounded queue: `write` and `flush` neither block nor raise.

    What the tracker cannot take is left out, which a line says once. `close` waits for `CLOSE_SECONDS` at most.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], show: Callable[[str], None]):
        self._name, self._make, self._show, self._told = name, make, show, False
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE)
        self.tracker: Tracker | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.write(step, numbers))

    def flush(self) -> None:
        """Asks for a flush; does not wait for it."""
        self._put(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Waits until everything is written."""
        end = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"it did not finish in {CLOSE_SECONDS:g} seconds")
            if self.tracker is not None:
                self.tracker.abandon()

    def _put(self, action: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._tell("it does not keep up")

    def _work(self) -> None:
        try:
            self.tracker = tracker = self._make()
        except Exception as error:
            self._tell(_reason(error))
            while self._queue.get() is not None:
                pass
            return
        while (action := self._queue.get()) is not None:
            self._try(action, tracker)
        self._try(lambda tracker: tracker.close(), tracker)

    def _try(self, action: Callable[[Tracker], None], tracker: Tracker) -> None:
        try:
            action(tracker)
        except Exception as error:
            self._tell(_reason(error))

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self._show(f"{self._name}: {reason}. Training goes on; what it does not take is in the logs alone.")


def _reason(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return excerpt(f"{type(error).__name__}: {text}" if text else type(error).__name__).rstrip(".")


class TensorBoard(Tracker):
    """The TensorBoard events of a session, in `tensorboard/` of the phase.

    tensorboardX's `SummaryWriter` has a thread that ends at the first failure, and then its queue fills up; here the
    events are written directly. To an object store, the files are copied.
    """

    def __init__(self, session: Session):
        """Opens a new file of events; TensorBoard drops earlier ones after the step of the checkpoint."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        self._event, self._flushed = Event, time.monotonic()
        self._target = session.directory / "tensorboard"
        self._copied = tempfile.TemporaryDirectory(prefix="pe_lab_events_") if is_remote(session.directory) else None
        directory = Path(self._copied.name if self._copied else str(self._target))
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        if session.resume_step == 0:
            self._add(Event(step=0, summary=text("config", json.dumps(to_json(session.config), indent=1))))
        else:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(step=session.resume_step + 1, session_log=start))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in numbers.items():
            self._add(self._event(step=step, summary=scalar(name, value)))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)

    def flush(self) -> None:
        self._flushed = time.monotonic()
        self._writer.flush()
        if self._copied is not None:
            for file in Path(self._copied.name).iterdir():
                write_file(self._target / file.name, file.read_bytes())

    def close(self) -> None:
        self.flush()
        self._writer.close()
        if self._copied is not None:
            self._copied.cleanup()


class Wandb(Tracker):
    """A run of Weights & Biases, written by a process of its own: `wandb_writer.py`.

    All phases and all starts of a run are one run of W&B, whose id is in wandb.json of the workdir; metrics are named
    `PHASE/NAME` and drawn over `PHASE/step`.
    """

    def __init__(self, session: Session):
        workdir, wanted = session.directory.parent, session.config.log.wandb
        known = {}
        with contextlib.suppress(Exception):  # missing, or damaged: a new run of W&B
            known = json.loads(read_bytes(workdir / WANDB_FILE))
        if not (isinstance(known, dict) and isinstance(known.get("id"), str)):
            known = {"id": secrets.token_hex(4)}
            write_json(workdir / WANDB_FILE, known)
        directory = tempfile.mkdtemp(prefix="pe_lab_wandb_") if is_remote(workdir) else str(workdir)
        init = {
            "id": known["id"],
            "name": session.config.name,
            "project": wanted.project,
            "entity": wanted.entity or None,
            "group": wanted.group or None,
            "tags": list(wanted.tags),
            "mode": wanted.mode,
            "dir": directory,
            "config": to_json(session.config),
        }
        self._skip = session.skip
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WRITER)],  # -P: not beside this directory
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
            text=True,
        )
        self._send({"init": init, "prefix": session.directory.name, "patience": WANDB_SECONDS})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._skip:
            self._send({"step": step, **numbers})

    def _send(self, record: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(record) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError(self._failure()) from None

    def _failure(self) -> str:
        """The last line that the process wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with status {self._process.returncode}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            status = self._process.wait(WANDB_SECONDS)
        except subprocess.TimeoutExpired:
            self.abandon()
            raise RuntimeError(f"its process did not finish in {WANDB_SECONDS:g} seconds") from None
        if status:
            raise RuntimeError(self._failure())

    def abandon(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


TRACKERS: dict[str, Callable[[Session], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_trackers(names: Sequence[str], wandb_mode: str, workdir: AnyPath) -> None:
    """`UserError` for a tracker that is unknown or not installed, or W&B's whose files would be lost."""
    for i, name in enumerate(names):
        if name not in TRACKERS:
            raise ConfigError(f"config.log.trackers[{i}] is '{name}'. {did_you_mean(name, list(TRACKERS))}")
    if "wandb" not in names or wandb_mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
        raise UnsupportedError(
            "config.log.trackers has wandb, which is not installed: pip install 'pe-lab[wandb]', or leave it out."
        )
    if wandb_mode == "offline" and is_remote(workdir):
        raise ConfigError(
            f"config.log.wandb.mode is 'offline', and the workdir '{workdir}' is in an object store, where "
            "W&B writes no files. Use mode=online, or a local workdir."
        )


def open_trackers(session: Session, show: Callable[[str], None]) -> list[Background]:
    """The trackers of `log.trackers`, each on its own thread; `show` prints a line."""
    log = session.config.log
    names = [n for n in log.trackers if not (n == "wandb" and log.wandb.mode == "disabled")]
    return [Background(name, lambda name=name: TRACKERS[name](session), show) for name in dict.fromkeys(names)]

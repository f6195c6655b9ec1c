"""The ledger of a run's time: every second of its life, over all of its starts, is in one bucket.

`ledger.jsonl` has a record for every few seconds of the life of a process, or of a call of `pe_lab.fit`. Each holds
the seconds by bucket since the record before it, so that their sum is the time that has passed, and a process that is
killed loses the last few seconds: they count as `down`, with the time until the next start.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.storage import AnyPath, AppendedLog, json_object, read_log
from pe_lab.storage.run_files import whole_records

BUCKETS = (
    "start_up",  # from the creation of the process to the loop, and between phases
    "compile",  # the first step, which compiles
    "data_wait",
    "step",
    "validation",
    "suites",  # measured inside training
    "save_blocking",  # the loop waits for a checkpoint
    "restore",
    "replayed_steps",  # trained before, by an earlier start or before a rewind
    "down",  # no process
)
RECORD_SECONDS = 2.0


def process_age() -> float:
    """The seconds since this process was created; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        created = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - created)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


class Ledger:
    """The time of a run in this process, from `age` seconds ago on.

    Once it is open, a thread appends a record every `RECORD_SECONDS`. The path of the file may be set until then;
    without one nothing is written.
    """

    def __init__(self, path: AnyPath | None = None, age: float = 0.0):
        self.path, self._lock, self._done = path, threading.RLock(), threading.Event()
        self._created, self._mark = time.time() - age, time.monotonic() - age
        self._bucket = "start_up"
        self._seconds: Counter[str] = Counter()
        self._log: AppendedLog | None = None
        self._phase, self._step = "", 0
        self.start = 0  # the number of this start of the run, from 1; 0: nothing was written
        self._reached: dict[str, int] = {}  # the highest step by phase, of this start and the earlier ones

    def open(self) -> None:
        """Begins to write, from the start on: there is something to train."""
        if self.path is None or self._log is not None:
            return
        records = read_ledger(self.path)
        for record in records:
            phase, step = record.get("phase", ""), record.get("step", 0)
            self._reached[phase] = max(step, self._reached.get(phase, 0))
        self.start = 1 + max((record["start"] for record in records), default=0)
        self._log = AppendedLog(self.path, waits=True)
        self.write()
        self._thread = threading.Thread(target=self._record_regularly, name="ledger", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def time(self, bucket: str) -> Iterator[None]:
        """Counts the time of the block as `bucket`."""
        with self._lock:
            before = self._switch(bucket)
        try:
            yield
        finally:
            with self._lock:
                self._switch(before)

    def reached(self, phase: str, step: int) -> None:
        """Tells that an earlier start has trained up to a step of a phase; its last record may be older."""
        with self._lock:
            self._reached[phase] = max(step, self._reached.get(phase, 0))

    def begin_step(self, phase: str, step: int) -> None:
        """The time from now on is that of a step of a phase, as far as no block says otherwise."""
        with self._lock:
            replayed = step <= self._reached.get(phase, 0)
            self.reached(phase, step)
            self._phase, self._step = phase, step
            self._switch("replayed_steps" if replayed else "step")

    def end_steps(self) -> None:
        """The time from now on is `start_up` of what comes next: another phase, or a rewind."""
        with self._lock:
            self._switch("start_up")
        self.write()

    def write(self) -> None:
        """Appends the time since the last record."""
        with self._lock:
            if self._log is None:
                return
            self._switch(self._bucket)
            record = {"start": self.start, "time": round(time.time(), 3), "created": round(self._created, 3)}
            if self._phase:
                record |= {"phase": self._phase, "step": self._step}
            seconds = {bucket: round(self._seconds[bucket], 6) for bucket in BUCKETS if self._seconds[bucket]}
            self._seconds.clear()
            self._log.append({**record, "seconds": seconds})

    def close(self) -> None:
        """Writes what is left."""
        if self._log is not None:
            self._done.set()
            self._thread.join()
            self.write()
            self._log.close()
            self._log = None

    def _switch(self, bucket: str) -> str:
        now, before = time.monotonic(), self._bucket
        self._seconds[before] += now - self._mark
        self._mark, self._bucket = now, bucket
        return before

    def _record_regularly(self) -> None:
        while not self._done.wait(RECORD_SECONDS):
            self.write()


def read_ledger(path: AnyPath) -> list[dict[str, Any]]:
    """The records of a ledger; lines that are none are passed over."""
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError):
        lines = read_log(path).splitlines()
    return whole_records([json_object(line) or {} for line in lines if line.strip()])


@dataclass(frozen=True)
class Balance:
    """The seconds of a run by bucket: of each start, with the time `down` before it."""

    starts: tuple[dict[str, float], ...]

    @property
    def seconds(self) -> dict[str, float]:
        """The sums over all starts, in the order of `BUCKETS`."""
        return {bucket: sum(start.get(bucket, 0.0) for start in self.starts) for bucket in BUCKETS}

    @property
    def wall(self) -> float:
        """From the creation of the first process to the last record."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The part of the wall time in which steps were trained for the first time."""
        return self.seconds["step"] / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        """`12.3 h in 3 starts, goodput 91.2%: step 91.2%, validation 4.0%, ...`."""
        wall, parts = self.wall, sorted(self.seconds.items(), key=lambda part: -part[1])
        shares = ", ".join(
            f"{bucket.replace('_', ' ')} {seconds / wall:.1%}" for bucket, seconds in parts if seconds >= wall / 1000
        )
        size, unit = (wall / 3600, "h") if wall >= 3600 else (wall, "s")
        count = len(self.starts)
        return f"{size:.1f} {unit} in {count} start{'s' * (count > 1)}, goodput {self.goodput:.1%}: {shares}"


def balance(records: Sequence[Mapping[str, Any]]) -> Balance:
    """The balance of the records of a ledger."""
    starts: dict[int, Counter[str]] = {}
    last: float | None = None  # the time of the record before
    for record in records:
        if record["start"] not in starts:
            starts[record["start"]] = Counter()
            if last is not None:
                starts[record["start"]]["down"] = max(0.0, record["created"] - last)
        for bucket, seconds in record["seconds"].items():
            if bucket in BUCKETS:
                starts[record["start"]][bucket] += seconds
        last = record["time"]
    return Balance(tuple(dict(start) for start in starts.values()))

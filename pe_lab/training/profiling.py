"""Where the time of a step goes: what the loop waits for, and traces of steps for XProf."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from pe_lab.errors import ConfigError
from pe_lab.storage import AnyPath, write_file
from pe_lab.training.ledger import Ledger

# What the loop waits for. The rest of a step's time is the host's own: starting programs and writing logs.
WAITS = ("device", "input", "validation", "checkpoint")
_BUCKETS = {"input": "data_wait", "validation": "validation", "checkpoint": "save_blocking"}  # of the ledger


class StepTimes:
    """The seconds that the loop has waited, by what it waited for.

    The loop starts a step before it waits for the metrics of the step before. As long as it waits for the device, the
    device has work, and the time of a step is the time of its computation; otherwise the device idles.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._waited: Counter[str] = Counter()
        self._ledger = ledger or Ledger()

    @contextlib.contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Counts the time of the block as waiting for one of `WAITS`, and names it in a trace."""
        start = time.perf_counter()
        bucket = _BUCKETS.get(what)
        with (
            jax.profiler.TraceAnnotation(f"wait for {what}" if what in ("device", "input") else what),
            self._ledger.time(bucket) if bucket else contextlib.nullcontext(),
        ):
            yield
        self._waited[what] += time.perf_counter() - start

    def dispatch(self) -> contextlib.AbstractContextManager[None]:
        """The context in which to start a step. On a CPU, XLA may compute it in this thread: the time of the device."""
        return self.wait("device") if jax.default_backend() == "cpu" else contextlib.nullcontext()

    def split(self, steps: int, seconds: float) -> dict[str, float]:
        """Seconds of one step by part, of `steps` that took `seconds` since the previous call: WAITS and host."""
        parts = {what: self._waited[what] / steps for what in WAITS}
        self._waited.clear()
        return parts | {"host": max(0.0, seconds / steps - sum(parts.values()))}


class Profiler:
    """Traces some steps of a command for XProf, with the memory of the devices after them.

    Every process writes its own files to PHASE/tensorboard/plugins/profile/step_FIRST in the run's directory: a
    .xplane.pb, and a .memory.prof for pprof.

    Attributes:
      steps: which steps to trace, of those that the command trains, from 1; it may have none.
      trained: the steps that the command has begun.
    """

    def __init__(self, steps: range = range(0)):
        self.steps, self.trained, self._session = steps, 0, ""
        self._local: Path | None = None  # while it traces

    def begin(self, step: int) -> jax.profiler.StepTraceAnnotation:
        """Before a step of the phase; the result is the context in which to dispatch it."""
        self.trained += 1
        if self.steps and self.trained == self.steps.start:
            self._local, self._session = Path(tempfile.mkdtemp(prefix="pe_lab_profile_")), f"step_{step}"
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions, of which a step has very many
            jax.profiler.start_trace(self._local, profiler_options=options)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, metrics: Any, directory: AnyPath) -> str:
        """After a step of the phase of `directory`: says where the trace is after the last one, else ""."""
        if self._local is None or self.trained < self.steps.stop - 1:
            return ""
        jax.block_until_ready(metrics)
        return self.close(directory)

    def close(self, directory: AnyPath) -> str:
        """Writes the trace, also one that the end of the phase has cut short; "" if there is none."""
        if self._local is None:
            return ""
        jax.profiler.stop_trace()
        target = directory / "tensorboard" / "plugins" / "profile" / self._session
        name = f"{socket.gethostname()}.{jax.process_index()}"  # several processes may share a host
        jax.profiler.save_device_memory_profile(str(self._local / "memory.prof"))
        for file, ending in (
            (next(self._local.rglob("*.xplane.pb")), "xplane.pb"),
            (self._local / "memory.prof", "memory.prof"),
        ):
            write_file(target / f"{name}.{ending}", file.read_bytes())
        shutil.rmtree(self._local)
        self._local = None
        return (
            f"profile: {target}; look at it with `xprof --logdir={directory / 'tensorboard'}` (pip install xprof), at "
            f"the memory with `pprof -top {target / name}.memory.prof`"
        )


def parse_steps(text: str) -> range:
    """The steps that `--profile=10:13` names, both ends included.

    Raises:
      ConfigError: it is no such pair.
    """
    found = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(
            f"--profile={text}: write the first and the last step to trace, as in --profile=10:13, of the steps that "
            "this command trains, from 1."
        )
    return range(int(found[1]), int(found[2]) + 1)

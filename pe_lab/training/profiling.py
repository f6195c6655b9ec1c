"""Traces of steps for XProf."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import jax

from pe_lab.errors import ConfigError
from pe_lab.storage import AnyPath, write_file


class Profiler:
    """Traces some steps of a command for XProf, with the memory of the devices after them.

    Every process writes a .xplane.pb, and a .memory.prof for pprof, to PHASE/tensorboard/plugins/profile/step_FIRST.
    The `steps` to trace, if any, are of those that the command trains, from 1.
    """

    def __init__(self, steps: range = range(0)):
        self.steps, self._session = steps, ""
        self.trained = 0  # the steps that the command has begun
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
    """The steps that `--profile=10:13` names, both ends included. Raises `ConfigError`: it is no such pair."""
    found = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(
            f"--profile={text}: write the first and the last step to trace, as in --profile=10:13, of the steps that "
            "this command trains, from 1."
        )
    return range(int(found[1]), int(found[2]) + 1)

"""The memory of one chip that the compiler assigns to a program."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pe_lab.errors import excerpt


@dataclass(frozen=True)
class Compiled:
    """Bytes per chip of a compiled program. `aliased` outputs share the memory of arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int
    seconds: float

    @property
    def needed(self) -> int:
        """The larger of the compiler's peak and the sum of the parts: each omits something."""
        return max(self.peak, self.arguments + self.outputs - self.aliased + self.temporaries + self.code)


# libtpu 0.0.51 writes "... (32.57G) exceeds available HBM (15.75G)", earlier ones "Used 32.57G of 15.75G hbm".
_REFUSALS = (
    r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)",
    r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm",
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(Exception):
    """The compiler found no layout that fits the chip. `used` and `capacity` in bytes; None if it gave no numbers."""

    def __init__(self, message: str):
        super().__init__(excerpt(message.splitlines()[0]))
        self.used = self.capacity = None
        for pattern in _REFUSALS:
            if found := re.search(pattern, message):
                used, used_unit, capacity, unit = found.groups()
                self.used, self.capacity = int(float(used) * _UNITS[used_unit]), int(float(capacity) * _UNITS[unit])
                break


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, and the compiler's notes on its buffers; "" where it writes none."""

    text: str
    assignment: str = ""
    live_ranges: str = ""


def analyze(lowered: Any, start: float) -> Compiled:
    """Compiles a lowered program; `seconds` counts from `start`, of `time.perf_counter`.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    return _memory(_compile(lowered), start)


def analyze_program(lowered: Any, start: float, dump: bool) -> tuple[Compiled, Program]:
    """As `analyze`, with the program; with `dump`, from the files that the compiler of TPUs can write.

    Some programs of libtpu 0.0.51 have no `as_text` in jaxlib 0.10.2, and only the files have the buffers.
    """
    if not dump:
        compiled = _compile(lowered)
        return _memory(compiled, start), Program(compiled.as_text())
    with tempfile.TemporaryDirectory(prefix="pe_lab_plan_") as directory:
        memory = _memory(_compile(lowered, {"xla_dump_to": directory}), start)

        def text(ending: str) -> str:
            """The largest file: other programs, of parts of this one, are dumped too."""
            files = sorted(Path(directory).glob(f"*{ending}"), key=lambda path: path.stat().st_size)
            return files[-1].read_text() if files else ""

        program = text("after_codegen.txt") or text("after_optimizations.txt")
        return memory, Program(program, text("after_optimizations-buffer-assignment.txt"), text("live-range.txt"))


def _compile(lowered: Any, options: dict[str, str] | None = None) -> Any:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error)) from None


def _memory(compiled: Any, start: float) -> Compiled:
    analysis = compiled.memory_analysis()
    return Compiled(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        peak=getattr(analysis, "peak_memory_in_bytes", 0),
        seconds=time.perf_counter() - start,
    )

"""Shared by the parts of `attention.py`: measured turns, the peer, tables, and the repeats of a turn."""

from __future__ import annotations

import base64
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from attention_cases import TOLERANCE, Case
from train_step import Peer

from pe_lab.errors import UserError

HERE = Path(__file__).resolve().parent


class Spent(NamedTuple):
    """The mean time of a call in a turn: seconds, and processor seconds."""

    seconds: float
    cpu: float


Turn = Callable[[], Spent]


@dataclass
class Plan:
    """The settings of a measurement, without its shapes.

    Attributes:
      rounds: turns of each side.
      turn: seconds that a turn should take; 0: one call.
      timed: measure times, not only errors.
      tiny: kernels are interpreted, so that times are meaningless.
      peer: torch's process.
      backends: of torch (`attention_peer.py`).
      only: measure only rows whose names contain one of these; empty: all rows.
    """

    rounds: int = 5
    turn: float = 0.05
    timed: bool = True
    tiny: bool = False
    peer: TorchPeer | None = None
    backends: Sequence[str] = ()
    only: Sequence[str] = ()

    def wants(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)


@dataclass
class Table:
    """A table with its header first, a title and notes."""

    title: str
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))]
        # Names to the left, numbers to the right.
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in self.rows
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines), *self.notes])

    def markdown(self) -> str:
        head, *rows = ("| " + " | ".join(row) + " |" for row in self.rows)
        rule = "|---|" + "---:|" * (len(self.rows[0]) - 1)
        return "\n\n".join([f"**{self.title}**", "\n".join([head, rule, *rows]), *self.notes])


class TorchPeer(Peer):
    """torch's attention in a subprocess."""

    def __init__(self, python: str, job: dict[str, Any], at: Path):
        self.name, self.log = "torch", at / "attention_peer.log"
        self.process = subprocess.Popen(
            [python, str(HERE / "attention_peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        ready = self.ask(job)
        self.versions, self.parameters = ready["versions"], ready.get("parameters", 0)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer; `UserError` with what the peer could not do. The peer lives on."""
        answer = self._ask(message)
        if "error" in answer:
            raise UserError(f"torch: {answer['error']}")
        return answer

    def run(self, steps: int) -> dict[str, Any]:
        return self.ask({"steps": steps})

    def rows(self, case: Case, how: str, rows: Sequence[int], what: str = "out") -> np.ndarray:
        """[B, rows, H, K] float32: outputs of some queries, or `what`="gradient": theirs, the output's being them; with
        "table gradient", that of a bias, [H, rows], at these distances."""
        answer = self.ask({"do": "rows", "case": case, "how": how, "rows": list(rows), "what": what})
        shape = (case.H, len(rows)) if what == "table gradient" else (case.B, len(rows), case.H, case.K)
        return np.frombuffer(base64.b64decode(answer["rows"]), np.float32).reshape(shape)

    def turn(self, case: Case, how: str, what: str, seconds: float, layers: int = 1) -> Turn:
        """`what`: forward, backward or biased (with the forward pass), or decode (through `layers` caches)."""
        asked = {"do": "time", "case": case, "how": how, "what": what, "turn": seconds, "layers": layers}
        self.ask(asked)  # compiles, and finds out how many calls fill a turn
        return lambda: Spent(**self.ask(asked))


def turn_of(call: Callable[[], Any], seconds: float) -> Turn:
    """Turns of a jitted function: calls one after the other, of which the last is waited for."""

    def run(calls: int) -> Spent:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return Spent((time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls)

    if seconds == 0:
        run(1)
        return lambda: run(1)
    run(1)
    once = min(run(1), run(1)).seconds
    calls = max(1, min(1000, math.ceil(seconds / once)))
    return lambda: run(calls)


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Spent]]:
    """The turns of each side: every side once a round, in an order that changes from round to round."""
    found: dict[str, list[Spent]] = {name: [] for name in turns}
    names = list(turns)
    for i in range(rounds):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            found[name].append(turns[name]())
    return found


def summary(spent: Sequence[Spent], calls: int = 1) -> dict[str, Any]:
    """The median turn, the best, and all of them, by what one of so many `calls` took; processor seconds apart."""
    seconds, cpu = ([x / calls for x in each] for each in zip(*spent, strict=True))
    return {
        "seconds": statistics.median(seconds),
        "best": min(seconds),
        "cpu": statistics.median(cpu),
        "turns": seconds,
        "cpu_turns": cpu,
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """`over` by `under`, turn for turn: the median, the lowest, the highest."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each)}


def reason(failure: Exception) -> str:
    """The first line of what went wrong, for a table."""
    if isinstance(failure, AssertionError):
        raise failure
    told = f"{failure}".strip().splitlines() or [type(failure).__name__]
    return told[0][:160]


class Contestant(NamedTuple):
    """`call` without arguments does the work once; `check` says how far off it is."""

    call: Callable[[], Any]
    check: Callable[[], float]


def compare(
    case: Case,
    plan: Plan,
    what: str,
    ours: dict[str, Contestant],
    torch_is_off: Callable[[str], float],
    layers: int = 1,
) -> dict[str, dict[str, Any]]:
    """One row a contestant, torch's backends included: `error`, then its `summary`, or `failure`, which says why not.

    Args:
      what: forward, backward, biased or decode. A call goes through so many `layers`; times are those of one.
      torch_is_off: the error of a backend of torch.
    """
    tell(f"  {what}: {case}")
    rows: dict[str, dict[str, Any]] = {}
    turns = {}
    for name in [*ours, *(f"torch {how}" for how in plan.backends if plan.peer)]:
        if not plan.wants(name):
            continue
        row, how = rows.setdefault(name, {}), name.removeprefix("torch ")
        try:
            row["error"] = ours[name].check() if name in ours else torch_is_off(how)
            if not row["error"] < TOLERANCE[case.dtype]:
                row["failure"] = f"WRONG: off by {row['error']:.2g}"
            elif plan.timed and name in ours:
                turns[name] = turn_of(ours[name].call, plan.turn)
            elif plan.timed:
                turns[name] = plan.peer.turn(case, how, what, plan.turn, layers)
        except Exception as failure:  # a library that does not take these shapes; the others still do
            row["failure"] = reason(failure)
    for name, spent in measure(turns, plan.rounds).items():
        rows[name] |= summary(spent, layers)
    return rows


def tell(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many figures, or a dash for None."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if decimals < 7 else f"{value:.1e}"

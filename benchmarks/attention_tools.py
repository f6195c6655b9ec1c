"""What the parts of `attention.py` share: turns, the peer, tables, and how many repeats a turn takes."""

from __future__ import annotations

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
from attention_cases import TOLERANCE, Case
from train_step import Peer

from pe_lab.config import UserError

HERE = Path(__file__).resolve().parent
Turn = Callable[[], float]  # seconds of one call, the mean of a turn of several


@dataclass
class Plan:
    """What a measurement is to do, beside its shapes.

    Attributes:
      rounds: turns of each side.
      turn: seconds that a turn should take; 0: one call.
      timed: otherwise only errors are looked at.
      tiny: kernels are interpreted, and times mean nothing.
      peer: torch's process.
      backends: of torch (`attention_peer.py`).
      only: rows whose names have one of these in them; none: all. Ratios of what is left out are left out.
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
    """Rows of text, headings first, with what is to be said above and below."""

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

    def rows(self, case: Case, how: str, rows: Sequence[int], what: str = "out") -> list[Any]:
        return self.ask({"do": "rows", "case": case, "how": how, "rows": list(rows), "what": what})["rows"]

    def turn(self, case: Case, how: str, what: str, seconds: float, layers: int = 1) -> Turn:
        """`what`: forward, backward (with the forward pass) or decode (through `layers` caches)."""
        asked = {"do": "time", "case": case, "how": how, "what": what, "turn": seconds, "layers": layers}
        self.ask(asked)  # compiles, and finds out how many calls fill a turn
        return lambda: self.ask(asked)["seconds"]


def turn_of(call: Callable[[], Any], seconds: float) -> Turn:
    """Turns of a jitted function: calls one after the other, of which the last is waited for."""

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    if seconds == 0:
        run(1)
        return lambda: run(1)
    run(1)
    once = min(run(1), run(1))
    calls = max(1, min(1000, math.ceil(seconds / once)))
    return lambda: run(calls)


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side's turns: every side once a round, each round beginning with another."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for i in range(rounds):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            found[name].append(turns[name]())
    return found


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """The median turn, the best, the worst, and all of them."""
    return {
        "seconds": statistics.median(seconds),
        "best": min(seconds),
        "worst": max(seconds),
        "turns": list(seconds),
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """`over`'s time by `under`'s, turn for turn: the median, the lowest, the highest."""
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
    """One row a contestant, torch's backends included: `error`, then its turns, or `failure`, which says why not.

    Args:
      what: forward, backward or decode; of so many `layers`.
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
    for name, seconds in measure(turns, plan.rounds).items():
        rows[name] |= summary(seconds)
    return rows


def tell(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None, digits: int = 3) -> str:
    """So many figures, or a dash for what there is not."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if decimals < 7 else f"{value:.1e}"


def judged(what: str, value: float, target: float) -> str:
    """A line that holds a number against its target."""
    return f"{what}: {value:.3f}, target {target}: {'reached' if value >= target else 'MISSED'}"

"""Part of `attention.py`: what was measured of an accelerator's kernels, as tables with ratios and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attention_cases import Case
from attention_kernels import OURS
from attention_tools import Table, number

Rows = dict[str, dict[str, Any]]  # of one case, by name
# Targets: the dispatcher over the best it could take; ours over cuDNN from FROM tokens on; decoding over a copy.
DISPATCHER, OURS_OVER_CUDNN, FROM, DECODE = 0.98, 0.7, 8192, 0.7
CHOICES = (OURS, "cudnn", "tokamax", "chunked")  # what the dispatcher could take
TORCH = ("torch flash", "torch cudnn")


def speedup(rows: Rows, over: Sequence[str], under: Sequence[str]) -> float | None:
    """How many times as fast the fastest of some rows is as the fastest of others; None where there is no time."""
    best = [
        min((rows[name]["seconds"] for name in names if "seconds" in rows.get(name, {})), default=None)
        for names in (under, over)
    ]
    return None if None in best else best[0] / best[1]


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """What did not run or was wrong, and on what; each reason once."""
    told: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, row in result["rows"].items():
            if "failure" in row:
                told.setdefault((name, row["failure"]), []).append(f"{result['case']['S']:,}")
    return [f"{name} at {', '.join(dict.fromkeys(at))} tokens: {why}" for (name, why), at in told.items()]


def wrong(results: Sequence[dict[str, Any]]) -> bool:
    """Whether anything gave another result than it should."""
    return any(row.get("failure", "").startswith("WRONG") for result in results for row in result["rows"].values())


def errors(results: Sequence[dict[str, Any]]) -> str:
    """The largest error of each row."""
    found: dict[str, float] = {}
    for result in results:
        for name, row in result["rows"].items():
            if "error" in row:
                found[name] = max(found.get(name, 0.0), row["error"])
    return "Largest relative errors: " + "; ".join(f"{name} {value:.1e}" for name, value in found.items()) + "."


def judged(what: str, values: Sequence[float | None], target: float) -> list[str]:
    """A line that compares the lowest of some numbers with their target; no line if there are no numbers."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return []
    return [
        f"{what}: {min(numbers):.3f} at worst, target {target}: {'reached' if min(numbers) >= target else 'MISSED'}."
    ]


class _Columns:
    """A table with a column for every result; `add` leaves its numbers in the results, too."""

    def __init__(self, results: Sequence[dict[str, Any]], heads: Sequence[str], first: str):
        self.results, self.rows = results, [[first, *heads]]

    def add(self, name: str, value: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
        values = [value(result) for result in self.results]
        for result, found in zip(self.results, values, strict=True):
            result.setdefault("numbers", {})[name] = found
        if any(x is not None for x in values):
            self.rows.append([name, *map(number, values)])
        return values

    def add_all(self, value: Callable[[dict[str, Any], dict[str, Any]], float]) -> None:
        """A line for every name that was timed."""
        for name in dict.fromkeys(name for result in self.results for name in result["rows"]):
            self.add(
                name, lambda r, name=name: value(r, r["rows"][name]) if "seconds" in r["rows"].get(name, {}) else None
            )


def flops_table(title: str, results: list[dict[str, Any]], factor: float, matmul: float, tiny: bool) -> Table:
    """TFLOP/s of every row, a column a case, and the ratios that have targets.

    Args:
      results: each {"case", "auto": what the dispatcher took, "rows"}.
      factor: FLOPs over those of the forward pass.
      matmul: FLOP/s of the device in a product of matrices.
    """

    def rate(result: dict[str, Any], row: dict[str, Any]) -> float:
        return factor * Case(**result["case"]).flops / row["seconds"] / 1e12

    table = _Columns(results, [f"{r['case']['S']:,}" for r in results], "tokens")
    table.add_all(rate)
    # Cases below the smallest length of interest are there for their errors.
    timed = [r for r in results if tiny or r["case"]["S"] >= 1024]
    chosen = table.add("auto / best", lambda r: speedup(r["rows"], ["auto"], CHOICES))
    table.add("auto / torch's best", lambda r: speedup(r["rows"], ["auto"], TORCH))
    over = table.add(f"{OURS} / cudnn", lambda r: speedup(r["rows"], [OURS], ["cudnn"]))
    apart = [f"{name}, heads rotate differently" for name in (OURS, "cudnn")]
    table.add(f"{apart[0]} / cudnn's", lambda r: speedup(r["rows"], apart[:1], apart[1:]))
    table.add(
        "best / matrix product",
        lambda r: max((rate(r, row) * 1e12 / matmul for row in r["rows"].values() if "seconds" in row), default=None),
    )
    took = ", ".join(dict.fromkeys(r["auto"] for r in timed))
    notes = [f"auto takes {took}. {errors(results)}"]
    if not tiny:
        notes += judged("auto / best", [x for x, r in zip(chosen, results, strict=True) if r in timed], DISPATCHER)
        long = [x for x, r in zip(over, results, strict=True) if r["case"]["S"] >= FROM]
        notes += judged(f"{OURS} / cudnn from {FROM:,} tokens on", long, OURS_OVER_CUDNN)
    return Table(title, table.rows, notes + failures(results))


def gradient_table(title: str, results: list[dict[str, Any]]) -> Table:
    """TFLOP/s of the forward and the backward pass, a column a case, and what a bias by distance costs.

    Args:
      results: each {"case", "rows"}.
    """

    def rate(result: dict[str, Any], row: dict[str, Any]) -> float:
        return 3.5 * Case(**result["case"]).flops / row["seconds"] / 1e12

    table = _Columns(results, [f"{r['case']['S']:,}" for r in results], "tokens")
    table.add_all(rate)
    names = dict.fromkeys(name for result in results for name in result["rows"] if name.startswith(f"{OURS},"))
    for name in names:
        table.add(f"{name} / without", lambda r, name=name: speedup(r["rows"], [name], [OURS]))
    for peer in ("cudnn", "chunked"):
        table.add(f"{OURS} / {peer}", lambda r, peer=peer: speedup(r["rows"], [OURS], [peer]))
    biased = [f"{name}, a bias for every distance" for name in (OURS, "chunked")]
    table.add(f"{biased[0]} / chunked's", lambda r: speedup(r["rows"], biased[:1], biased[1:]))
    return Table(title, table.rows, [errors(results), *failures(results)])


def decode_table(title: str, results: list[dict[str, Any]], copy: float, auto: str, tiny: bool) -> Table:
    """GB/s of reading the cache once, for one query per sequence, and the ratio of the dispatcher's choice to a copy.

    Args:
      results: each {"case", "rows"}.
      copy: bytes/s of the device in a copy.
      auto: what the dispatcher takes.
    """

    def rate(result: dict[str, Any], row: dict[str, Any]) -> float:
        return Case(**result["case"]).cache_bytes / row["seconds"] / 1e9

    table = _Columns(results, [f"{r['case']['B']} x {r['case']['S']:,}" for r in results], "texts x cache")
    table.add_all(rate)
    table.add("auto / torch's best", lambda r: speedup(r["rows"], [auto], TORCH))

    def of_copy(result: dict[str, Any], name: str) -> float | None:
        row = result["rows"].get(name, {})
        return rate(result, row) * 1e9 / copy if "seconds" in row else None

    shares = {
        name: table.add(f"{name} / copy", lambda r, name=name: of_copy(r, name)) for name in dict.fromkeys((auto, OURS))
    }
    notes = [f"auto takes {auto}. {errors(results)}"]
    if not tiny:
        notes += judged(f"{auto} / copy", shares[auto], DECODE)
    return Table(title, table.rows, notes + failures(results))

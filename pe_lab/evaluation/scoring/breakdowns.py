"""What a mean hides: scores by the depth of needles, and by the length of texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pe_lab.results.intervals import mean_of
from pe_lab.results.samples import SampleRecord


def by_depth(lines: Sequence[SampleRecord]) -> dict[str, list[Any]]:
    """The share of needles found at each depth, in steps of ten per cent, or the grid's own where it is finer."""
    pairs = [(depth, hit) for line in lines for depth, hit in zip(line["depth"], line["found"], strict=True)]
    asked = sorted({depth for depth, _ in pairs})
    places = asked if len(asked) <= 11 else [float(place) for place in range(0, 101, 10)]
    hits: dict[float, list[float]] = {place: [] for place in places}
    for depth, hit in pairs:
        hits[min(places, key=lambda place: abs(place - depth))].append(hit)
    return {
        "depth": places,
        "score": [math.fsum(found) / len(found) if found else None for found in hits.values()],
        "count": [len(found) for found in hits.values()],
    }


LENGTH_EDGES = (0, 4096, 8192, 16384, 32768, 65536, 131072)  # DroPE, Tables 8 and 9, and on


def by_length(lines: Sequence[SampleRecord], record_edges: Sequence[int] | None = None) -> dict[str, Any]:
    """Scores by the tokens of the whole prompt, before anything was cut off it; each bucket without its upper edge.

    Args:
      record_edges: by the lengths that the records themselves tell instead (LongBench-E: words, or characters).
    """
    if record_edges is None:
        sizes, known = [line["facts"].get("tokens_before_truncation") or line["tokens"] for line in lines], LENGTH_EDGES
    else:
        sizes, known = [line["facts"]["record_length"] for line in lines], tuple(record_edges)
    edges = list(known[: max(2, sum(edge <= max(sizes) for edge in known) + 1)])
    if max(sizes) >= edges[-1]:
        edges.append(max(sizes) + 1)
    parts = [
        mean_of([line["score"] for line, n in zip(lines, sizes, strict=True) if low <= n < high])
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    return {
        "edges": edges,
        "of": "tokens" if record_edges is None else "words",
        "score": [part.score if part else None for part in parts],
        "low": [part.low if part else None for part in parts],
        "high": [part.high if part else None for part in parts],
        "count": [part.count if part else 0 for part in parts],
    }

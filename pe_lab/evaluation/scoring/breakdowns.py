"""Scores by the depth of needles, and by the length of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pe_lab.results.records import SampleRecord
from pe_lab.results.statistics import mean_of


def by_depth(records: Sequence[SampleRecord]) -> dict[str, list[Any]]:
    """The share of needles found at each depth: of the records' own depths, or in steps of ten per cent if over 11."""
    pairs = [(depth, hit) for record in records for depth, hit in zip(record["depth"], record["found"], strict=True)]
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


LENGTH_EDGES = (0, 4096, 8192, 16384, 32768, 65536, 131072)  # DroPE, Tables 8 and 9, extended


def by_length(records: Sequence[SampleRecord], record_edges: Sequence[int] | None = None) -> dict[str, Any]:
    """Mean scores by the tokens of the prompt before truncation; each bucket excludes its upper edge.

    Args:
      record_edges: edges by the `record_length` of the source's records instead (LongBench-E: words, or characters).
    """
    if record_edges is None:
        sizes, known = [r["metadata"].get("tokens_before_truncation") or r["tokens"] for r in records], LENGTH_EDGES
    else:
        sizes, known = [r["metadata"]["record_length"] for r in records], tuple(record_edges)
    edges = list(known[: max(2, sum(edge <= max(sizes) for edge in known) + 1)])
    if max(sizes) >= edges[-1]:
        edges.append(max(sizes) + 1)
    parts = [
        mean_of([r["score"] for r, n in zip(records, sizes, strict=True) if low <= n < high])
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    return {
        "edges": edges,
        "of": "tokens" if record_edges is None else "words",
        "score": [part.mean if part else None for part in parts],
        "low": [part.low if part else None for part in parts],
        "high": [part.high if part else None for part in parts],
        "count": [part.count if part else 0 for part in parts],
    }

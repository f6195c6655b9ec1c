"""The buffers of a compiled TPU program at the moment of its largest memory, from what the compiler dumps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pe_lab.planning.hlo import Instruction, Module

_VALUE = re.compile(r"value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\})?:(\d+)-(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Buffer:
    """Bytes of one buffer, its shape, and where in the source its contents are computed."""

    bytes: int
    shape: str
    source: str


class _Live(NamedTuple):
    first: int
    last: int
    bytes: int
    offset: int
    name: str
    shape: str


def largest_buffers(assignment: str, live_ranges: str, module: Module, count: int = 12) -> list[Buffer]:
    """The largest temporaries that are alive at the peak, the largest first.

    Args:
      assignment: the text of *buffer-assignment.txt.
      live_ranges: the text of *live-range.txt.
    """
    allocations = re.split(r"^allocation ", assignment, flags=re.MULTILINE)[1:]
    heaps = [one for one in allocations if "preallocated-temp" in one.partition("\n")[0] and " color " not in one[:60]]
    if not heaps or "BufferLiveRange" not in live_ranges:
        return []
    heap = max(heaps, key=lambda one: int(re.search(r"size (\d+)", one)[1]))
    text = live_ranges.partition("BufferLiveRange")[2].partition("Live ranges at")[0]
    ranges = {name + (index or "{}"): (int(a), int(b)) for name, index, a, b in _RANGE.findall(text)}
    alive = []
    for name, size, offset, shape in _VALUE.findall(heap):
        key = name if name.endswith("}") else name + "{}"
        if key in ranges:
            alive.append(_Live(*ranges[key], int(size), int(offset), key, shape))
    at_peak = _at_peak(alive)
    distinct = {one.offset: one for one in sorted(at_peak, key=lambda one: one.bytes)}
    ordered = sorted(distinct.values(), key=lambda one: -one.bytes)[:count]
    return [Buffer(one.bytes, one.shape.partition("{")[0], _source(module, one.name)) for one in ordered]


def _at_peak(values: Sequence[_Live]) -> list[_Live]:
    """The values that are alive at the moment when their addresses cover most."""

    def covered(time: int) -> int:
        total, end = 0, 0
        for one in sorted((v for v in values if v.first <= time <= v.last), key=lambda v: v.offset):
            total += max(0, one.offset + one.bytes - max(end, one.offset))
            end = max(end, one.offset + one.bytes)
        return total

    peak = max({one.first for one in values}, key=covered, default=0)
    return [one for one in values if one.first <= peak <= one.last]


def _source(module: Module, value: str) -> str:
    """Where a value such as `fusion.3{}` or `while.75{6}` is computed."""
    name, _, index = value.partition("{")
    for names in module.by_name.values():
        if name not in names:
            continue
        one = names[name]
        place = index.rstrip("}").partition(",")[0]
        if one.opcode in ("while", "parameter") and place.isdigit():
            return _carried(module, one, int(place))
        return module.source(one)
    return ""


def _carried(module: Module, one: Instruction, place: int) -> str:
    """Where the array at `place` of a loop's state is computed: in its body, or before it."""
    if one.opcode == "while":
        body = re.search(r"body=%?([\w.\-]+)", one.text)[1]
    else:
        body = next((name for name, names in module.by_name.items() if names.get(one.name) is one), "")
    names = module.by_name.get(body, {})
    root = next((each for each in names.values() if each.is_root), None)
    if root is None or root.opcode != "tuple" or place >= len(root.operands):
        return ""
    found = names.get(root.operands[place])
    while found is not None and found.opcode in ("get-tuple-element", "bitcast", "copy", "copy-done", "copy-start"):
        found = names.get(found.operands[0]) if found.operands else None
    if found is None or found.opcode == "parameter":
        return ""
    return module.source(found)

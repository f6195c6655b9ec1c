"""The report of a compiled step: its memory, FLOPs, traffic, kernels, and what bounds it; and the comparison of two."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pe_lab.config import from_dict
from pe_lab.errors import ConfigError
from pe_lab.model import Flops
from pe_lab.parallel.topology import GIB, Chip
from pe_lab.planning.hlo import Buffer, Module
from pe_lab.planning.program import Collective, collectives, kernels, memory_traffic, product_flops
from pe_lab.storage import json_object
from pe_lab.terminal import table

MIB = 2**20


@dataclass(frozen=True)
class Traffic:
    """Collectives of one place in the source: their kind, mesh axes and bytes.

    Attributes:
      axes: the mesh axes that take part, joined by +.
      network: ICI, within a slice or a node of GPUs; DCN, between them; or ICI+DCN.
      times: runs in a step.
      payload: bytes of the whole arrays, of all runs.
      wire: bytes that each device sends in a step, by the ring algorithm.
      overlapped: of these, bytes that are sent beside computation.
      source: scope of the model, and pass.
      crossing: bytes that each device sends to other slices or nodes.
    """

    kind: str
    axes: str
    network: str
    times: int
    payload: int
    wire: int
    overlapped: int
    source: str
    crossing: int = 0


@dataclass(frozen=True)
class StepReport:
    """What the compiler made of a step, of one device. Bytes, FLOPs and seconds.

    `model_flops` counts every query with every key and no rematerialization, `causal_flops` the visible pairs alone;
    `attention_flops` those of kernels.
    """

    program: str
    devices: int
    settings: Mapping[str, Any]
    compiler: str
    compile_seconds: float
    peak_bytes: int
    product_flops: float
    attention_flops: float
    model_flops: float
    memory_bytes: int
    kernels: Mapping[str, Any]
    memory_by_source: Mapping[str, Any] = field(default_factory=dict)  # of `memory_bytes`
    traffic: tuple[Traffic, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    causal_flops: float = 0.0

    def wire(self, network: str = "", overlapped: bool | None = None) -> int:
        """Bytes that a device sends in a step, over one network or all; all, or only those (not) overlapped."""
        total = 0.0
        for one in self.traffic:
            sent = one.crossing if network == "DCN" else 0 if (network, one.network) == ("ICI", "DCN") else one.wire
            share = one.overlapped / one.wire if one.wire else 0.0
            total += sent * (1.0 if overlapped is None else share if overlapped else 1.0 - share)
        return round(total)


def report_step(
    module: Module, mesh: Mapping[str, int], nodes: int, tokens: int, flops: Flops, **known: Any
) -> StepReport:
    """The report of a program that was compiled for a mesh over `nodes`: TPU slices, or nodes of GPUs.

    Args:
      tokens: of a step, on one device.
      flops: of the model, per token.
      known: the other fields.
    """
    found = collectives(module, mesh, nodes)
    devices = math.prod(mesh.values())
    runs, memory = kernels(module), memory_traffic(module)
    one_product = tokens * (flops.full - flops.causal) / 6 if runs else 0.0  # causal: half of all pairs
    products = {name: _products(name, runs) for name in runs}
    # The gradient of each layer's keys, of each micro-batch and part of a ring, is computed once.
    gradients = sum(count for name, count in runs.items() if products[name] >= 4) or sum(runs.values())
    attention = sum(products[name] * count for name, count in runs.items()) * one_product / max(1, gradients)
    return StepReport(
        devices=devices,
        product_flops=product_flops(module),
        attention_flops=attention,
        model_flops=flops.full * tokens,
        causal_flops=flops.causal * tokens,
        memory_bytes=memory.total(),
        memory_by_source=dict(memory.most_common()),
        kernels=dict(sorted(runs.items())),
        traffic=_traffic(found, devices // nodes),
        **known,
    )


def _products(name: str, runs: Mapping[str, int]) -> int:
    """Matrix products over the visible pairs in a run of an attention kernel; those of the backward pass compute the
    logits again."""
    if "dq" in name or name in _OWN_QUERIES:
        return 3
    if "dkv" in name or name in _OWN_KEYS:
        return 4 if name in _OWN_KEYS or any("dq" in other for other in runs) else 5
    return 5 if "bwd" in name or "backward" in name.lower() else 2


# Of pe_lab's kernels for TPUs, and of those for GPUs.
_OWN_QUERIES = ("pe_lab_attention_gradient_query", "pe_lab_attention_query_gradient")
_OWN_KEYS = ("pe_lab_attention_gradient_key", "pe_lab_attention_key_gradient")


def _traffic(found: Sequence[Collective], node_size: int) -> tuple[Traffic, ...]:
    rows: dict[tuple[str, str, str, str], Traffic] = {}
    for one in found:
        crossing = one.crossing(node_size)
        network = "ICI" if not crossing else "DCN" if crossing == one.wire else "ICI+DCN"
        key = (one.kind, "+".join(one.axes), network, one.source)
        before = rows.get(key, Traffic(*key[:3], 0, 0, 0, 0, key[3]))
        wire = one.wire * one.times
        rows[key] = dataclasses.replace(
            before,
            times=before.times + one.times,
            payload=before.payload + one.payload * one.times,
            wire=before.wire + wire,
            overlapped=before.overlapped + (wire if one.overlapped else 0),
            crossing=before.crossing + crossing * one.times,
        )
    return tuple(sorted(rows.values(), key=lambda one: -one.wire))


def bounds(report: StepReport, chip: Chip) -> dict[str, float]:
    """Seconds that each resource of the chip needs for a step at the peak of its data sheet."""
    needs = {
        "compute": (report.product_flops + report.attention_flops, chip.peak),
        "HBM": (report.memory_bytes, chip.bandwidth),
        "ICI": (report.wire("ICI"), chip.ici),
        "DCN": (report.wire("DCN"), chip.dcn),
    }
    return {name: amount / peak for name, (amount, peak) in needs.items() if peak and amount}


def report_text(report: StepReport, chip: Chip, rows: int = 14) -> str:
    """The report as tables."""
    total = max(1, report.wire())
    networks = {"ICI": "NVLink", "DCN": "network"} if chip.name.startswith("NVIDIA") else {"ICI": "ICI", "DCN": "DCN"}
    lines = [f"the compiled step: {report.program}, by {report.compiler}, in {report.compile_seconds:.0f} s", ""]
    buffers = [(one.source or "-", one.shape, f"{one.bytes / MIB:,.1f}") for one in report.buffers]
    if buffers:
        lines += ["the largest temporary buffers at the peak", table(("contents", "shape", "MiB"), buffers, 2), ""]
    if report.memory_by_source:
        most = sorted(report.memory_by_source.items(), key=lambda one: -one[1])
        moved = [(name or "-", f"{count / GIB:,.1f}", f"{count / report.memory_bytes:.0%}") for name, count in most]
        lines += ["read and written in HBM", table(("from", "GiB", "share"), moved[:rows])]
        if rest := [count for _, count in most[rows:]]:
            lines.append(f"and {_others(rest)}, {sum(rest) / GIB:,.1f} GiB")
        lines.append("")
    shown = [
        (
            one.source or "-", one.kind, one.axes or "-", "+".join(networks[name] for name in one.network.split("+")),
            f"{one.times}",
            f"{one.payload / MIB:,.1f}", f"{one.wire / MIB:,.1f}", f"{one.overlapped / max(1, one.wire):.0%}",
        )
        for one in report.traffic[:rows]
    ]  # fmt: skip
    if shown:
        header = ("from", "collective", "axes", "over", "runs", "MiB in all", "MiB sent", "overlapped")
        lines += ["collectives of a step, per device", table(header, shown, 4)]
        rest = report.traffic[rows:]
        if rest:
            lines.append(f"and {_others(rest)}, {sum(one.wire for one in rest) / MIB:,.1f} MiB")
        share = report.wire(overlapped=True) / total
        lines += [f"all: {report.wire() / MIB:,.1f} MiB sent, {share:.0%} of it beside computation", ""]
    if report.kernels:
        lines += ["kernels: " + ", ".join(f"{name} x {runs}" for name, runs in report.kernels.items()), ""]
    limits = bounds(report, chip)
    if limits:
        amounts = {
            "compute": f"{report.product_flops:.4g} FLOPs in products, {report.attention_flops:.3g} in kernels",
            "HBM": f"{report.memory_bytes / GIB:.4g} GiB read and written",
            "ICI": f"{report.wire('ICI') / GIB:.4g} GiB sent",
            "DCN": f"{report.wire('DCN') / GIB:.4g} GiB sent",
        }
        bound = max(limits, key=lambda name: limits[name])
        work = report.product_flops + report.attention_flops
        intensity = f"{work / max(1, report.memory_bytes):,.0f} FLOPs per byte of HBM, "
        intensity += f"{work / total:,.0f} per byte sent"
        peaks = (("ICI", chip.ici), ("DCN", chip.dcn))
        causal = report.causal_flops / (chip.peak * limits[bound]) if chip.peak else 0.0
        causal = f", {causal:.1%} (causal)" if causal else ""
        waited = sum(report.wire(name, overlapped=False) / peak for name, peak in peaks if peak)
        shown = [(networks.get(name, name), amounts[name], f"{1e3 * seconds:.4g}") for name, seconds in limits.items()]
        lines += [
            f"the least time of a step on {chip.name} at its published peaks",
            table(("resource", "of a device", "ms"), shown, 2),
            f"arithmetic intensity: {intensity}",
            f"bound by {networks.get(bound, bound)}: "
            f"MFU is at most {_mfu(report, chip, limits[bound]):.1%} (full){causal}; "
            f"{_mfu(report, chip, limits[bound] + waited):.1%} if the device also waits for what is not overlapped",
            _what_limits(report, limits, networks),
            "",
        ]
    return "\n".join(lines)


def _what_limits(report: StepReport, limits: Mapping[str, float], names: Mapping[str, str]) -> str:
    """A sentence: what bounds the step, what needs most of that, and how long everything else is busy."""
    bound = max(limits, key=lambda name: limits[name])
    parts: Counter[str] = Counter()
    if bound == "compute":
        unit, parts["attention"], parts["other products"] = "FLOPs", report.attention_flops, report.product_flops
    elif bound == "HBM":
        unit, parts = "bytes in HBM", Counter(report.memory_by_source)
    else:
        unit = "bytes sent"
        for one in report.traffic:
            if bound in one.network:
                parts[one.source] += one.crossing if bound == "DCN" else one.wire
    most = ""
    if parts and parts.total():
        (name, amount), *_ = parts.most_common(1)
        most = f": {amount / parts.total():.0%} of its {unit} are those of {name or 'unnamed operations'}"
    rest = [f"{names.get(name, name)} {limits[name] / limits[bound]:.0%}" for name in limits if name != bound]
    return f"What limits the step is {names.get(bound, bound)}{most}." + (
        f" At the peaks, the others are busy for a part of that time: {', '.join(rest)}." if rest else ""
    )


def _others(rest: Sequence[Any]) -> str:
    return f"{len(rest)} other{'s' if len(rest) > 1 else ''}"


def _mfu(report: StepReport, chip: Chip, seconds: float) -> float:
    return report.model_flops / (chip.peak * seconds)


def report_json(report: StepReport) -> dict[str, Any]:
    """The report as JSON."""
    return {"kind": "step report", **dataclasses.asdict(report)}


def read_report(path: Path) -> StepReport:
    """A report that `pe_lab.plan --explain --json` or benchmarks/tpu_step.py wrote.

    Raises:
      ConfigError: there is no such file, or it holds something else.
    """
    try:
        found = json_object(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--against={path}: {error.strerror}. Write one with --explain --json={path}.") from None
    compiled = found.get("compiled") if found else None
    if isinstance(compiled, dict):  # of pe_lab.plan: the phase that was explained
        found = next((phase["step"] for phase in compiled.values() if "step" in phase), None)
    if not isinstance(found, dict) or found.get("kind") != "step report":
        raise ConfigError(f"--against={path} is no report of a step. Write one with --explain --json={path}.")
    return from_dict(StepReport, {key: value for key, value in found.items() if key != "kind"}, f"--against={path}")


def compare(report: StepReport, other: StepReport) -> tuple[str, bool]:
    """A table of the figures of both, with their ratios, and whether a figure is worse by more than a percent."""
    rows, worse = [], False
    for name, here, there in _figures(report, other):
        ratio = here / there if there else math.inf if here else 1.0
        more = name != "overlapped, %"
        worse |= ratio > 1.01 if more else here < there - 1
        rows.append((name, f"{here:,.5g}", f"{there:,.5g}", f"{ratio:.3f}"))
    title = f"against {other.program} by {other.compiler} ({_settings(other.settings)})"
    return f"{title}\n{table(('of a device and step', 'this', 'that', 'ratio'), rows)}\n", worse


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "settings unknown"


def _figures(report: StepReport, other: StepReport) -> list[tuple[str, float, float]]:
    def of(one: StepReport) -> dict[str, float]:
        wire: dict[str, int] = {}
        for row in one.traffic:
            wire[row.kind] = wire.get(row.kind, 0) + row.wire
        return {
            "peak memory, GB": one.peak_bytes / 1e9,
            "FLOPs of products": one.product_flops,
            "FLOPs of attention kernels": one.attention_flops,
            "memory traffic, GB": one.memory_bytes / 1e9,
            "attention kernels": sum(one.kernels.values()),
            "MiB sent": one.wire() / MIB,
            **{f"  by {kind}": count / MIB for kind, count in sorted(wire.items())},
            "MiB waited for": one.wire(overlapped=False) / MIB,
        }

    here, there = of(report), of(other)
    return [(name, here.get(name, 0.0), there.get(name, 0.0)) for name in dict.fromkeys([*here, *there])]

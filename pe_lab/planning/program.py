"""What a compiled step does: matrix products, collectives and kernels, each counted as often as it runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.planning.hlo import Instruction, Module, Shape, Step

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
      axes: the mesh axes whose devices take part, such as ("fsdp",); () if unknown.
      group: devices that take part together.
      payload: bytes of the whole array, of one run.
      wire: bytes that each device sends in one run, by the ring algorithm.
      times: how often it runs in a step.
      overlapped: it runs beside computation; otherwise the device waits for it.
      source: the function that it comes from.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group: int
    payload: int
    wire: int
    times: int
    overlapped: bool
    source: str
    dtype: str


def wire_bytes(kind: str, payload: int, group: int) -> int:
    """Bytes that a device sends for a collective over `group` devices by the ring algorithm.

    `payload` is the size of the whole array: the result of an all-gather, the input of a reduce-scatter.
    """
    if group < 2:
        return 0
    if kind == "collective-permute":
        return payload
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * payload * (group - 1) // group


def collectives(module: Module, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of a program that was compiled for a mesh with these axes."""
    found: dict[tuple[str, str], Collective] = {}
    for step in module.walk():
        one = step.instruction
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        loop = next((outer.name for outer in reversed(step.inside) if outer.opcode == "while"), "")
        made = _collective(module, step, kind, mesh)
        # A collective that runs beside several fusions is a part of each, in one chain.
        chain = re.search(r'chain_id="(\d+)"', one.text)
        found.setdefault((loop, f"chain {chain[1]}" if chain else one.name), made)
    return list(found.values())


def _collective(module: Module, step: Step, kind: str, mesh: Mapping[str, int]) -> Collective:
    one = step.instruction
    inputs = _operand_shapes(module, step)
    shapes = one.shapes
    if one.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        shapes = shapes[len(inputs) : 2 * len(inputs)] or shapes  # (operands, results, ...)
    payload = sum(shape.bytes for shape in (inputs if kind == "reduce-scatter" else shapes))
    groups = device_groups(one, math.prod(mesh.values()))
    group = len(groups[0]) if groups else 2 if kind == "collective-permute" else math.prod(mesh.values())
    frame = step.instruction.stack_frame
    fusion = step.inside[-1] if step.inside and step.inside[-1].opcode == "fusion" else None
    if kind == "all-reduce" and fusion is not None and "all-reduce-scatter" in fusion.text:
        kind = "reduce-scatter"  # an all-reduce of which the device keeps a slice: a TPU does only the first half
        frame = fusion.stack_frame or frame
    overlapped = one.opcode.endswith("-start") or any(
        outer.opcode.startswith("async-") or "async_collective" in outer.text or "async-collective" in outer.name
        for outer in step.inside
    )
    return Collective(
        one.name, kind, group_axes(groups, mesh), group, payload, wire_bytes(kind, payload, group), step.times,
        overlapped, source(module, frame) or _short(one.op_name), shapes[0].dtype if shapes else "",
    )  # fmt: skip


def _operand_shapes(module: Module, step: Step) -> list[Shape]:
    for names in module.by_name.values():
        if names.get(step.instruction.name) is step.instruction:
            return [shape for operand in step.instruction.operands for shape in names[operand].shapes]
    return []


def source(module: Module, frame: int) -> str:
    """The functions of pe_lab that a stack frame lies in, the innermost two: `MLP.__call__ < Block.attend_by`."""
    own = [(function, file) for function, file, _ in module.stack(frame) if "site-packages" not in file]
    names = [function.replace(".<locals>", "") for function, _ in own if function != "<module>"]
    return " < ".join(dict.fromkeys(names[:2]))


def _short(op_name: str) -> str:
    return "/".join(op_name.split("/")[-2:])


def device_groups(one: Instruction, devices: int) -> list[list[int]]:
    """The groups of devices of a collective, by their index in the mesh; [] if it names none."""
    text = one.text
    if found := re.search(r"source_target_pairs=\{\{(.*?)\}\}", text):
        return [list(map(int, pair.split(","))) for pair in found[1].split("},{")]
    if found := re.search(r"replica_groups=\{\{(.*?)\}\}", text):
        return [list(map(int, group.split(","))) for group in found[1].split("},{")]
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        chosen = re.findall(r"'([^']+)'", found[3])
        order = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        rest = [i for i, name in enumerate(sizes) if name not in chosen]
        picked = [list(sizes).index(name) for name in chosen]
        return order.transpose(*rest, *picked).reshape(-1, math.prod(sizes[name] for name in chosen)).tolist()
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base = (tuple(map(int, found[i].split(","))) for i in (1, 2))
        order = np.arange(math.prod(base)).reshape(base)
        if found[3]:
            order = order.transpose(tuple(map(int, found[3].split(","))))
        return order.reshape(shape).tolist()
    return []


def group_axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    if not groups:
        return ()
    places = np.stack(np.unravel_index(np.asarray(groups[0]), tuple(mesh.values())))
    return tuple(name for name, coordinates in zip(mesh, places, strict=True) if len(set(coordinates.tolist())) > 1)


def product_flops(module: Module) -> int:
    """FLOPs of all matrix products in XLA; those inside kernels are not counted."""
    total = 0
    for step in module.walk():
        if step.instruction.opcode in ("dot", "convolution"):
            total += step.times * _flops(module, step)
    return total


def _flops(module: Module, step: Step) -> int:
    one = step.instruction
    left, right = _operand_shapes(module, step)[:2]
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        axes = map(int, filter(None, contracted[1].split(",")))
        return 2 * math.prod(one.shapes[0].dims) * math.prod(left.dims[axis] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    of_left, of_right, of_out = (
        dict(zip(labels[i], shape.dims, strict=True)) for i, shape in ((1, left), (2, right), (3, one.shapes[0]))
    )
    flops = 2 * of_out["b"] * of_out["f"] * of_right["i"]
    window = one.text[one.text.find("window={") :].partition("}")[0]
    settings = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\d_x\-]+)", window)}
    for axis in (label for label in of_left if label.isdigit()):
        i = int(axis)
        size, out, width = of_left[axis], of_out[axis], of_right[axis]
        stride, left_dilate, right_dilate = (
            int(settings.get(key, ["1"] * 9)[i]) for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(settings.get("pad", ["0_0"] * 9)[i].split("_")[0])
        places = np.arange(out)[:, None] * stride + np.arange(width)[None] * right_dilate - before
        valid = (places >= 0) & (places <= (size - 1) * left_dilate) & (places % left_dilate == 0)
        flops *= int(valid.sum())  # the pairs of a position and a tap that are multiplied
    return flops


def kernels(module: Module) -> Counter[str]:
    """Runs of each kernel that is not XLA's own, by name."""
    found: Counter[str] = Counter()
    for step in module.walk():
        one = step.instruction
        if one.opcode == "custom-call" and one.attribute("custom_call_target") in KERNELS:
            found[re.sub(r"[.\d]+$", "", one.name)] += step.times
    return found


KERNELS = (
    "tpu_custom_call",
    "__gpu$xla.gpu.triton",
    "triton_kernel_call",
    "mosaic_gpu",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
)

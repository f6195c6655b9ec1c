"""What a compiled step does: matrix products, collectives and kernels, each counted as often as it runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pe_lab.planning.hlo import Execution, Instruction, Module, Shape

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
      source: where it comes from, as `Module.source`.
      members: the devices of the first group, by their index in the mesh.
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
    members: tuple[int, ...]

    def crossing(self, size: int) -> int:
        """Of `wire`, the bytes that leave the slice or node of `size` devices; 0 if all devices lie in one.

        A ring enters and leaves each node once. As many rings as the node has of the devices share the bytes.
        """
        nodes, count = len({member // size for member in self.members}), len(self.members)
        if nodes < 2:
            return 0
        if self.kind.endswith("all-to-all"):  # to each other member its own part
            return self.wire * (count - count // nodes) // (count - 1)
        return self.wire * nodes // count


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


def collectives(module: Module, mesh: Mapping[str, int], nodes: int = 1) -> list[Collective]:
    """Every collective of a program that was compiled for a mesh with these axes, over `nodes`: TPU slices, or nodes of
    GPUs.

    libtpu divides a collective over several slices into collectives of each slice, and an exchange of a device's part
    with its counterparts in the other slices, which its runtime makes over the network.
    """
    found: dict[tuple[str, str], Collective] = {}
    for step in module.walk():
        one = step.instruction
        kind = one.opcode.removesuffix("-start")
        if one.opcode == "send" and (exchange := re.search(r"_xla_megascale_transfer_type=\"(\w+)\"", one.text)):
            found["", one.name] = _exchange(module, step, exchange[1].lower().replace("_", "-"), mesh, nodes)
        if kind not in COLLECTIVES:
            continue
        loop = next((outer.name for outer in reversed(step.inside) if outer.opcode == "while"), "")
        made = _collective(module, step, kind, mesh)
        # A collective that runs beside several fusions is a part of each, in one chain.
        chain = re.search(r'chain_id="(\d+)"', one.text)
        found.setdefault((loop, f"chain {chain[1]}" if chain else one.name), made)
    return list(found.values())


def _exchange(module: Module, step: Execution, kind: str, mesh: Mapping[str, int], slices: int) -> Collective:
    payload, size = step.instruction.shapes[0].bytes, math.prod(mesh.values()) // slices
    wire, source = wire_bytes(kind, payload, slices), module.source(step.instruction)
    return Collective(
        step.instruction.name, kind, ("data",), slices, payload, wire, step.times, True, source, (0, size)
    )


def _collective(module: Module, step: Execution, kind: str, mesh: Mapping[str, int]) -> Collective:
    one = step.instruction
    inputs = _operand_shapes(module, step)
    shapes = one.shapes
    if one.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        shapes = shapes[len(inputs) : 2 * len(inputs)] or shapes  # (operands, results, ...)
    payload = sum(shape.bytes for shape in (inputs if kind == "reduce-scatter" else shapes))
    groups = device_groups(one)
    group = len(groups[0]) if groups else 2 if kind == "collective-permute" else math.prod(mesh.values())
    named = one
    fusion = step.inside[-1] if step.inside and step.inside[-1].opcode == "fusion" else None
    if kind == "all-reduce" and fusion is not None and "all-reduce-scatter" in fusion.text:
        kind = "reduce-scatter"  # an all-reduce of which the device keeps a slice: a TPU does only the first half
        named = fusion
    begins = [each for each in (*step.inside, one) if each.opcode.endswith("-start")]
    overlapped = any(_computes_until_done(module, each) for each in begins) or any(
        "async_collective" in outer.text or "async-collective" in outer.name for outer in step.inside
    )
    return Collective(
        one.name, kind, group_axes(groups, mesh), group, payload, wire_bytes(kind, payload, group), step.times,
        overlapped, module.source(named) or module.source(one), tuple(groups[0]) if groups else (),
    )  # fmt: skip


def _computes_until_done(module: Module, start: Instruction) -> bool:
    """Whether a matrix product, a kernel or a loop lies between an asynchronous start and its end in the schedule."""
    body = module.computations[module.home[id(start)]]
    pending, between = {start.name}, False
    for one in body[body.index(start) + 1 :]:
        if pending.intersection(one.operands) and one.opcode.endswith(("-update", "-done")):
            if one.opcode.endswith("-done"):
                return between
            pending.add(one.name)
        between = between or _computes(module, one)
    return between


def _computes(module: Module, one: Instruction) -> bool:
    if one.opcode in ("dot", "convolution", "while", "custom-call"):
        return one.opcode != "custom-call" or one.attribute("custom_call_target").startswith((*KERNELS, *PRODUCTS))
    bodies = (module.computations.get(name, ()) for name in one.called) if one.opcode in ("fusion", "call") else ()
    return any(_computes(module, each) for body in bodies for each in body)


def _operand_shapes(module: Module, step: Execution) -> list[Shape]:
    names = module.by_name[module.home[id(step.instruction)]]
    return [shape for operand in step.instruction.operands for shape in names[operand].shapes]


def device_groups(one: Instruction) -> list[list[int]]:
    """The groups of devices of a collective, by their index in the mesh; [] if it names none."""
    text = one.text
    if found := re.search(r"source_target_pairs=\{\{(.*?)\}\}", text):
        return [list(map(int, pair.split(","))) for pair in found[1].split("},{")]
    if found := re.search(r"replica_groups=\{\{(.*?)\}\}", text):
        return [list(map(int, group.split(","))) for group in found[1].split("},{")]
    ids = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids} \{{([^}}]*)\}}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        chosen = re.findall(r"'([^']+)'", found[4])
        order = _iota(found[2] or str(math.prod(sizes.values())), found[3]).reshape(tuple(sizes.values()))
        rest = [i for i, name in enumerate(sizes) if name not in chosen]
        picked = [list(sizes).index(name) for name in chosen]
        return order.transpose(*rest, *picked).reshape(-1, math.prod(sizes[name] for name in chosen)).tolist()
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(found[2], found[3]).reshape(tuple(map(int, found[1].split(",")))).tolist()
    return []


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... as an array of `sizes` ("2,4"), its axes in `order` ("1,0")."""
    shape = tuple(map(int, sizes.split(",")))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers


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
        one = step.instruction
        if one.opcode in ("dot", "convolution") or one.attribute("custom_call_target").startswith(PRODUCTS):
            total += step.times * _flops(module, step)
    return total


def _flops(module: Module, step: Execution) -> int:
    one = step.instruction
    left, right = _operand_shapes(module, step)[:2]
    if one.opcode in ("dot", "custom-call"):
        contracted = re.search(r"lhs_contracting_dim(?:s=\{|ensions\"?:\[)([\d,\"]*)", one.text)
        axes = map(int, filter(None, contracted[1].replace('"', "").split(",")))
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
        target = one.attribute("custom_call_target")
        if one.opcode == "custom-call" and target.startswith(KERNELS):
            name = re.sub(r"[.\d]+$", "", one.name)
            if name == "pallas_call" and "/" in one.op_name:  # Triton's; .../NAME/pallas_call
                name = one.op_name.split("/")[-2]
            found[target if name in ("custom-call", "cudnn-attention") else name] += step.times
    return found


KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu", "__cudnn$")
PRODUCTS = ("__cublas$",)  # matrix products, by NVIDIA's library


def memory_traffic(module: Module) -> Counter[str]:
    """Bytes that the operations of a step read from and write to the device's main memory, by where they come from.

    Each operation, or fusion of several, reads its operands and writes its results once; of an array of which it
    takes or writes a slice, the slice. What stays in a core's own memory is not counted.
    """
    found: Counter[str] = Counter()
    for step in module.walk():
        one = step.instruction
        if one.opcode in _NO_TRAFFIC or one.opcode.endswith(("-done", "-update")):
            continue
        if all(outer.opcode in _PARTS for outer in step.inside) and (moved := step.times * _traffic(module, step)):
            found[module.source(one)] += moved
    return found


_NO_TRAFFIC = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota",
    "partition-id", "after-all", "async-start",
)  # fmt: skip
_PARTS = ("while", "call", "async-start")  # the operations of their computations run one by one


def _traffic(module: Module, step: Execution) -> int:
    one = step.instruction
    inputs = _operand_shapes(module, step)
    body = module.computations.get(one.called[0], ()) if one.opcode == "fusion" and one.called else ()
    read = sum(_read(module, body, i, shape) for i, shape in enumerate(inputs) if shape.space == 0)
    results = one.shapes
    if one.opcode == "copy-start":
        results = one.shapes[:1]  # before what is copied
    elif one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        results = one.shapes[len(inputs) :]  # behind the operands
    if one.opcode.removesuffix("-start") in ("dynamic-slice", "slice") and inputs[0].space == 0:
        read = results[0].bytes
    names = {each.name: each for each in body}
    written = sum(shape.bytes for shape in results if shape.space == 0)
    for each in [one, *body]:
        if each.opcode == "dynamic-update-slice" and each.shapes[0] in one.shapes:
            update = names.get(each.operands[1])
            written -= each.bytes - (update.bytes if update is not None else inputs[1].bytes)
    return read + max(0, written)


def _read(module: Module, body: Sequence[Instruction], index: int, shape: Shape) -> int:
    """Bytes of operand `index` of a fusion that are read: all, or the slices that are taken of it."""
    parameter = next((one for one in body if one.opcode == "parameter" and one.text.startswith(f"{index})")), None)
    if parameter is None:
        return shape.bytes
    same = {parameter.name}  # the parameter, and other shapes of the same bytes
    for one in body:
        if one.opcode == "bitcast" and same.intersection(one.operands):
            same.add(one.name)
    uses = [one for one in body if same.intersection(one.operands) and one.name not in same]
    return min(shape.bytes, sum(_read_by(module, one, same, shape) for one in uses)) if uses else shape.bytes


def _read_by(module: Module, one: Instruction, same: set[str], shape: Shape) -> int:
    """Bytes that an instruction of a fusion reads of an array, which has the names `same` there."""
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return one.bytes
    if one.opcode == "dynamic-update-slice" and one.operands[0] in same:
        return 0
    if one.opcode == "fusion" and one.called:
        inner = module.computations.get(one.called[0], ())
        return sum(_read(module, inner, i, shape) for i, operand in enumerate(one.operands) if operand in same)
    return shape.bytes

"""A compiled program as data, read from the text of its optimized HLO (`Compiled.as_text()`), and its buffers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "s2": 2, "u2": 2, "token": 0, "opaque": 0}


class Shape(NamedTuple):
    """An array: its type (bf16), dimensions, and layout as written ({1,0:T(8,128)(2,1)S(1)})."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Without the padding of its layout."""
        return math.ceil(math.prod(self.dims) * bits(self.dtype) / 8)

    @property
    def space(self) -> int:
        """The memory space: 0 is the device's main memory, 1 a TPU core's VMEM, 5 the host's."""
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits(dtype: str) -> int:
    """The bits of a number: 16 of bf16, 32 of f32, 8 of f8e4m3fn."""
    if dtype in BITS:
        return BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Instruction:
    """One instruction. `shapes`: its result, several for a tuple; `called`: the computations that it runs."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str = field(repr=False)  # what follows the operands
    is_root: bool = False

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    def attribute(self, name: str) -> str:
        """The value of `name=value` among its attributes; "" if it has none."""
        found = re.search(rf"(?<![\w.]){name}=((?:\"[^\"]*\")|[^\s,]+)", self.text)
        return found[1].strip('"') if found else ""

    @property
    def integer(self) -> int | None:
        """The value of an integer constant."""
        found = re.match(r"(-?\d+)\)", self.text) if self.opcode == "constant" else None
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """The function of the source that it comes from: jit(step)/jvp()/while/body/dot_general."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def stack_frame(self) -> int:
        found = re.search(r"stack_frame_id=(\d+)", self.text)
        return int(found[1]) if found else 0

    @property
    def called(self) -> tuple[str, ...]:
        found = re.findall(
            r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.text
        )
        branches = re.search(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.text)
        return (*found, *(re.findall(r"%?([\w.\-]+)", branches[1]) if branches else ()))


@dataclass(frozen=True)
class Module:
    """A program: its computations in the order of their instructions, the first to run, and the frames of its source.

    `frames`: of each stack frame, the function, file and line, and the frame that called it.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    frames: Mapping[int, tuple[str, str, int, int]]

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        return {name: {one.name: one for one in body} for name, body in self.computations.items()}

    def stack(self, frame: int) -> list[tuple[str, str, int]]:
        """Function, file and line of a frame and of its callers, the innermost first."""
        found = []
        while frame in self.frames:
            function, file, line, frame = self.frames[frame]
            found.append((function, file, line))
        return found

    def source(self, one: Instruction, depth: int = 2) -> str:
        """Where an instruction comes from: `mlp/gate, backward` by the model's scopes, else by the functions.

        An instruction without a name has that of one in the computation that it runs, or else of an operand; `depth`
        operands are followed.
        """
        found = scope(one.op_name)
        for name in one.called if one.opcode in ("fusion", "call", "async-start") else ():
            parts = map(scope, (each.op_name for each in reversed(self.computations.get(name, ()))))
            found = found or next(filter(None, parts), "")
        if found in ("", LAYERS) and depth:
            names = self.by_name[self.home[id(one)]]
            producers = (names[operand] for operand in one.operands if operand in names)
            sources = (self.source(each, depth - 1) for each in producers if each.opcode != "parameter")
            found = next((each for each in sources if each not in ("", LAYERS)), found)
        if found or depth < 2:
            return found
        own = [function for function, file, _ in self.stack(one.stack_frame) if "site-packages" not in file]
        names = [function.replace(".<locals>", "") for function in own if function != "<module>"]
        return " < ".join(list(dict.fromkeys(names))[:2])

    @functools.cached_property
    def home(self) -> dict[int, str]:
        """The computation of each instruction, by its `id`."""
        return {id(one): name for name, body in self.computations.items() for one in body}

    def trips(self, loop: Instruction) -> int:
        """How often a `while` runs whose counter goes up by one to a constant, as that of every `lax.scan`."""
        known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.text)
        if known:
            return int(known[1])
        condition = self.computations[re.search(r"condition=%?([\w.\-]+)", loop.text)[1]]
        fused = [one for each in condition for name in each.called for one in self.computations.get(name, ())]
        limits = [one.integer for one in (*condition, *fused) if one.opcode == "constant"]
        limit = max((limit for limit in limits if limit is not None), default=1)
        return limit - self._first(loop, condition)

    def _first(self, loop: Instruction, condition: Sequence[Instruction]) -> int:
        """The counter of a loop before it: 0, or 1 where the compiler has moved the first run out of the loop."""
        names = self.by_name[self.home[id(loop)]]
        counters = [one for one in condition if one.opcode == "get-tuple-element"]
        state = names.get(loop.operands[0])
        if len(counters) != 1 or state is None or state.opcode != "tuple":
            return 0
        found = names.get(state.operands[int(counters[0].attribute("index"))])
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = names.get(found.operands[0])
        return (found.integer or 0) if found is not None else 0

    def walk(self, computation: str = "", times: int = 1, inside: tuple[Instruction, ...] = ()) -> Iterator[Execution]:
        """Every instruction that runs, with how often, and the instructions whose computations it lies in."""
        for one in self.computations[computation or self.entry]:
            yield Execution(one, times, inside)
            if one.opcode in (
                "reduce",
                "reduce-window",
                "scatter",
                "sort",
                "map",
                "select-and-scatter",
                "all-reduce",
                "reduce-scatter",
                "all-reduce-start",
            ):
                continue  # what they call combines two numbers
            repeats = times * (self.trips(one) if one.opcode == "while" else 1)
            for name in one.called:
                if name in self.computations:
                    yield from self.walk(name, repeats, (*inside, one))


def scope(op_name: str) -> str:
    """The scopes of the model in a name, and the pass: jit(step)/transpose(jvp())/while/.../mlp/gate/dot_general is
    `mlp/gate, backward`; "" without a scope.

    Operations that the compiler has combined are `.../(attention/key/dot_general:mlp/up/dot_general)`.
    """
    before, combined, rest = op_name.partition("/(")
    if combined and rest.endswith(")") and ":" in rest:
        scopes = [scope(f"{before}/{one}") for one in rest[:-1].split(":")]
        found = list(dict.fromkeys(filter(None, scopes)))
        return found[0] + (f" + {len(found) - 1}" if len(found) > 1 else "") if found else ""
    parts = op_name.partition(";")[0].split("/")
    names = [re.sub(r"^(?:\w+\()*([^()]*)\)*$", r"\1", part) for part in parts[:-1] if not part.startswith("jit(")]
    names = [name for name in names if name and not _STRUCTURE.fullmatch(name) and "," not in name]
    names = ([name for name in names if name != LAYERS] or names[:1])[:2]
    if not names:
        return ""
    recomputed, backward = "rematted_computation" in parts, any(part.startswith("transpose(") for part in parts)
    return "/".join(names) + (", recomputed" if recomputed else ", backward" if backward else "")


LAYERS = "layers"  # the scope around all layers
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|shard_map|step|eval_jaxpr"
)


class Execution(NamedTuple):
    """An instruction that runs `times` times in a step of the program, inside the calls `inside`."""

    instruction: Instruction
    times: int
    inside: tuple[Instruction, ...]


def parse(text: str) -> Module:
    """The program of an HLO text, as XLA of JAX 0.10 to 0.12 writes it.

    JAX 0.12 may write `%state#2` for an element of a tuple, which JAX 0.10 gets by an instruction: here both are one.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = "", "", {}
    tables: dict[str, dict[int, str]] = {}
    table = ""
    for line in _lines(text):
        if name:
            if _ENDS.match(line):
                computations[name] = tuple(one for one, _ in body.values())
                name, body = "", {}
            elif (found := _instruction(line)) is not None:
                for operand in found[0].operands:
                    _add_element(body, operand)
                body[found[0].name] = found
        elif line.endswith("{") and (line.startswith(("%", "ENTRY"))):
            head = line.removeprefix("ENTRY ").lstrip("%")
            name = re.match(r"[\w.\-]+", head)[0]
            entry = name if line.startswith("ENTRY") else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
            tables[table] = {}
        elif table and (found := re.match(r"(\d+) (.*)", line)):
            tables[table][int(found[1])] = found[2]
    if not entry:
        raise ValueError("the text is no optimized HLO: it has no ENTRY computation")
    return Module(computations, entry, _frames(tables))


def _lines(text: str) -> Iterator[str]:
    """The lines of the text. The metadata of a kernel contains line breaks, which are removed."""
    whole: list[str] = []
    for line in text.splitlines():
        if whole and (_ENDS.match(line) or not line or line[0] in " %" or line[0].isalnum()):
            yield "".join(whole)
            whole = []
        whole.append(line)
    yield "".join(whole)


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[str, str, int, int]]:
    def numbers(text: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}

    frames = {}
    for index, text in tables.get("StackFrames", {}).items():
        frame = numbers(text)
        location = numbers(tables["FileLocations"].get(frame.get("file_location_id", 0), ""))
        function = tables["FunctionNames"].get(location.get("function_name_id", 0), "").strip('"')
        file = tables["FileNames"].get(location.get("file_name_id", 0), "").strip('"')
        frames[index] = (function, file, location.get("line", 0), frame.get("parent_frame_id", 1) - 1)
    return frames


_ENDS = re.compile(r"\}(, execution_thread=.*)?$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_OPERAND = re.compile(r"%([\w.\-#]+)")


def _add_element(body: dict[str, tuple[Instruction, str]], operand: str) -> None:
    """Adds the instruction that an operand `state#2` stands for."""
    name, written, index = operand.rpartition("#")
    if not written or operand in body:
        return
    _add_element(body, name)
    result = _elements(body[name][1])[int(index)]
    body[operand] = Instruction(operand, "get-tuple-element", _shapes(result), (name,), f"), index={index}"), result


def _instruction(line: str) -> tuple[Instruction, str] | None:
    """The instruction of a line, and the text of its result's shape."""
    found = _NAME.match(line)
    if not found:
        return None
    start = found.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode, _, rest = line[end:].strip().partition("(")
    close = _closing("(" + rest, 0) - 1
    operands = tuple(_OPERAND.findall(rest[: close - 1]))
    text = rest[:close] if opcode in ("constant", "parameter") else ""
    result = line[start:end]
    return Instruction(found[2], opcode, _shapes(result), operands, text + rest[close:], bool(found[1])), result


def _shapes(result: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size), layout)
        for dtype, dims, layout in _SHAPE.findall(result)
    )


def _elements(result: str) -> list[str]:
    """The elements of a tuple's shape."""
    found, depth = [""], 0
    for letter in re.sub(r"/\*.*?\*/", "", result)[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


# ---------------------------------------------------------------------------------------------------------------------
# The buffers of a TPU program at the moment of its largest memory

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


def largest_buffers(assignment: str, live_ranges: str, module: Module) -> list[Buffer]:
    """The largest twelve temporaries that are alive at the peak, the largest first.

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
    ordered = sorted(distinct.values(), key=lambda one: -one.bytes)[:12]
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
    body = one.attribute("body").lstrip("%") or module.home[id(one)]
    names = module.by_name[body]
    root = next((each for each in names.values() if each.is_root), None)
    if root is None or root.opcode != "tuple" or place >= len(root.operands):
        return ""
    found = names.get(root.operands[place])
    while found is not None and found.opcode in ("get-tuple-element", "bitcast", "copy", "copy-done", "copy-start"):
        found = names.get(found.operands[0]) if found.operands else None
    if found is None or found.opcode == "parameter":
        return ""
    return module.source(found)

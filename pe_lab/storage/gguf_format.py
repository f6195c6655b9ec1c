"""GGUF files, with every count compared with the size of the file before anything is allocated.

`gguf.GGUFReader` makes an array object for each element that a file declares: 27 KB of a damaged file took gigabytes.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from pe_lab.errors import UnsupportedError, UserError

MOST_METADATA = 2**28  # bytes; the largest vocabularies take a hundredth of it
STRING, ARRAY = 8, 9
_CODES = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
SCALARS = {kind: np.dtype(code).newbyteorder("<") for kind, code in _CODES.items()}
PLAIN = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: its name, the name of its number format, its shape, and its data, which are read on use.

    `data` has the tensor's shape; in a format with blocks, and in BF16, its last axis counts bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Shaped[np.ndarray, "..."]


def open_gguf(path: Path, error: type[UserError], wanted: Callable[[str], bool]) -> GgufFile:
    """See `GgufFile`. Raises `error` for a file that is missing, truncated, damaged or not GGUF."""
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(f"{path}: reading GGUF needs the gguf package: pip install gguf.")
    if not path.is_file():
        raise error(f"There is no GGUF file '{path}'.")
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise error(f"{path} is not a GGUF file: it does not begin with GGUF.")
        return GgufFile(path, wanted)
    except OSError as failure:
        raise error(f"{path} cannot be read ({failure.strerror or failure}).") from None
    except ValueError as failure:
        if isinstance(failure, UserError):
            raise
        raise error(f"{path} is truncated or damaged: {failure}. Download it again.") from None


class GgufFile:
    """The metadata and the tensors of a GGUF file of version 2 or 3, little-endian.

    Memory: at most 16 bytes for each byte of metadata, which are at most `MOST_METADATA`; tensors stay on disk.
    `ValueError` if the file is damaged; says where.
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool]):
        """Reads the metadata, of which `fields` has the keys that are `wanted`."""
        self._bytes = np.memmap(path, np.uint8, "r")
        self._view, self._at = memoryview(self._bytes), 0
        self._take(4)  # GGUF
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"it has version {version}; 2 and 3 are known, little-endian")
        tensors, fields = self._number("Q"), self._number("Q")
        self._fits(tensors, 24, "tensors")  # the least bytes that one takes
        self._fits(fields, 13, "metadata keys")
        self.fields: dict[str, Any] = {}  # metadata by key: numbers, strings, and lists of them
        self.keys: set[str] = set()  # of all metadata, also of those that were not wanted
        for _ in range(fields):
            key = self._string()
            if key in self.keys:
                raise ValueError(f"it has the metadata key {key!r} twice")
            self.keys.add(key)
            value = self._value(self._number("I"), key, wanted(key))
            if wanted(key):
                self.fields[key] = value
        described = [self._tensor_info() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, no power of two")
        begin = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, *about, begin) for name, *about in described}
        if len(self.tensors) != tensors:
            raise ValueError("it has two tensors of one name")

    def _take(self, size: int) -> memoryview:
        if size > len(self._view) - self._at:
            raise ValueError(f"it ends {size - len(self._view) + self._at:,} bytes early")
        self._at += size
        if self._at > MOST_METADATA:
            raise ValueError(f"its metadata are more than {MOST_METADATA:,} bytes")
        return self._view[self._at - size : self._at]

    def _fits(self, count: int, size: int, what: str) -> None:
        if count * size > len(self._view) - self._at:
            raise ValueError(f"it declares {count:,} {what}, and has {len(self._view) - self._at:,} bytes left")

    def _number(self, code: str) -> Any:
        code = f"<{code}"
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return bytes(self._take(self._number("Q"))).decode("utf-8")

    def _value(self, kind: int, key: str, keep: bool) -> Any:
        """A value of the metadata; None instead of a list that is not to be kept."""
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return np.frombuffer(self._take(SCALARS[kind].itemsize), SCALARS[kind])[0].item()
        if kind != ARRAY:
            raise ValueError(f"the metadata key {key!r} is of type {kind}, and types are 0 to 12")
        kind, count = self._number("I"), self._number("Q")
        if kind in SCALARS:
            taken = self._take(count * SCALARS[kind].itemsize)
            return np.frombuffer(taken, SCALARS[kind]).tolist() if keep else None
        if kind != STRING:
            raise ValueError(f"the metadata key {key!r} is a list of type {kind}; numbers or strings are known")
        self._fits(count, 8, "strings")
        if keep:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            self._take(self._number("Q"))
        return None

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("I")
        if not 1 <= axes <= 4:
            raise ValueError(f"the tensor {name!r} has {axes} axes; 1 to 4 are known")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]  # GGUF counts axes from the innermost
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int) -> GgufTensor:
        import gguf

        found = gguf.GGMLQuantizationType(kind)  # ValueError for an unknown one
        block, size = gguf.GGML_QUANT_SIZES[found]
        if shape[-1] % block:
            raise ValueError(
                f"the tensor {name!r} has rows of {shape[-1]}, no multiple of {found.name}'s block {block}"
            )
        stored = (*shape[:-1], shape[-1] // block * size)  # in bytes
        needed = 1
        for length in stored:
            needed *= length
        if begin + offset + needed > len(self._view):
            raise ValueError(f"it ends within '{name}'")
        data = np.asarray(self._bytes[begin + offset : begin + offset + needed])
        if found.name in PLAIN:
            return GgufTensor(name, found.name, shape, data.view(f"<{PLAIN[found.name]}").reshape(shape))
        return GgufTensor(name, found.name, shape, data.reshape(stored))

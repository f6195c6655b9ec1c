"""Makes gguf_quants_golden.npz: two rows of 256 numbers in every format, quantized and dequantized by ggml itself.

    PYTHONPATH=XLLAMACPP python tests/data/make_gguf_quants_golden.py

The library is that of the package xllamacpp 2026.10.11549 (see tests/data/read_with_llama_cpp.py); its two functions
are declared here as ggml.h declares them. Also needed: gguf, for the numbers of the formats.
"""

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np

ROWS, WIDTH = 2, 256
PLAIN = ("F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "COUNT")
TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Traits(ctypes.Structure):
    """ggml_type_traits."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", TO_FLOAT),
        ("from_float_ref", ctypes.c_void_p),
    ]


def main() -> None:
    origin = importlib.util.find_spec("xllamacpp").origin
    c = ctypes.CDLL(str(Path(origin).parent / "xllamacpp.abi3.so"))
    c.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    c.ggml_quantize_chunk.restype = ctypes.c_size_t
    c.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = (rows**2).astype(np.float32).mean(0)  # of columns, which some formats need
    golden = {}
    for kind in gguf.GGMLQuantizationType:
        traits = c.ggml_get_type_traits(int(kind)).contents
        if kind.name in PLAIN or not traits.is_quantized:
            continue
        quantized = np.zeros((ROWS, WIDTH // traits.blck_size * traits.type_size), np.uint8)
        pointers = (array.ctypes.data for array in (rows, quantized))
        written = c.ggml_quantize_chunk(int(kind), *pointers, 0, ROWS, WIDTH, weights.ctypes.data)
        assert written == quantized.nbytes, kind.name
        found = np.zeros_like(rows)
        traits.to_float(quantized.ctypes.data, found.ctypes.data, rows.size)
        golden[f"{kind.name}_bytes"], golden[f"{kind.name}_numbers"] = quantized, found
    np.savez_compressed(Path(__file__).parent / "gguf_quants_golden.npz", rows=rows, **golden)
    print(len(golden) // 2, "formats:", *(name.removesuffix("_bytes") for name in golden if name.endswith("_bytes")))


if __name__ == "__main__":
    main()

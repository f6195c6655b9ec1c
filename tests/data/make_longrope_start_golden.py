r"""Makes longrope_start_golden.json beside it: cosines and sines of LongRoPE's authors for a start of unscaled tokens.

    git clone https://github.com/microsoft/LongRoPE && git -C LongRoPE checkout 1daa3dbab7f51e6e9eb182da62bb01429c38c348
    python tests/data/make_longrope_start_golden.py LongRoPE      # a Python with torch

The file that is read is rope/LlamaLongRoPEScaledStartTokenRotaryEmbedding.py; its cosines and sines are those of both
halves of the channels, and the first half is kept.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

FILE = "rope/LlamaLongRoPEScaledStartTokenRotaryEmbedding.py"
DIVISORS = [1.0, 1.05, 1.4, 2.25, 3.0, 3.9, 4.0, 4.6]
LENGTH, ORIGINAL, START, BASE = 64, 16, 5, 500.0


def main() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    spec = importlib.util.spec_from_file_location("longrope", Path(sys.argv[1]) / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = module.LlamaLongRoPEScaledStartTokenRotaryEmbedding
    half = len(DIVISORS)

    def table(length, original, divisors, **more):
        made = kind(
            2 * half,
            max_position_embeddings=length,
            base=BASE,
            lambda_1=np.array(divisors),
            original_max_position_embeddings=original,
            **more,
        )
        return made.cos_cached, made.sin_cached

    unscaled = table(LENGTH, LENGTH, [1.0] * half)
    found = table(LENGTH, ORIGINAL, DIVISORS, start_token=START, cos_sin_origin=unscaled)
    cos, sin = (np.asarray(one)[0, 0, :, :half].tolist() for one in found)
    golden = {"commit": "1daa3dbab7f51e6e9eb182da62bb01429c38c348", "base": BASE, "divisors": DIVISORS, "start": START}
    golden |= {"length": LENGTH, "original_length": ORIGINAL, "cos": cos, "sin": sin}
    Path(__file__).with_name("longrope_start_golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()

"""The logits that transformers computes from a checkpoint. A script that needs no pe_lab and runs in its own process,
which frees its memory. `parity.py` runs it; it is never imported.

    python transformers_logits.py --model=DIR [--gguf-file=NAME] --tokens=tokens.npy --positions=positions.npy \
        --out=logits.npy

Tokens are [B, T], positions [P, T]: one pass over the tokens for each of P; logits [P, B, T, V]. The last three options
may be repeated.
"""

import argparse
import inspect
import sys
from pathlib import Path

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for name in ("tokens", "positions", "out"):
        parser.add_argument(f"--{name}", required=True, action="append")
    parser.add_argument("--gguf-file")
    args = parser.parse_args()
    # A library that imports `gguf` does not mean the package beside this file.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    import torch
    from transformers import AutoModelForCausalLM

    # The other implementations of transformers 4 ignore soft caps and sinks.
    options = {"attn_implementation": "eager"} | ({"gguf_file": args.gguf_file} if args.gguf_file else {})
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **options)
    except TypeError:  # transformers before 4.56
        model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float32, **options)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for *files, out in zip(args.tokens, args.positions, args.out, strict=True):
        tokens, positions = (torch.from_numpy(np.load(file).astype(np.int64)) for file in files)
        # With a mask, positions that are not consecutive are not taken for several documents.
        mask, passes = torch.ones_like(tokens), []
        with torch.inference_mode():
            for at in positions:
                places = {"position_ids": at.expand(tokens.shape)} if takes_positions else {}
                passes.append(model.eval()(tokens, attention_mask=mask, use_cache=False, **places).logits)
        np.save(out, torch.stack(passes).float().numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The logits that transformers computes from a checkpoint. A script that needs no pe_lab and runs in its own process,
which frees its memory. `parity.py` runs it; it is never imported.

    python transformers_logits.py --model=DIR [--gguf-file=NAME] --tokens=tokens.npy --out=logits.npy
"""

import argparse
import sys

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("model", "tokens", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--gguf-file")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": args.gguf_file} if args.gguf_file else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **options)
    except TypeError:  # transformers before 4.56
        model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float32, **options)
    tokens = torch.from_numpy(np.load(args.tokens).astype(np.int64))
    with torch.inference_mode():
        logits = model.eval()(tokens).logits
    np.save(args.out, logits.float().numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main())

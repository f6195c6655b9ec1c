"""The logits that llama.cpp computes from a GGUF file. A script that needs no pe_lab and runs in its own process.

    python llama_cpp_logits.py --model=FILE --tokens=tokens.npy --positions=positions.npy --out=logits.npy

Tokens are [B, T], positions [P, T], logits [P, B, T, V], as in transformers_logits.py; the last three options may be
repeated. It calls the C functions of the package `llama_cpp` (llama-cpp-python): computed on the CPU, with a float32
cache and without flash attention.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np


def logits_of(c, model, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B, T, V] of tokens [B, T] at positions [T]."""
    size, length = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model)), tokens.shape[1]
    found = np.zeros((*tokens.shape, size), np.float32)
    for sequence, logits in zip(tokens, found, strict=True):
        options = c.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = length + 64, length, length
        options.type_k = options.type_v = 0  # float32
        options.flash_attn_type = 0
        context = c.llama_init_from_model(model, options)
        batch = c.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for i, token in enumerate(sequence):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), int(positions[i]), 1, 1
            batch.seq_id[i][0] = 0
        if c.llama_decode(context, batch):
            raise SystemExit("llama_decode fails")
        for i in range(length):
            logits[i] = np.ctypeslib.as_array(c.llama_get_logits_ith(context, i), shape=(size,))
        c.llama_batch_free(batch)
        c.llama_free(context)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for name in ("tokens", "positions", "out"):
        parser.add_argument(f"--{name}", required=True, action="append")
    args = parser.parse_args()
    # A library that imports `gguf` does not mean the package beside this file.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    import llama_cpp.llama_cpp as c

    quiet = c.llama_log_callback(lambda kind, text, data: None)
    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    options = c.llama_model_default_params()
    options.n_gpu_layers = 0
    model = c.llama_model_load_from_file(args.model.encode(), options)
    if not model:
        raise SystemExit("llama.cpp cannot load it")
    for tokens, positions, out in zip(args.tokens, args.positions, args.out, strict=True):
        tokens, positions = np.load(tokens), np.load(positions)
        np.save(out, np.stack([logits_of(c, model, tokens, at) for at in positions]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The logits and the token ids of llama.cpp for GGUF files, each a job of a JSON file. Needs no pe_lab and no torch.

    PYTHONPATH=XLLAMACPP python tests/data/read_gguf_with_llama_cpp.py --bindings=LLAMA_CPP_PYTHON/llama_cpp jobs.json

A job has `model`, and either `tokens` and `out` (.npy files of [B, T] and [B, T, V]), or `texts` and `out` (JSON files:
strings, and for each its ids as a document and as a prompt, where special tokens are found and a first one is added).
Where llama.cpp does not load or evaluate a file, a .txt beside `out` says why. The library is that of
read_with_llama_cpp.py.
"""

import argparse
import ctypes
import json
from pathlib import Path

import numpy as np
from read_with_llama_cpp import library, logits_of


def ids_of(c, file: str, texts: list[str]) -> list[list[list[int]]]:
    """The ids of each text as a document and as a prompt."""
    options = c.llama_model_default_params()
    options.n_gpu_layers, options.vocab_only = 0, True
    model = c.llama_model_load_from_file(file.encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}")
    vocabulary = c.llama_model_get_vocab(model)

    def ids(text: str, prompt: bool) -> list[int]:
        encoded = text.encode()
        found = (c.llama_token * (len(encoded) + 16))()
        count = c.llama_tokenize(vocabulary, encoded, len(encoded), found, len(found), prompt, prompt)
        return list(found[:count])

    return [[ids(text, False), ids(text, True)] for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bindings", required=True, type=Path)
    parser.add_argument("jobs", type=Path)
    arguments = parser.parse_args()
    c = library(arguments.bindings)
    lines: list[str] = []

    @c.llama_log_callback
    def keep(level: int, text: bytes, data: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    c.llama_log_set(keep, ctypes.c_void_p(0))
    c.llama_backend_init()
    for job in json.loads(arguments.jobs.read_text()):
        lines.clear()
        out = Path(job["out"])
        try:
            if "texts" in job:
                texts = json.loads(Path(job["texts"]).read_text())
                out.write_text(json.dumps(ids_of(c, job["model"], texts)))
            else:
                np.save(out, logits_of(c, job["model"], np.load(job["tokens"])))
        except SystemExit as error:  # a result, too
            out.with_suffix(".txt").write_text(f"{error}\n{''.join(lines[-8:])}")


if __name__ == "__main__":
    main()

"""The logits of llama.cpp for Hugging Face directories, which its own converter makes GGUF files of first.

    python tests/data/read_with_llama_cpp.py --source=LLAMA_CPP --bindings=LLAMA_CPP_PYTHON/llama_cpp \
        --model=DIR --tokens=tokens.npy --out=logits.npy

What pe_lab/checkpoints/runtimes.py says of llama.cpp was measured with it. --source is a checkout of llama.cpp, or the
vendor/llama.cpp of a source distribution of llama-cpp-python, whose `llama_cpp` folder has the bindings. The library is
that of the package xllamacpp of the same month. Also needed: torch, and transformers of the version that the converter
asks for (5 has other keys for GPT-NeoX). --model, --tokens and --out may be repeated. Vocabularies are left out. Where
a model is not converted, loaded or evaluated, a .txt beside --out says why.
"""

import argparse
import ctypes
import importlib.util
import json
import logging
import os
import sys
import types
from pathlib import Path

import numpy as np


def convert(directory: str, file: str) -> None:
    """Writes a directory as a GGUF file in float32, by llama.cpp's converter."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase
    from conversion.llama import LlamaModel

    config = ModelBase.load_hparams(Path(directory), False)
    kind = get_model_class(config["architectures"][0])

    def without_vocabulary(self):
        self.gguf_writer.add_tokenizer_model("none")
        if self.model_arch not in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3):  # these write it themselves
            self.gguf_writer.add_vocab_size(config["vocab_size"])

    kind.set_vocab = LlamaModel.set_vocab = without_vocabulary  # Ministral 3's has one of the latter
    vocabulary = Path(directory) / "tokenizer.json"
    missing = not vocabulary.exists()
    if missing:  # the converter of Gemma 3 counts its entries
        entries = {"model": {"vocab": {str(n): n for n in range(config["vocab_size"])}}, "added_tokens": []}
        vocabulary.write_text(json.dumps(entries))
    try:
        kind(Path(directory), gguf.LlamaFileType.ALL_F32, Path(file), is_big_endian=False, eager=False).write()
    finally:
        if missing:
            vocabulary.unlink()


def library(bindings: Path):
    """llama.cpp's C functions: llama-cpp-python's bindings on xllamacpp's library."""
    shared = ctypes.CDLL(str(Path(importlib.util.find_spec("xllamacpp").origin).parent / "xllamacpp.abi3.so"))

    class Symbols:
        def __getattr__(self, name):  # the library has no functions for what only other programs need
            return getattr(shared, name, None) or shared.llama_time_us

    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(bindings)]
    sys.modules["llama_cpp"] = package
    import llama_cpp._ctypes_extensions

    llama_cpp._ctypes_extensions.load_shared_library = lambda *_, **__: Symbols()
    import llama_cpp._ggml
    import llama_cpp.llama_cpp

    return llama_cpp.llama_cpp


def logits_of(c, file: str, tokens: np.ndarray) -> np.ndarray:
    """[B, T, V], computed in float32 with a float32 cache."""
    options = c.llama_model_default_params()
    options.n_gpu_layers = 0
    model = c.llama_model_load_from_file(file.encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}")
    size, length = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model)), tokens.shape[1]
    found = np.zeros((*tokens.shape, size), np.float32)
    for sequence, logits in zip(tokens, found, strict=True):
        options = c.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = length + 64, length, length
        options.type_k = options.type_v = options.flash_attn_type = 0  # float32; off
        options.n_threads = options.n_threads_batch = 1
        context = c.llama_init_from_model(model, options)
        batch = c.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for i, token in enumerate(sequence):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
            batch.seq_id[i][0] = 0
        if c.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot evaluate {file}")
        for i in range(length):
            logits[i] = np.ctypeslib.as_array(c.llama_get_logits_ith(context, i), shape=(size,))
        c.llama_batch_free(batch)
        c.llama_free(context)
    c.llama_model_free(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--bindings", required=True, type=Path)
    for name in ("model", "tokens", "out"):
        parser.add_argument(f"--{name}", action="append", required=True)
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.source), str(arguments.source / "gguf-py")]
    logging.disable(logging.WARNING)
    from conversion.base import ModelBase  # noqa: F401  here, and not once more in every process

    os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger makes it, in ten seconds
    c = library(arguments.bindings)
    quiet = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    jobs = list(zip(arguments.model, arguments.tokens, arguments.out, strict=True))
    for directory in dict.fromkeys(arguments.model):
        own = [(tokens, out) for model, tokens, out in jobs if model == directory]
        # What llama.cpp finds wrong ends its process.
        if (child := os.fork()) == 0:
            read(c, directory, own)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            for _, out in own:
                Path(out).with_suffix(".txt").write_text(f"llama.cpp ended with status {status}")
        print(f"{directory}: done", flush=True)


def read(c, directory: str, jobs: list[tuple[str, str]]) -> None:
    """Writes the logits of each (tokens, out) of a model, or the error."""
    file = Path(f"{jobs[0][1]}.gguf")
    try:
        convert(directory, str(file))
        for tokens, out in jobs:
            np.save(out, logits_of(c, str(file), np.load(tokens)))
    except (Exception, SystemExit) as error:  # what a person would meet is a result
        for _, out in jobs:
            Path(out).with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""What vLLM computes of Hugging Face directories on a CPU: logits, windows, rotations and the longest sequence.

    PYTHON tests/data/read_with_vllm.py --packages=FOLDER --model=DIR --tokens=tokens.npy --length=0 --out=result.npz

FOLDER has vLLM's Python files, unpacked from its wheel; tests/runtime_environments.py starts it. Everything is vLLM's
own code, its model classes, its rotations in torch (`forward_native`), its loader and what derives lengths, but for:
the attention kernel (server_results.py), which gets the window and the scale that the model class passes; the compiled
`vllm._C`, whose operations the option `custom_ops: none` avoids; and the empty modules of `STUBBED`.
"""

import gc
import os
import sys
import tempfile
from pathlib import Path

import server_results
import torch
from stubbed_modules import StubbedModules

# Grammars of answers, statistics of use, an event loop, kernels.
STUBBED = ("xgrammar", "llguidance", "cpuinfo", "uvloop", "triton")


def prepare(packages: Path):
    scratch = tempfile.mkdtemp()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # --length beyond what it derives
        "VLLM_CACHE_ROOT": scratch,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    torch.accelerator.empty_cache = lambda: None  # there is no accelerator
    # Compiled activations that classes look up when they are made; they compute them in torch.
    operations = torch.library.Library("_C", "FRAGMENT")
    for name in ("gelu_new", "gelu_fast", "gelu_quick"):
        operations.define(f"{name}(Tensor out, Tensor input) -> ()")
    stubs = StubbedModules(*STUBBED)
    sys.path.insert(0, str(packages))
    import vllm.model_executor.layers.attention.attention as attention
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import registry
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

    registry._run_in_subprocess = lambda function: function()  # that process would have no stubs
    current: list[server_results.Seen] = []
    cached: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values by layer, for those that share them

    class Plain(AttentionImpl):
        def __init__(self, heads, head_size, scale, kv_heads=None, slopes=None, window=None, dtype="auto", cap=None,
                     attn_type="decoder", shared=None, sinks=None, **others):  # fmt: skip
            if attn_type != "decoder" or others:
                raise NotImplementedError(f"attention with {attn_type}, {others}")
            self.shared = shared
            self.num_heads, self.head_size, self.scale, self.num_kv_heads = heads, head_size, scale, kv_heads
            self.slopes = None if slopes is None else torch.tensor(slopes)
            self.window, self.cap, self.sinks = window or 0, cap, sinks

        def process_weights_after_loading(self, dtype):
            pass

        def forward(self, layer, query, key, value, kv_cache, metadata, output, **scales):
            current[0].attend(self.window)
            key, value = cached[self.shared] if self.shared else (key, value)
            cached[layer.layer_name] = key, value
            options = (self.scale, self.window, self.cap, self.slopes, self.sinks)
            return output.copy_(server_results.attend(query, key, value, *options))

    class Backend(AttentionBackend):
        forward_includes_kv_cache_update = True
        get_name = staticmethod(lambda: "CUSTOM")
        get_impl_cls = staticmethod(lambda: Plain)
        get_builder_cls = staticmethod(lambda: None)
        get_kv_cache_shape = staticmethod(lambda *_, **__: ())

    attention.get_attn_backend = lambda *_, **__: Backend
    started = [operations]  # a library lasts as long as its object
    gc.freeze()  # it collects garbage after each model, which takes longer than the model
    print(f"stubbed: {', '.join(sorted(stubs.used))}", flush=True)

    def compute(directory: str, sequences: list[torch.Tensor], length: int | None, seen: server_results.Seen) -> dict:
        options = {} if length is None else {"max_model_len": length}
        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            load_format="safetensors",
            compilation_config={"custom_ops": ["none"]},
            **options,
        ).create_engine_config()
        served = config.model_config.max_model_len
        with set_current_vllm_config(config):
            if len(started) == 1:
                init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
                started.append(True)
            model = get_model(vllm_config=config)
            seen.watch(model)
            metadata = dict.fromkeys(config.compilation_config.static_forward_context)
            current[:] = [seen]

            def forward(sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                with set_forward_context(metadata, config):
                    return model.compute_logits(model(sequence, positions, None))

            found = seen.read(sequences, served, forward)
        return {"max_length": served, "class_name": type(model).__name__, **found}

    return compute


if __name__ == "__main__":
    server_results.main(__doc__.partition("\n")[0], prepare)

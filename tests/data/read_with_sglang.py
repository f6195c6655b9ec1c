"""What SGLang computes of Hugging Face directories on a CPU: logits, windows, rotations and the longest sequence.

    PYTHON tests/data/read_with_sglang.py --packages=FOLDER --model=DIR --tokens=tokens.npy --length=0 --out=result.npz

FOLDER has SGLang's files, unpacked from its wheel; tests/runtime_environments.py starts it. Everything is SGLang's own
code, its model classes, its rotations in torch (`forward_native`), its loader and what derives lengths, but for: the
attention kernel (server_results.py), which gets the window and the scale that the model class passes, and has as many
tokens as SGLang's backends give it; and the empty modules of `STUBBED`.
"""

import os
import socket
import sys
from pathlib import Path

import server_results
import torch
from stubbed_modules import StubbedModules

# Kernels, images, notebooks, grammars of answers.
STUBBED = ("triton", "sgl_kernel", "flashinfer", "tvm_ffi", "torchvision", "IPython", "xgrammar")


def prepare(packages: Path):
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # --length beyond what it derives
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    stubs = StubbedModules(*STUBBED)
    sys.path.insert(0, str(packages))
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    class Plain(AttentionBackend):
        def __init__(self, seen):
            self.seen = seen

        def init_forward_metadata(self, batch):
            pass

        def forward(self, query, key, value, layer, batch, save_kv_cache=True, sinks=None, **others):
            if others:
                raise NotImplementedError(f"attention with {others}")
            window = layer.sliding_window_size
            # Its backends see the query and so many tokens before it.
            window = 0 if window is None or window < 0 else window + 1
            self.seen.attend(window)
            length = len(batch.input_ids)
            query = query.reshape(length, layer.tp_q_head_num, -1)
            key, value = (x.reshape(length, layer.tp_k_head_num, -1) for x in (key, value))
            options = (layer.scaling, window, layer.logit_cap, None, sinks)
            return server_results.attend(query, key, value, *options).reshape(length, -1)

    started = []
    print(f"stubbed: {', '.join(sorted(stubs.used))}", flush=True)

    def compute(directory: str, sequences: list[torch.Tensor], length: int | None, seen: server_results.Seen) -> dict:
        arguments = ServerArgs(
            model_path=directory,
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            context_length=length,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        config = ModelConfig.from_server_args(arguments)
        if not started:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            init_distributed_environment(
                backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=address
            )
            initialize_model_parallel()
            initialize_dp_attention(arguments)
            init_dp_gathered_buffer(config)
            started.append(True)
        model = get_model(
            model_config=config, load_config=LoadConfig(load_format="safetensors"), device_config=DeviceConfig("cpu")
        )
        seen.watch(model)

        def forward(sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            # As many requests of one new token as positions: SGLang computes the logits of the last token of each.
            batch = ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                batch_size=len(sequence),
                input_ids=sequence,
                req_pool_indices=positions,
                seq_lens=positions + 1,
                out_cache_loc=positions,
                seq_lens_sum=int((positions + 1).sum()),
                positions=positions,
                extend_seq_lens=torch.ones_like(positions),
                extend_seq_lens_cpu=[1] * len(sequence),
                extend_prefix_lens=positions,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            with forward_context(ForwardContext(attn_backend=Plain(seen))):
                return model(sequence, positions, batch).next_token_logits

        found = seen.read(sequences, config.context_len, forward)
        return {"max_length": config.context_len, "class_name": type(model).__name__, **found}

    return compute


if __name__ == "__main__":
    server_results.main(__doc__.partition("\n")[0], prepare)

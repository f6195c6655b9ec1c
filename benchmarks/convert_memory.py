"""Peak memory of pe_lab.convert on an 8B checkpoint, import and export, against its largest shard.

    python benchmarks/convert_memory.py                      # Llama-3.1-8B's shape in bfloat16, zeros, in four shards
    python benchmarks/convert_memory.py --layers=4 --random  # weights that do not compress; 3 GB of disk per layer

The bound is the largest shard plus 2 GB. Zeros are stored as a sparse file, which takes no disk, and need as much
memory as other values. The peak is ru_maxrss of the command's process, mapped files included.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

SHAPE = dict(d_model=4096, d_ff=14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128256)
BOUND = 2 * 10**9


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Llama-3.1-8B's weights."""
    D, F, V = SHAPE["d_model"], SHAPE["d_ff"], SHAPE["vocab_size"]
    Q, G = SHAPE["heads"] * SHAPE["head_dim"], SHAPE["kv_heads"] * SHAPE["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for n in range(layers):
        at = f"model.layers.{n}"
        found |= {
            f"{at}.input_layernorm.weight": (D,),
            f"{at}.mlp.down_proj.weight": (D, F),
            f"{at}.mlp.gate_proj.weight": (F, D),
            f"{at}.mlp.up_proj.weight": (F, D),
            f"{at}.post_attention_layernorm.weight": (D,),
            f"{at}.self_attn.k_proj.weight": (G, D),
            f"{at}.self_attn.o_proj.weight": (D, Q),
            f"{at}.self_attn.q_proj.weight": (Q, D),
            f"{at}.self_attn.v_proj.weight": (G, D),
        }
    return found | {"model.norm.weight": (D,), "lm_head.weight": (V, D)}


def write(directory: Path, layers: int, random: bool, shard: float) -> int:
    """A checkpoint in shards of at most `shard` bytes; returns the size of the largest."""
    directory.mkdir(parents=True)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensors(layers).items():
        needed = 2 * int(np.prod(shape))
        if size + needed > shard and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += needed
    rng = np.random.default_rng(0)
    files = {}
    for n, group in enumerate(groups, 1):
        file = directory / f"model-{n:05}-of-{len(groups):05}.safetensors"
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in group.items():
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            files[name] = file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            if random:
                for shape in group.values():
                    out.write(rng.standard_normal(int(np.prod(shape)), np.float32).astype(ml_dtypes.bfloat16).tobytes())
            else:
                out.truncate(8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": SHAPE["vocab_size"],
        "hidden_size": SHAPE["d_model"],
        "intermediate_size": SHAPE["d_ff"],
        "num_hidden_layers": layers,
        "num_attention_heads": SHAPE["heads"],
        "num_key_value_heads": SHAPE["kv_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return max(file.stat().st_size for file in directory.glob("*.safetensors"))


def measure(what: str, largest: int, arguments: list[str]) -> None:
    """Runs the command in its own process and prints its peak memory."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "pe_lab.convert", *arguments, "--parity=off"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"convert {what} ended with {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    bound = largest + BOUND
    print(
        f"{what:4} peak {peak / 1e9:.2f} GB in {time.monotonic() - started:.0f} s; "
        f"largest shard {largest / 1e9:.2f} GB, bound {bound / 1e9:.2f} GB: {'within' if peak <= bound else 'BEYOND'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shard-gb", type=float, default=5.0)
    parser.add_argument("--random", action="store_true", help="normal weights instead of zeros")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    try:
        largest = write(scratch / "hf", args.layers, args.random, args.shard_gb * 1e9)
        count = sum(int(np.prod(shape)) for shape in tensors(args.layers).values())
        print(f"{count / 1e9:.2f}B parameters, bfloat16, {'normal' if args.random else 'zeros'}")
        measure("in", largest, [f"--from=hf:{scratch / 'hf'}", f"--to={scratch / 'ours'}"])
        measure("out", largest, [f"--from={scratch / 'ours'}", f"--to=hf:{scratch / 'out'}"])

    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

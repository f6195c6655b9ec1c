"""Tokens per second of prefill and of cached decoding against transformers under torch, by turns.

    python benchmarks/decode.py --peer-python=/path/to/venv/bin/python
    python benchmarks/decode.py --from=runs/smollm2 --peer-model=exported/smollm2 --peer-python=...
    JAX_PLATFORMS=cuda python benchmarks/decode.py --cases=1x8192,16x2048 --out=benchmarks/results/h100

Both sides read the same prompts of token ids and continue them greedily with a KV cache, in float32 on as many threads
of a CPU, or in bfloat16 on a GPU; nothing ends a text early. Without `--from` the weights are random ones of
SmolLM2-135M's shape, the same on both sides. The logits after the first prompt are compared, so that what is timed is
the same work. On a GPU, decoding is also compared with the limit of a copy: a step reads the weights and the cache
once. The peer lives in a process of its own and works only while we wait, and the other way round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as `python benchmarks/decode.py` from a checkout that is not installed
sys.path.insert(0, str(HERE))

import jax
import jax.numpy as jnp
import numpy as np
from train_step import Peer, find_peer_python, llama_names

import pe_lab
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import UserError
from pe_lab.identity import machine, versions
from pe_lab.language_model import LanguageModel
from pe_lab.model import GenerationStatistics, Model, preset
from pe_lab.parallel import start_processes
from pe_lab.parallel.host_memory import keep_freed_memory
from pe_lab.positional import Rope, layers
from pe_lab.terminal import command

ROPE_BASE = 100000.0
LONGEST = 8192  # max_position_embeddings of the peer's config


class Ours:
    """`lm.generate` on token ids."""

    name = "pe_lab"

    def __init__(self, lm: LanguageModel):
        self.lm, self.versions = lm, versions()

    def run(self, prompts: np.ndarray, new: int) -> dict[str, Any]:
        """Seconds of prefill and decoding, processor seconds, and the new ids [B, new]."""
        found, cpu = GenerationStatistics(), time.process_time()
        ids = self.lm.generate(prompts, max_new_tokens=new, eos_ids=(), statistics=found)
        return {
            "prefill": found.prefill_seconds,
            "decode": found.decode_seconds,
            "compile": found.compile_seconds,
            "cpu": time.process_time() - cpu,
            "ids": np.stack(ids).tolist(),
        }

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        return np.asarray(self.lm.logits(prompt))[0, -1]


class DecodePeer(Peer):
    """transformers' `generate` in a subprocess."""

    def __init__(self, python: str, job: dict[str, Any], at: Path):
        self.name, self.log, self._at = "torch", at / "peer.log", at
        self.process = subprocess.Popen(
            [python, str(HERE / "decode_peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        ready = self._ask(job)
        self.parameters, self.versions = ready["parameters"], ready["versions"]

    def run(self, prompts: np.ndarray, new: int) -> dict[str, Any]:
        return self._ask({"do": "generate", "prompts": prompts.tolist(), "new": new})

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        return np.asarray(self._ask({"do": "logits", "prompts": [prompt.tolist()]})["logits"])


def dtype() -> str:
    """Of the computation, on this machine."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def random_model(tiny: bool) -> LanguageModel:
    """SmolLM2-135M's shape, or a tiny one, with random weights."""
    shape = {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "head_dim": 32} if tiny else {}
    config = Model(from_dict(ModelConfig, preset("smollm2_135m", dtype=dtype(), **shape), "smollm2_135m")).config
    described = layers(Rope(base=ROPE_BASE), config.layers)
    params = Model(config).init(jax.random.key(0))
    checkpoint = Checkpoint(Path("random"), 0, params, config, described, {})
    return LanguageModel(checkpoint, described)


def in_dtype(lm: LanguageModel) -> LanguageModel:
    """The model computing in this machine's dtype, whatever it was trained in."""
    model = dataclasses.replace(lm.checkpoint.model, dtype=dtype())
    return dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, model=model))


def peer_job(lm: LanguageModel, args: argparse.Namespace, threads: int, at: Path) -> dict[str, Any]:
    """What the peer is to load: an exported directory, or our weights under its names."""
    here = {"threads": threads, "dtype": dtype(), "device": "cpu" if jax.default_backend() == "cpu" else "cuda"}
    if args.peer_model:
        return here | {"model": str(Path(args.peer_model).resolve())}
    if args.source != "random":
        raise UserError("--from needs --peer-model: the same model as a Hugging Face directory.")
    np.savez(at / "weights.npz", **llama_names(lm.checkpoint.params))
    config = lm.config
    return here | {
        "weights": str(at / "weights.npz"),
        "config": {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ff,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "rms_norm_eps": config.norm_epsilon,
            "max_position_embeddings": LONGEST,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        },
    }


def compare(sides: Sequence[Any], prompt: np.ndarray) -> float:
    """The largest difference of next-token logits after a prompt; `UserError` beyond a part of their spread."""
    ours, theirs = (side.logits(prompt) for side in sides)
    difference = float(np.abs(ours - theirs).max())
    if difference > {"float32": 1e-2, "bfloat16": 5e-2}[dtype()] * np.ptp(ours):
        raise UserError(f"The sides' logits differ by {difference:.3g}: they do not read the same weights.")
    return difference


def measure(sides: Sequence[Any], prompts: np.ndarray, new: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Turns: every side once a round, each round beginning with another; the first round, which compiles, is left."""
    turns: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for i in range(rounds + 1):
        for j in range(len(sides)):
            side = sides[(i + j) % len(sides)]
            result = side.run(prompts, new)
            if i:
                turns[side.name].append(result)
    return turns


def summarize(turns: dict[str, list[dict[str, Any]]], batch: int, length: int, new: int) -> list[dict[str, Any]]:
    """One row a side: tokens/s of prefill and decode at the median turn and at the best, and our ratio to it."""
    rows = []
    for name, results in turns.items():
        row: dict[str, Any] = {"side": name, "cpu": statistics.median(r["cpu"] for r in results)}
        for what, tokens in (("prefill", batch * length), ("decode", batch * (new - 1))):
            seconds = [r[what] for r in results]
            row[what], row[f"{what}_best"] = tokens / statistics.median(seconds), tokens / min(seconds)
        rows.append(row)
    for row in rows:
        for what in ("prefill", "decode", "prefill_best", "decode_best"):
            row[f"{what}_ratio"] = rows[0][what] / row[what]
        row["cpu_ratio"] = row["cpu"] / rows[0]["cpu"]
    return rows


def copy_limit(lm: LanguageModel, batch: int, tokens: float) -> float:
    """New tokens a second if a step read the weights and the caches of so many tokens as fast as a copy does."""
    from attention_kernels import ceilings
    from attention_tools import Plan

    config, size = lm.config, jnp.dtype(dtype()).itemsize
    cache = 2 * config.layers * config.kv_heads * config.head_dim * tokens * batch
    weights = Model(config).num_parameters
    return batch * ceilings(Plan(tiny=dtype() == "float32"))["copy"] / (size * (weights + cache))


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':8}{'prefill':>10}{'best':>10}{'ours/this':>11}{'of best':>9}", end="")
    print(f"{'decode':>10}{'best':>10}{'ours/this':>11}{'of best':>9}{'CPU s':>8}{'CPU time':>10}")
    for r in rows:
        line = f"{r['side']:8}"
        for what in ("prefill", "decode"):
            line += f"{r[what]:10.1f}{r[what + '_best']:10.1f}{r[what + '_ratio']:11.2f}{r[what + '_best_ratio']:9.2f}"
        print(line + f"{r['cpu']:8.1f}{r['cpu_ratio']:10.2f}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", default="random", help="what pe_lab.load reads, or random weights")
    parser.add_argument("--peer-model", default="", help="the same model as a Hugging Face directory")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--ours-only", action="store_true", help="no peer")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of SmolLM2-135M's shape")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side, after one that is not counted")
    parser.add_argument("--cases", default="1x512,1x2048,4x512", help="rows x prompt tokens, with commas")
    parser.add_argument("--new", type=int, default=128, help="new tokens a row")
    parser.add_argument("--out", default=str(HERE / "results" / "cpu"), help="folder of results; empty: none")
    args = parser.parse_args(argv)
    try:
        args.cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
        if any(len(case) != 2 or min(case) < 1 for case in args.cases):
            raise ValueError
    except ValueError:
        raise UserError("--cases is rows x tokens with commas, such as 1x512,4x2048.") from None
    if args.rounds < 1 or args.new < 2:
        raise UserError("--rounds must be at least 1 and --new at least 2.")
    return args


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    available = sorted(os.sched_getaffinity(0))
    threads = args.threads or len(available)
    if not 1 <= threads <= len(available):
        raise UserError(f"--threads is {threads}; this machine offers {len(available)}.")
    # XLA takes a thread for each processor it may run on; the peer inherits the same set.
    os.sched_setaffinity(0, available[:threads])
    python = None if args.ours_only else find_peer_python(args.peer_python)
    keep_freed_memory()
    start_processes()
    lm = random_model(args.tiny) if args.source == "random" else in_dtype(pe_lab.load(args.source))
    rng, cases = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        sides: list[Any] = [Ours(lm)]
        try:
            if python:
                sides.append(DecodePeer(python, peer_job(lm, args, threads, Path(folder)), Path(folder)))
            difference = compare(sides, rng.integers(0, lm.config.vocab_size, 64)) if python else None
            for batch, length in args.cases:
                prompts = rng.integers(0, lm.config.vocab_size, (batch, length)).astype(np.int32)
                turns = measure(sides, prompts, args.new, args.rounds)
                ids = [np.asarray(results[-1].pop("ids")) for results in turns.values()]
                same = float((ids[0] == ids[-1]).mean())
                turns = {n: [{k: v for k, v in r.items() if k != "ids"} for r in rs] for n, rs in turns.items()}
                rows = summarize(turns, batch, length, args.new)
                print(f"\n{batch} x {length} tokens, {args.new} new ones each, {dtype()}, {threads} threads", end="")
                print(f"; {100 * same:.0f}% of the tokens are the same" if python else "")
                show(rows)
                case = {"batch": batch, "length": length, "same": same, "rows": rows, "turns": turns}
                if args.tiny or dtype() == "bfloat16":
                    limit = case["copy_limit"] = copy_limit(lm, batch, length + args.new / 2)
                    print(f"decoding / the limit of a copy, {limit:,.0f} tokens/s: {rows[0]['decode'] / limit:.2f}")
                cases.append(case)
        finally:
            for side in sides[1:]:
                side.stop()
    if args.out:
        of = f"threads{threads}" if dtype() == "float32" else "gpu"
        path = Path(args.out) / f"decode-{of}-jax{jax.__version__}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "source": args.source,
            "model": dataclasses.asdict(lm.config),
            "new": args.new,
            "threads": threads,
            "logit_difference": difference,
            "cases": cases,
            "versions": {key: value for side in sides for key, value in side.versions.items()},
            "machine": machine(),
            "load_average": os.getloadavg(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

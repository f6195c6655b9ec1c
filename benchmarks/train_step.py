"""Tokens per second of pe_lab's train step against transformers' Llama under torch, measured alternately.

    python benchmarks/train_step.py --peer-python=/path/to/venv/bin/python
    python benchmarks/train_step.py --against=/path/to/checkout     # or against another commit of pe_lab
    python benchmarks/train_step.py --stability     # or against its own step with a policy that skips spikes
    python benchmarks/train_step.py --bfloat16 --shape=smollm2      # or against its own step in bfloat16

Both sides start from the same weights and take the same AdamW steps in float32 on the same batch, with the same
number of threads. The losses of their first steps are compared, to check that the work is the same. The peer runs in
another process (with another Python, if `--peer-python` or the environment's PE_LAB_PEER names one). Only one side
computes at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as `python benchmarks/train_step.py` from a checkout that is not installed

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig, StabilityConfig
from pe_lab.errors import UserError, did_you_mean
from pe_lab.identity import machine, versions
from pe_lab.model import Model, train_flops_per_token
from pe_lab.parallel import AxisRules, make_mesh, start_processes
from pe_lab.parallel.host_memory import keep_freed_memory
from pe_lab.positional import Rope, build_schedule, layers
from pe_lab.terminal import command, table
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.stability import skip_policy
from pe_lab.training.step import compile_train_step, init_state, make_shardings, place_batch


class Shape(NamedTuple):
    """A model, trained on batches of `batch` windows of `length` tokens."""

    model: ModelConfig
    batch: int
    length: int
    steps: int  # in one measurement


def _model(vocab_size: int, layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(vocab_size, layers, d_model, d_ff, heads, kv_heads, dtype="float32", scan=False)


SHAPES = {
    # `make demo`'s model, without QK-norm, which Llama lacks.
    "demo": Shape(_model(640, 3, 64, 256, 4, 4), 32, 64, 20),
    "base": Shape(_model(4096, 4, 256, 768, 4, 2), 8, 256, 3),
    # Four of the thirty layers of SmolLM2-135M, and its vocabulary.
    "smollm2": Shape(_model(49152, 4, 576, 1536, 9, 3), 1, 2048, 1),
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0)
ROPE_BASE = 10000.0


class Side(Protocol):
    """A compiled train step. `run` takes steps and returns their {"seconds", "cpu", "losses"}."""

    name: str
    parameters: int
    versions: dict[str, str]

    def run(self, steps: int) -> dict[str, Any]: ...


class Ours:
    """The train step of `pe_lab.train`."""

    def __init__(
        self,
        shape: Shape,
        params: Any,
        batch: dict[str, np.ndarray],
        stability: StabilityConfig | None = None,
        positional: Any = None,
    ):
        self.name, self.versions = "pe_lab" if stability is None else "with skips", versions()
        if positional is None and shape.model.dtype != "float32":
            self.name = shape.model.dtype
        policy = None if stability is None else skip_policy(stability)
        model = Model(shape.model)
        self.parameters = model.num_parameters
        mesh, rules = make_mesh(MeshConfig()), AxisRules()
        optimizer = make_optimizer(OPTIMIZER, 10**6, model.axes)
        shardings = make_shardings(model, optimizer, mesh, rules, policy)
        config = model.config
        self.schedule = build_schedule(
            layers(positional or Rope(base=ROPE_BASE), config.layers), config.heads, config.kv_heads, config.head_dim
        )
        own = jax.tree.map(jnp.copy, params)  # the step donates its state
        self.state = jax.device_put(init_state(model, optimizer, own, policy), shardings.state)
        self.batch = place_batch(batch, shardings.batch)
        self.step = compile_train_step(model, optimizer, mesh, rules, policy=policy)

    def run(self, steps: int) -> dict[str, Any]:
        start, cpu = time.perf_counter(), time.process_time()
        losses = []
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch, self.schedule)
            losses.append(metrics["loss"])
        jax.block_until_ready(self.state)
        losses = [float(loss) for loss in losses]
        return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, "losses": losses}


class Peer:
    """A train step in a subprocess: transformers' Llama, eager or compiled, or that of another checkout."""

    def __init__(self, name: str, command: Sequence[str], job: dict[str, Any], log: Path):
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self.log = log
        ready = self._ask(job)
        self.parameters, self.versions = ready["parameters"], ready["versions"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self.process.wait()
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            status = self.process.returncode
            raise UserError(f"The peer '{self.name}' stopped (exit status {status}):\n{tail}") from None

    def run(self, steps: int) -> dict[str, Any]:
        return self._ask({"steps": steps})

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=60)


def llama_names(params: Any) -> dict[str, np.ndarray]:
    """The parameters under transformers' names, in its layout [out, in]."""
    embedder, stacked = params["token_embedder"], params["layers"]
    D = embedder["embedding"].shape[1]
    named = {"model.embed_tokens.weight": embedder["embedding"], "model.norm.weight": embedder["final_norm"]["scale"]}
    for n in range(stacked["mlp"]["gate"].shape[0]):
        block = jax.tree.map(lambda x, n=n: np.asarray(x[n]), stacked)
        attention, mlp = block["attention"], block["mlp"]
        of_layer = {
            "input_layernorm": block["attention_norm"]["scale"],
            "post_attention_layernorm": block["mlp_norm"]["scale"],
            "self_attn.q_proj": attention["query"].reshape(D, -1).T,
            "self_attn.k_proj": attention["key"].reshape(D, -1).T,
            "self_attn.v_proj": attention["value"].reshape(D, -1).T,
            "self_attn.o_proj": attention["out"].reshape(-1, D).T,
            "mlp.gate_proj": mlp["gate"].T,
            "mlp.up_proj": mlp["up"].T,
            "mlp.down_proj": mlp["down"].T,
        }
        named |= {f"model.layers.{n}.{name}.weight": array for name, array in of_layer.items()}
    return {name: np.ascontiguousarray(array) for name, array in named.items()}


def llama_config(shape: Shape) -> dict[str, Any]:
    """The keyword arguments of transformers' LlamaConfig."""
    model = shape.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": shape.length,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
    }


def find_peer_python(given: str) -> str:
    """The Python to run the peer with; `UserError` if there are no torch and transformers."""
    python = given or os.environ.get("PE_LAB_PEER", "")
    if python:
        check = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True)
        if check.returncode:
            raise UserError(f"{python} cannot import torch and transformers:\n{check.stderr.strip()[-500:]}")
        return python
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return sys.executable
    raise UserError(
        "The peer needs torch and transformers, and this Python has not both. Give a Python that has them as "
        "--peer-python (or in PE_LAB_PEER), or pass --ours-only."
    )


def prepare(shape: Shape) -> tuple[Any, dict[str, np.ndarray]]:
    """Initial parameters and one batch of random tokens, the same for every side."""
    params = Model(shape.model).init(jax.random.key(0))
    windows = np.random.default_rng(0).integers(0, shape.model.vocab_size, (shape.batch, shape.length + 1))
    windows = windows.astype(np.int32)
    batch = {"tokens": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}
    return params, batch | {"weights": np.ones(batch["tokens"].shape, np.float32)}


def peer_job(shape: Shape, params: Any, batch: dict[str, np.ndarray], threads: int, at: Path) -> dict[str, Any]:
    """What a peer is to train, with weights and batch in files."""
    np.savez(at / "weights.npz", **llama_names(params))
    np.savez(at / "batch.npz", tokens=batch["tokens"], targets=batch["targets"])
    return {
        "config": llama_config(shape),
        "weights": str(at / "weights.npz"),
        "batch": str(at / "batch.npz"),
        "threads": threads,
        "optimizer": dataclasses.asdict(OPTIMIZER),
        "optimizer_kind": "fused",
    }


def start_peers(
    kinds: Sequence[str], python: str, shape: Shape, params: Any, batch: dict[str, np.ndarray], threads: int, at: Path
) -> list[Peer]:
    """Starts the peers. `kinds`: of eager, compiled; both with AdamW's fused form, torch's fastest."""
    job = peer_job(shape, params, batch, threads, at)
    command = [python, str(HERE / "train_step_peer.py")]
    return [Peer(f"torch {kind}", command, job | {"compile": kind == "compiled"}, at / f"{kind}.log") for kind in kinds]


def check_same(sides: Sequence[Side], first: dict[str, list[float]]) -> None:
    """`UserError` unless all sides have as many parameters and the same losses over the first steps."""
    ours = sides[0]
    for side in sides[1:]:
        if side.parameters != ours.parameters:
            raise UserError(f"{side.name} has {side.parameters} parameters and pe_lab {ours.parameters}.")
        if not np.allclose(first[side.name], first[ours.name], rtol=1e-2 if side.name == "bfloat16" else 1e-4):
            raise UserError(f"The first losses differ: {side.name} {first[side.name]}, pe_lab {first[ours.name]}.")


def measure(sides: Sequence[Side], rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Seconds per step of each side in each round of `steps` steps. Each round begins with another side."""
    timings: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for i in range(rounds):
        for j in range(len(sides)):
            side = sides[(i + j) % len(sides)]
            result = side.run(steps)
            timings[side.name].append({"seconds": result["seconds"] / steps, "cpu": result["cpu"] / steps})
    return timings


def summarize(shape: Shape, sides: Sequence[Side], timings: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row per side: median and best speed, arithmetic, processor time, and the ratios of pe_lab to the side."""
    tokens = shape.batch * shape.length
    flops = train_flops_per_token(Model(shape.model).config, shape.length)
    rows: list[dict[str, Any]] = []
    for side in sides:
        seconds = [one["seconds"] for one in timings[side.name]]
        rows.append(
            {
                "side": side.name,
                "tokens_per_second": tokens / statistics.median(seconds),
                "tokens_per_second_best": tokens / min(seconds),
                "gflops_full": flops.full * tokens / statistics.median(seconds) / 1e9,
                "gflops_causal": flops.causal * tokens / statistics.median(seconds) / 1e9,
                "cpu_ms_per_step": 1e3 * statistics.median(one["cpu"] for one in timings[side.name]),
            }
        )
    for row in rows:
        row["ours_over_this"] = rows[0]["tokens_per_second"] / row["tokens_per_second"]
        row["ours_over_this_best"] = rows[0]["tokens_per_second_best"] / row["tokens_per_second_best"]
        row["cpu_time_over_ours"] = row["cpu_ms_per_step"] / rows[0]["cpu_ms_per_step"]
    return rows


def result_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text. `ours/this` and `of best` compare speed; `CPU time` is that of this side over pe_lab's."""
    columns = {
        "tokens/s": ("tokens_per_second", ".0f"),
        "best": ("tokens_per_second_best", ".0f"),
        "GFLOP/s": ("gflops_full", ".1f"),
        "CPU ms/step": ("cpu_ms_per_step", ".1f"),
        "ours/this": ("ours_over_this", ".2f"),
        "of best": ("ours_over_this_best", ".2f"),
        "CPU time": ("cpu_time_over_ours", ".2f"),
    }
    cells = [[row["side"], *(format(row[key], style) for key, style in columns.values())] for row in rows]
    return table(["", *columns], cells)


def run_shape(name: str, args: argparse.Namespace, threads: int, python: str | None) -> dict[str, Any]:
    """Measures one shape on all sides, and returns the record that is written to a file."""
    shape = SHAPES[name]
    params, batch = prepare(shape)
    kinds = args.peers.split(",") if python else []
    steps = args.steps or shape.steps
    with tempfile.TemporaryDirectory() as folder:
        sides: list[Side] = []
        peers: list[Peer] = []
        try:
            if args.against:  # both in processes of their own
                for side, checkout in (("pe_lab", str(HERE.parent)), ("the checkout", args.against)):
                    command = [sys.executable, str(HERE / "train_step_checkout.py"), checkout]
                    peers.append(Peer(side, command, {"shape": name}, Path(folder) / f"{side}.log"))
            else:
                sides.append(Ours(shape, params, batch))
                if args.stability:
                    sides.append(Ours(shape, params, batch, StabilityConfig(on_nonfinite="skip", on_spike="skip")))
                if args.bfloat16:
                    narrow = shape._replace(model=dataclasses.replace(shape.model, dtype="bfloat16"))
                    sides.append(Ours(narrow, params, batch))
            if python:
                peers = start_peers(kinds, python, shape, params, batch, threads, Path(folder))
            sides += peers
            first = {side.name: side.run(3)["losses"] for side in sides}
            check_same(sides, first)
            timings = measure(sides, args.rounds, steps)
        finally:
            for peer in peers:
                peer.stop()
    found = {key: value for side in sides for key, value in side.versions.items()}
    rows = summarize(shape, sides, timings)
    print(
        f"\n{name}: {sides[0].parameters:,} parameters, {shape.batch} x {shape.length} tokens a step, float32, "
        f"{threads} threads; losses of the first steps: {', '.join(f'{x:.4f}' for x in first['pe_lab'])}"
    )
    print(result_table(rows), flush=True)
    if args.stability:
        pairs = zip(timings["with skips"], timings["pe_lab"], strict=True)
        ratio = statistics.median(one["cpu"] / other["cpu"] for one, other in pairs)
        print(
            f"processor time of a step with the policy over one without: {ratio:.4f} (median of {args.rounds} rounds)"
        )
    return {
        "shape": name,
        "model": dataclasses.asdict(shape.model),
        "batch": shape.batch,
        "length": shape.length,
        "threads": threads,
        "parameters": sides[0].parameters,
        "first_losses": first,
        "rows": rows,
        "turns": timings,
        "steps_per_turn": steps,
        "versions": found,
        "machine": machine(),
        "load_average": os.getloadavg(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo,base", help=f"of {', '.join(SHAPES)}; several with commas")
    parser.add_argument("--peers", default="eager,compiled", help="of eager, compiled")
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--ours-only", action="store_true", help="no peer")
    parser.add_argument("--against", default="", help="another checkout of pe_lab as the only peer; writes no file")
    parser.add_argument(
        "--stability", action="store_true", help="our step with stability.on_spike=skip as the only peer; no file"
    )
    parser.add_argument("--bfloat16", action="store_true", help="our step in bfloat16 as the only peer; no file")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are processors")
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each side")
    parser.add_argument("--steps", type=int, default=0, help="steps in a measurement; 0: the shape's own")
    parser.add_argument("--quick", action="store_true", help="one round of one step: does it run?")
    parser.add_argument("--out", default=str(HERE / "results" / "cpu"), help="folder of results; empty: none")
    args = parser.parse_args(argv)
    for option, allowed in (("shape", list(SHAPES)), ("peers", ["eager", "compiled"])):
        for value in getattr(args, option).split(","):
            if value not in allowed:
                raise UserError(f"--{option}={value} is not known. {did_you_mean(value, allowed)}")
    if args.quick:
        args.rounds = args.steps = 1
    if args.against:
        args.against = str(Path(args.against).resolve())
        if not (Path(args.against) / "pe_lab").is_dir():
            raise UserError(f"--against={args.against} is no checkout of pe_lab: it has no folder pe_lab.")
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}; it must be at least 1.")
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
    no_peer = args.ours_only or args.against or args.stability or args.bfloat16
    python = None if no_peer else find_peer_python(args.peer_python)
    keep_freed_memory()
    start_processes()
    for name in args.shape.split(","):
        result = run_shape(name, args, threads, python)
        if args.out and not args.quick and not args.against and not args.stability and not args.bfloat16:
            path = Path(args.out) / f"train_step-{name}-threads{threads}-jax{jax.__version__}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

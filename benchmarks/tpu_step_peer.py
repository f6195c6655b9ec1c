"""MaxText's train step, compiled for a TPU slice that is not there: what its compiler makes of it, in two files.

    python3.12 -m venv venv
    venv/bin/pip install jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.51 flax==0.12.8 optax orbax-checkpoint absl-py aqtp \
        drjax grain huggingface_hub jaxtyping jinja2 ml-collections ml_goodput_measurement omegaconf pathwaysutils \
        pillow pydantic qwix sentencepiece sympy tiktoken tokamax transformers
    git clone https://github.com/AI-Hypercomputer/maxtext && git -C maxtext checkout e591f30cbbf2
    venv/bin/python benchmarks/tpu_step_peer.py --maxtext=maxtext --shape=494m --out=DIR

A `--shape` is one of the table below, then what is different: `8b-8` computes the loss in 8 tiles, `8b-8-tokamax` also
takes tokamax's splash kernel, `8b-8-nowrap` leaves out the links that close the slice to a torus, `8b-8-full` keeps
only the inputs of the layers, `8b-8-iota` embeds by a product with one-hot vectors, and `8b-8-blocks` has the blocks of
splash and its backward kernel as MaxText's own recipe for Llama 3.1 8B. `--flags` are libtpu's flags; `--tag` then ends
the names of the files.

Writes DIR/SHAPE.hlo.txt.gz, the program after all passes of the compiler, and DIR/SHAPE.json: MaxText's arguments and
its whole config, memory of a chip, FLOPs, seconds, versions, and the compiler's flags that do not have their default
values. A step that does not fit leaves the JSON alone, with the compiler's error. MaxText's own `train_compile` does
everything; nothing of it is replaced. MaxText cannot leave segment ids out of the batch and of the attention kernel, so
they are in these programs.

The program is `as_text` of the executable. jaxlib 0.10.2 cannot read all that libtpu 0.0.51 makes (asynchronous updates
with several operands); then it is the text that the compiler itself writes, and `program_from` in the JSON says so. The
two differ in writing alone: what `as_text` calls `slice-start` is an `async-start` of a computation there.

Imports nothing of pe_lab: MaxText needs Python 3.12 and an environment of its own.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The same for every shape; where MaxText's default is the same, it is named all the same.
COMMON = {
    "run_name": "tpu_step_peer",
    "compile_topology_num_slices": 1,
    "dataset_type": "synthetic",
    "packing": False,  # of synthetic data this changes nothing
    "enable_checkpointing": False,
    "log_config": False,
    "jax_cache_dir": "",  # or the second compilation takes no time
    "dtype": "bfloat16",
    "weight_dtype": "float32",
    "mu_dtype": "float32",
    "opt_type": "adamw",
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "gradient_clipping_threshold": 1.0,
    "enable_dropout": False,
    "scan_layers": True,
    "remat_policy": "minimal",
    "attention": "flash",
    "use_tokamax_splash": False,  # then JAX's splash, the Pallas kernel; MaxText's use_jax_splash is another program
    "allow_split_physical_axes": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "494m": {
        "compile_topology": "v5e-256",
        "base_num_decoder_layers": 24,
        "base_emb_dim": 896,
        "base_mlp_dim": 4864,
        "base_num_query_heads": 14,
        "base_num_kv_heads": 2,
        "head_dim": 64,
        "vocab_size": 151936,
        "mlp_activations": "['silu','linear']",
        "decoder_block": "llama2",  # that of qwen2 has the same operations and biases
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
        "normalization_layer_epsilon": 1e-6,
        "rope_max_timescale": 1_000_000,
        "max_target_length": 1024,
        "per_device_batch_size": 4,
        "ici_data_parallelism": 32,
        "ici_fsdp_parallelism": 8,
    },
    "1.5b": {
        "compile_topology": "v6e-256",
        "model_name": "qwen2.5-1.5b",
        "max_target_length": 4096,
        "per_device_batch_size": 4,
        "ici_data_parallelism": 16,
        "ici_fsdp_parallelism": 16,
    },
    "8b": {
        "compile_topology": "v5p-128",  # 64 chips: MaxText counts cores
        "model_name": "llama3.1-8b",
        "max_target_length": 8192,
        "per_device_batch_size": 2,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": 64,
    },
    "7b": {
        "compile_topology": "v5p-256",
        "model_name": "llama2-7b",
        "max_target_length": 4096,
        "per_device_batch_size": 4,
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 64,
    },
}
BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
CHANGES: dict[str, dict[str, Any]] = {
    "8": {"num_vocab_tiling": 8},
    "tokamax": {"use_tokamax_splash": True},
    "full": {"remat_policy": "full"},
    "iota": {"use_iota_embed": True},
    "blocks": {f"sa_block_{name}": 2048 for name in BLOCKS} | {"sa_use_fused_bwd_kernel": True},
    "nowrap": {},  # no argument of MaxText: the topology is asked for without its links
}
# As pe_lab/parallel/topology.py says. The table in MaxText says the same today.
WRAP = {
    "v5e-256": (True, True, False),
    "v6e-256": (True, True, False),
    "v5p-128": (True, True, True),
    "v5p-256": (True, True, True),
}
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "tokamax", "qwix", "numpy")
# Compiling uses no chip, so several processes may do it at once; without a TPU, libtpu would otherwise ask a metadata
# server what machine this is.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def arguments(shape: str, flags: str = "") -> dict[str, Any]:
    """MaxText's arguments for a shape of `--shape`.

    Raises:
      ValueError: there is no such shape, or no such change of one.
    """
    name, *changes = shape.split("-")
    if name not in SHAPES or set(changes) - CHANGES.keys():
        raise ValueError(f"--shape={shape}: shapes are {', '.join(SHAPES)}, followed by -{', -'.join(CHANGES)}")
    found = COMMON | SHAPES[name]
    for change in changes:
        found |= CHANGES[change]
    return found | ({"compile_xla_flags": flags} if flags else {})


class Watch:
    """Looks on while MaxText compiles: keeps what it asked for, how long the compiler took, and what it made."""

    def __init__(self, wrap: tuple[bool, ...] | None):
        self.wrap = wrap
        self.seconds: dict[str, float] = {}
        self.topology: dict[str, Any] = {}
        self.config: dict[str, str] = {}
        self.compiled: Any = None

    def install(self, train_compile: Any) -> None:
        """Puts itself between `train_compile` and the two functions of JAX and one of its own that it calls."""
        import jax

        describe, build = train_compile.get_topology_desc, train_compile.jit_and_compile
        compile_lowered = jax.stages.Lowered.compile

        def get_topology_desc(**asked: Any) -> Any:
            used = {key: value for key, value in asked.items() if key != "wrap"}
            used |= {"wrap": self.wrap} if self.wrap else {}
            self.topology = {"maxtext": asked, "used": used}
            return describe(**used)

        def compile(lowered: Any, *args: Any, **kwargs: Any) -> Any:
            start, start_cpu = time.perf_counter(), time.process_time()
            try:
                return compile_lowered(lowered, *args, **kwargs)
            finally:
                self.seconds["compile"] = time.perf_counter() - start
                self.seconds["compile_processor"] = time.process_time() - start_cpu

        def jit_and_compile(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config", args[8] if len(args) > 8 else None)
            self.config = {key: str(value) for key, value in sorted(config.get_keys().items())}
            start = time.perf_counter()
            try:
                self.compiled = build(*args, **kwargs)
            finally:
                both = time.perf_counter() - start
                self.seconds["trace_and_lower"] = both - self.seconds.get("compile", 0.0)
            return self.compiled

        train_compile.get_topology_desc = get_topology_desc
        train_compile.jit_and_compile = jit_and_compile
        jax.stages.Lowered.compile = compile


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git(directory: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *command], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def load(directory: Path) -> Any:
    """MaxText's `train_compile`.

    Raises:
      FileNotFoundError: `directory` has no MaxText.
      ImportError: this Python lacks something that it imports.
    """
    if not (directory / "src/maxtext/trainers/pre_train/train_compile.py").is_file():
        raise FileNotFoundError(
            f"--maxtext={directory}: no src/maxtext/trainers/pre_train/train_compile.py there. {sys.argv[0]} says in "
            "its first lines how to get MaxText."
        )
    sys.path.insert(0, str(directory / "src"))
    try:
        from maxtext.trainers.pre_train import train_compile
    except ImportError as error:
        raise ImportError(
            f"{sys.executable} cannot import MaxText: {error}. {sys.argv[0]} says in its first lines what to install."
        ) from error
    return train_compile


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of one chip: what `memory_analysis` has of arguments, output, alias, temp, generated code, and the peak."""
    analysis = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {name: getattr(analysis, f"{name}_size_in_bytes") for name in names}
    return found | {"peak": getattr(analysis, "peak_memory_in_bytes", 0)}


def program(compiled: Any, dump: Path) -> tuple[str, str]:
    """The program as text, and where it is from: `as_text`, or the compiler's `dump`."""
    import jax

    try:
        return compiled.as_text(), "as_text"
    except jax.errors.JaxRuntimeError as error:
        (file,) = dump.glob("*jit_train_step*.after_optimizations.txt")
        return file.read_text(), f"dump ({str(error).splitlines()[0]})"


def changed_flags(dump: Path) -> dict[str, str]:
    """The compiler's flags that do not have their default values; its dump has a comment above each of them."""
    text = "".join(file.read_text() for file in dump.glob("*jit_train_step*.tpu_comp_env.txt"))
    return dict(re.findall(r"^#.* non-default value.*\n(\w+): (.*)$", text, re.MULTILINE))


def measure(train_compile: Any, directory: Path, shape: str, flags: str, dump: Path) -> tuple[dict[str, Any], str]:
    """What the JSON holds, and the text of the program; "" if it did not compile. `dump` is where the compiler's is."""
    values = arguments(shape, flags)
    argv = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    watch = Watch(None if "nowrap" in shape.split("-") else WRAP[values["compile_topology"]])
    watch.install(train_compile)
    error, text = "", ""
    try:
        train_compile.main(["train_compile", str(directory / "src/maxtext/configs/base.yml"), *argv])
    except Exception as failed:
        if watch.compiled is not None or "compile" not in watch.seconds:
            raise  # not the compiler's
        error = str(failed)
    found = {
        "shape": shape,
        "arguments": argv,
        "topology": watch.topology,
        "seconds": {key: round(value, 2) for key, value in watch.seconds.items()},
        "versions": {name: _version(name) for name in PACKAGES} | {"python": sys.version.split()[0]},
        "maxtext": {"commit": _git(directory, "rev-parse", "HEAD"), "changed": _git(directory, "status", "--short")},
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", "").strip(),
        "changed_flags": changed_flags(dump),
    }
    if error:
        found["error"] = error
    else:
        cost = watch.compiled.cost_analysis()
        # Both count the body of a loop once: they are no measure of the step.
        found["cost_analysis"] = {key: cost.get(key, 0.0) for key in ("flops", "bytes accessed")}
        found["memory"] = memory(watch.compiled)
        text, found["program_from"] = program(watch.compiled, dump)
    return found | {"config": watch.config}, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--maxtext", type=Path, required=True, help="a checkout of MaxText")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, followed by -{', -'.join(CHANGES)}")
    parser.add_argument("--flags", default="", help="flags of libtpu, as in MaxText's compile_xla_flags")
    parser.add_argument("--tag", default="flags", help="with --flags: the end of the files' names")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write to")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as dump:
        # MaxText, without these flags of XLA, would have it dump to /tmp/xla_dump.
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_train_step"
        try:
            arguments(options.shape)
            train_compile = load(options.maxtext.resolve())
        except (ValueError, FileNotFoundError, ImportError) as error:
            print(error, file=sys.stderr)
            return 2
        found, text = measure(train_compile, options.maxtext.resolve(), options.shape, options.flags, Path(dump))
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.shape + (f"-{options.tag}" if options.flags else "")
    if text:
        with gzip.GzipFile(options.out / f"{name}.hlo.txt.gz", "wb", mtime=0) as file:  # equal programs, equal files
            file.write(text.encode())
    (options.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if not text:
        print(f"{name}: does not compile. {found['error'].splitlines()[0][:300]}", file=sys.stderr)
        return 1
    amounts = ", ".join(f"{key} {value / 1e9:.2f} GB" for key, value in found["memory"].items())
    print(f"{name}: {amounts}; {found['seconds']['compile']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

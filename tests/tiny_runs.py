"""Runs small enough to be trained whole in a test: two layers, two phases, needles for data."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pe_lab.config import Config
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
from pe_lab.recipes import load_config
from pe_lab.storage.manifest import Manifest, manifest_of
from pe_lab.training import fit, loop
from pe_lab.training.loop import train_phase
from pe_lab.training.plan import plan_here
from pe_lab.training.run import Run, open_run
from pe_lab.training.step_call import alone

REPOSITORY = Path(__file__).parents[1]
RECIPE = """
from ml_collections import ConfigDict


def get_config(arg=""):
    config = ConfigDict()
    config.name = "tiny"
    config.model = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, qk_norm="head", dtype="float32")
    needles = dict(pairs=1, queries=1, keys=4, values=4, filler_symbols=8, branches=2)
    config.data = dict(sources=[dict(source="needles", weight=1.0, options=needles)], tokenizer="bytes")
    adamw = dict(learning_rate=1e-2, warmup_steps=2)
    common = dict(sequence_length=16, batch_size=8, optimizer=adamw)
    config.phases = [
        dict(name="pretrain", steps=8, positional="rope", **common),
        dict(name="recalibrate", steps=6, positional="nope", **common),
    ]
    config.log = dict(every_steps=1, validate_every_steps=4, validation_batches=1)
    config.checkpoint = dict(every_steps=2, keep=3)
    config.notes = dict(paper="none")
    return config
"""


def write_recipe(directory: Path) -> Path:
    """The recipe as a file, for commands."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tiny.py"
    path.write_text(RECIPE)
    return path


def tiny(directory: Path, **overrides: Any) -> Config:
    """The recipe as a config; `phases__0__steps=3` sets `phases.0.steps`."""
    texts = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return load_config(str(write_recipe(directory)), texts)


def opened(config: Config, workdir: Path, devices: Sequence[Any] | None = None) -> Run:
    """A run that is planned and opened, on one device unless told otherwise."""
    return open_run(plan_here(config, devices or jax.devices()[:1]), workdir)


def train(config: Config, workdir: Path, devices: Sequence[Any] | None = None) -> Path:
    """Trains all phases, and returns the last checkpoint."""
    run, last = opened(config, workdir, devices), None
    for phase in run.phases:
        last = alone(train_phase(run, phase, last))
    assert last is not None
    return last


def train_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `pe_lab.fit` and `pe_lab.train.main` train on one device."""
    monkeypatch.setattr(fit, "plan_here", functools.partial(plan_here, devices=jax.devices()[:1]))


def start(argv: Sequence[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts `python -m ...` of this repository as a process of its own, on one CPU device."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *argv], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def start_together(argv: Sequence[str], directories: Sequence[Path], **environment: str) -> list[subprocess.Popen[str]]:
    """Starts a process of one program in each of the directories; they are connected over loopback if there are two."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    count = len(directories)
    more = {"COORDINATOR_ADDRESS": address, "PROCESS_COUNT": str(count)} if count > 1 else {}
    return [
        start(argv, where, **environment, **more, **({"PROCESS_INDEX": str(index)} if more else {}))
        for index, where in enumerate(directories)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], status: int = 0, patience: float = 400) -> list[str]:
    """What each process printed, once all have ended with `status`."""
    try:
        outs = [process.communicate(timeout=patience)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, out in zip(processes, outs, strict=True):
        assert process.returncode == status, out[-4000:]
    return outs


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(phase: Path) -> np.ndarray:
    """Training losses by step."""
    return np.asarray([row["loss"] for row in records(phase / "metrics.jsonl") if "loss" in row])


def arrays(checkpoint: Path, item: str) -> dict[str, np.ndarray]:
    """`params` or `optimizer` of a checkpoint as Orbax reads it on its own: {path: array}."""
    with ocp.PyTreeCheckpointer() as reader:
        described = reader.metadata(checkpoint / item).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)
        tree = reader.restore(checkpoint / item, restore_args=as_numpy)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_training(one: Path, other: Path, phases: Sequence[str] = ("pretrain", "recalibrate")) -> None:
    """Two run directories hold the same bytes of log, parameters and optimizer state, phase by phase."""
    for phase in phases:
        a, b = one / phase, other / phase
        lines, others = ((p / "metrics.jsonl").read_bytes().splitlines() for p in (a, b))
        assert [pair for pair in zip(lines, others, strict=False) if pair[0] != pair[1]][:1] == [], phase
        assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes(), phase
        last = max(int(p.name) for p in (a / "checkpoints").iterdir() if p.name.isdigit())
        for item in ("params", "optimizer"):
            left, right = (arrays(run / "checkpoints" / str(last), item) for run in (a, b))
            assert left.keys() == right.keys() and left
            for name in left:
                assert left[name].tobytes() == right[name].tobytes(), f"{phase}, step {last}: {item}{name}"


def fingerprint(directory: Path) -> dict[str, str]:
    """{file: hash} of everything under a directory, and {directory: ""}; without the bytecode that Python writes."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(directory.rglob("*"))
        if "__pycache__" not in p.parts
    }


class Killed(Exception):
    """Stands for SIGKILL inside this process: nothing after it is written."""


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Does something as the `number`-th training step from now is about to run."""
    compile_train_step, count = loop.compile_train_step, itertools.count(1)

    def compiling(*args):
        step = compile_train_step(*args)

        def counted(*args):
            if next(count) == number:
                action()
            return step(*args)

        return counted

    monkeypatch.setattr(loop, "compile_train_step", compiling)


def die() -> None:
    raise Killed


@pytest.fixture(scope="module")
def compilations_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sessions of one run compile the same programs: here they are compiled once and kept on disk."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compilations"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, compilations_kept: None) -> Path:
    """The run of the recipe, undisturbed, made once for all modules. Read it or copy it; do not change it."""
    directory = tmp_path_factory.getbasetemp() / "trained"
    if not directory.exists():
        train(tiny(directory / "recipe"), directory / "run")
        save_tokenizer(load_tokenizer("bytes"), directory / "run" / "tokenizer")
    return directory / "run"


def reseal(checkpoint: Path) -> None:
    """Writes the manifest of a checkpoint anew, after a test has changed its files on purpose."""
    manifest_of(checkpoint, Manifest.read(checkpoint).about).write(checkpoint)

"""An encoding in a user's own file: trained, killed, resumed, decoded, evaluated at 4x, reported, dropped, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import ModelConfig
from pe_lab.model import Model
from pe_lab.positional import build_schedule, import_encodings, layers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "your-own-encoding.md"
RECIPE = '''
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from pe_lab.positional import Encoding, Parameter, register
from pe_lab.recipes import phase


@register("leaky_gate")
@dataclass(frozen=True)
class LeakyGate(Encoding):
    """A forget gate whose logarithm is scaled by a learned exponent, and an output gate by the same sum."""

    content = True
    floor: float = 0.9

    def init(self, key, shape):
        gate = 0.1 * jax.random.normal(key, (shape.d_model, shape.num_heads))
        opened = jnp.zeros(shape.num_heads)
        return {"gate": Parameter(gate, ("embed", "heads"), decay=True), "open": Parameter(opened, ("heads",))}

    def running_sum(self, params, x, earlier):
        forget = self.floor + (1 - self.floor) * jax.nn.sigmoid(x.astype(jnp.float32) @ params["gate"])
        return jnp.log(forget)

    def key_bias(self, params, x):
        return -x.swapaxes(1, 2)

    def output(self, params, x, out, value):
        return out * (2 * jax.nn.sigmoid(params["open"]))[:, None].astype(out.dtype)


def get_config(arg=""):
    config = ConfigDict()
    config.name = "leaky"
    config.model = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32")
    needles = dict(pairs=1, queries=1, keys=4, values=4, filler_symbols=8, branches=2)
    config.data = dict(sources=[dict(source="needles", weight=1.0, options=needles)], tokenizer="bytes")
    adamw = dict(learning_rate=1e-2, warmup_steps=2)
    common = dict(sequence_length=16, batch_size=8, optimizer=adamw)
    config.phases = [
        phase(name="pretrain", steps=4000, positional=["rope/with=leaky_gate", "leaky_gate:floor=0.8"], **common),
        phase(name="recalibrate", steps=4, positional="drop", **common),
    ]
    config.log = dict(every_steps=20, validate_every_steps=1000, validation_batches=1)
    config.checkpoint = dict(every_steps=200, keep=3)
    config.notes = dict(paper="none")
    return config
'''


def run(directory: Path, *arguments: str, status: int = 0) -> str:
    """The output of a command of pe_lab in a directory."""
    command = [sys.executable, "-m", f"pe_lab.{arguments[0]}", *arguments[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["wave.py", "learned_base.py", "experts.py"])
def test_the_page_shows_the_file_as_it_is(name):
    shown = re.search(rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- end", PAGE.read_text(), re.DOTALL)
    text = (ROOT / "docs" / name).read_text()
    assert shown is not None and shown[1] == text
    assert len(text.splitlines()) <= (48 if name == "experts.py" else 30)


@pytest.mark.slow
def test_a_learned_base_moves():
    """4 s. The documented encoding: its gradient is the loss's slope, and following it lowers the loss."""
    import_encodings(ROOT / "docs" / "learned_base.py")
    sizes = dict(vocab_size=32, layers=2, d_model=32, d_ff=32, heads=2, kv_heads=1, head_dim=16, init_std=0.3)
    schedule = build_schedule(layers("learned_base:base=50", 2), 2, 1, 16)
    model = Model(ModelConfig(**sizes, dtype="float32", attention="reference"), hooks=schedule.hooks)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 48), 0, 32)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones(tokens.shape)}

    @jax.jit
    @jax.value_and_grad
    def loss(log_base):
        layers = params["layers"] | {"positional": {"learned_base": {"log_base": log_base}}}
        return model.loss_sum(params | {"layers": layers}, batch, schedule)

    start = params["layers"]["positional"]["learned_base"]["log_base"]
    np.testing.assert_allclose(start, np.log([50, 50]), rtol=1e-6)
    value, gradient = loss(start)
    moves = 0.01 * np.eye(2, dtype=np.float32)
    slope = [(loss(start + move)[0] - loss(start - move)[0]) / 0.02 for move in moves]
    assert (np.abs(gradient) > 1e-3).all()
    np.testing.assert_allclose(gradient, slope, rtol=0.05, atol=0.02)
    moved = start - 0.1 * gradient / np.linalg.norm(gradient)
    assert loss(moved)[0] < value


@pytest.mark.slow
def test_an_encoding_of_a_recipe_through_everything(tmp_path):
    """About 60 s."""
    (tmp_path / "mine.py").write_text(RECIPE)
    train = [sys.executable, "-m", "pe_lab.train", "--config=mine.py", "--workdir=run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    killed = subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    for _ in range(6000):
        if any((tmp_path / "run" / "pretrain" / "checkpoints").glob("[0-9]*00")) or killed.poll() is not None:
            break
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    shown = run(tmp_path, "train", "--config=mine.py", "--workdir=run")
    assert "pretrain: resuming at step" in shown and "recalibrate: complete" in shown
    assert "rope(base=10000) / with leaky_gate -> nope / with leaky_gate on layer 0" in shown
    metadata = json.loads(
        (tmp_path / "run" / "recalibrate" / "checkpoints" / "4" / "metadata" / "metadata").read_text()
    )
    assert metadata["encodings"]["leaky_gate"]["file"] == str(tmp_path / "mine.py")
    assert "those of leaky_gate_2 left out" in shown

    refused = run(tmp_path, "generate", "--from=run/pretrain", "--prompt=ab", status=2)
    assert "uses the encoding 'leaky_gate', which is not registered" in refused and "--encodings=" in refused
    mine = "--encodings=mine.py"
    run(tmp_path, "generate", "--from=run/pretrain", mine, "--prompt=ab", "--max-new-tokens=8")
    evaluated = run(tmp_path, "evaluate", "--from=run/pretrain", mine, "--suite=needles", "--lengths=16,64")
    assert "64 (4x)" in evaluated and "leaky_gate" in evaluated
    run(tmp_path, "report", "run")  # reads files alone
    assert "leaky_gate" in (tmp_path / "run" / "report.html").read_text()
    run(tmp_path, "surgery", "--from=run/recalibrate", mine, "--to=again", "--positional=rope/with=leaky_gate")
    exported = run(tmp_path, "convert", "--from=run/pretrain", mine, "--to=hf:out", status=2)
    assert "LeakyGate" in exported and "Nearest" in exported
    assert not (tmp_path / "out").exists()

    (tmp_path / "mine.py").write_text(RECIPE.replace("2 * jax.nn.sigmoid", "3 * jax.nn.sigmoid"))
    changed = run(tmp_path, "generate", "--from=run/pretrain", mine, "--prompt=ab", status=2)
    assert "was made with another source of the encoding 'leaky_gate'" in changed and "same_as" in changed
    assert "another source" in run(
        tmp_path, "train", "--config=mine.py", "--workdir=run", "--config.phases.1.steps=6", status=2
    )


@pytest.mark.slow
def test_an_encoding_that_sees_later_tokens_is_refused(tmp_path):
    """About 12 s."""
    (tmp_path / "mine.py").write_text(
        RECIPE.replace("return -x.swapaxes(1, 2)", "return x[:, -1:].swapaxes(1, 2) - x.swapaxes(1, 2)[..., ::-1]")
    )
    refused = run(tmp_path, "train", "--config=mine.py", "--workdir=run", status=2)
    assert "is not causal: the output of a token depends on later ones" in refused

"""A model, a corpus and checkpoints small enough to evaluate in seconds."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.store import Store, metadata_of
from pe_lab.config import Config, DataConfig, EvaluationConfig, ModelConfig, SourceConfig, to_json
from pe_lab.data.mixture import open_mixture
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model
from pe_lab.positional import Layer, NoPE, Rope, layers

LENGTH = 16  # of training
NEEDLES = dict(pairs=1, queries=2, keys=8, values=8, filler_symbols=8)
MODEL = ModelConfig(vocab_size=384, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32", scan=False)
SETTINGS = EvaluationConfig(tokens=512, fit_tokens=256, needle_windows=16)
DROPPED = "rope(base=10000) -> nope on layers 0-1"


def one_device():
    return jax.devices()[:1]


def corpus(directory: Path, held_out_tokens: int = 3000) -> DataConfig:
    """Text files and needles; about so many bytes are held out."""
    rng, directory = np.random.default_rng(0), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for i in range(60):
        size = held_out_tokens // 18
        words = rng.choice(["the", "key", "of", "night", "is", "seven", "and", "gone"], size)
        (directory / f"{i}.txt").write_text(" ".join(words)[:size] + "\n")
    sources = (SourceConfig(f"text:{directory}/*.txt"), SourceConfig("needles", options=NEEDLES))
    return DataConfig(sources, cache_dir=str(directory / "cache"), validation_fraction=0.3)


@functools.cache
def parameters(seed: int = 0, sharpness: float = 6.0):
    """Random weights, with queries and keys strong enough that positions and scales matter."""
    params = Model(MODEL).init(jax.random.key(seed))
    attention = params["layers"]["attention"]
    for name in ("query", "key"):
        attention[name] = attention[name] * sharpness * 4
    for name in ("value", "out"):
        attention[name] = attention[name] * sharpness * 4
    params["token_embedder"]["embedding"] = params["token_embedder"]["embedding"] * 20
    return params


@jax.jit
def apply(params, tokens, schedule):
    """The model's logits."""
    return Model(MODEL).apply(params, tokens, None, None, schedule)


def checkpoint(
    encoding=None, data: DataConfig | None = None, lineage=("initialized at random",), seed: int = 0, **metadata
) -> Checkpoint:
    """An open checkpoint that lies nowhere."""
    described = layers(encoding if encoding is not None else Rope(), MODEL.layers)
    model = Model(MODEL).config
    recorded = metadata_of(
        model,
        described,
        **{
            "id": f"id-{seed}-{encoding}",
            "run": "tiny",
            "phase": "pretrain",
            "phase_index": 0,
            "step": 3,
            "tokens": 480,
            "training_length": LENGTH,
            "lineage": [{"id": str(i), "what": what, "path": "", "step": 0} for i, what in enumerate(lineage)],
            "config": to_json(Config(name="tiny", model=MODEL, data=data or DataConfig(), evaluation=SETTINGS)),
            "tokenizer": open_mixture(data).tokenizer.fingerprint if data else None,
        }
        | metadata,
    )
    return Checkpoint(Path("nowhere"), recorded["step"], parameters(seed), model, described, recorded)


def language_model(found: Checkpoint) -> LanguageModel:
    """A checkpoint as `pe_lab.load` opens it, on bytes."""
    return LanguageModel(found, found.layers, ByteTokenizer())


def save(found: Checkpoint, directory: Path) -> Path:
    """Writes a checkpoint as the phase `directory`; the path of its step."""
    store = Store(directory / "checkpoints")
    store.save(found.step, found.params, None, found.metadata)
    store.wait()
    store.close()
    return directory / "checkpoints" / str(found.step)


def save_run(directory: Path, data: DataConfig) -> Path:
    """A run of two phases: RoPE, then dropped."""
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"name": "tiny"}))
    save(checkpoint(Rope(), data, phase="pretrain", phase_index=0), directory / "pretrain")
    dropped = checkpoint(NoPE(), data, ("random", DROPPED), seed=1, phase="recalibrate", phase_index=1)
    save(dropped, directory / "recalibrate")
    return directory


def windowed(encoding, window: int) -> Layer:
    return dataclasses.replace(Layer(encoding), window=window)

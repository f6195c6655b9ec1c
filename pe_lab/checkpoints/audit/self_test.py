"""The self-test of the audit: every fault in six small models that a numpy runtime computes, and twelve sound ones.

The models are random, in the shapes of families, and wide enough in their numbers for every layer's attention to feel
positions. Each has its encoding twice, written by hand: as pe_lab describes it, and as the runtime's config does.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.checkpoints.audit.faulty_runtime import RotaryKeys, logits
from pe_lab.checkpoints.audit.observed import audited_tokens
from pe_lab.checkpoints.audit.search import Audit, Batch, HypothesisRunner, Search
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.families import canonical_leaf, leaf_paths
from pe_lab.checkpoints.source import nested
from pe_lab.config import ModelConfig
from pe_lab.model import Model
from pe_lab.positional import PI, DynamicNTK, Layer, Layout, Llama3, LongRope, NoPE, PartialRope, Rope, Yarn
from pe_lab.terminal import table

SEQUENCES, LENGTH, VOCABULARY = 2, 288, 64  # bfloat16 has the integers up to 256
Keys = tuple[RotaryKeys, ...]


@dataclass(frozen=True)
class SelfTestModel:
    """A small model.

    Attributes:
      layers: its encodings, for pe_lab.
      keys: its encodings, for the runtime; one for each layer.
      layout: of the channels of queries and keys in its weights.
      length: of its sequences, in tokens.
    """

    name: str
    model: ModelConfig
    layers: tuple[Layer, ...]
    keys: Keys
    layout: Layout = Layout()
    length: int = LENGTH

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """Float32 numbers in the layout of a file. Norms are not 1 and biases not 0, so that all are felt."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        leaves = leaf_paths(Model(self.model).shapes)
        for path, leaf in leaves.items():
            values = rng.standard_normal(leaf.shape)
            if path.endswith("bias"):
                values *= 0.5
            elif "norm" in path:
                values = 0.3 * values + (self.model.norm != "rms_plus_one" or ".attention." in path)
            elif "embedding" in path:
                values *= 0.3
            else:  # the inputs of `out` are its heads and their channels
                inputs = leaf.shape[1] * leaf.shape[2] if path.endswith("attention.out") else leaf.shape[1]
                values /= inputs**0.5
            leaves[path] = values.astype(np.float32)
        return nested(leaves)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        return audited_tokens(VOCABULARY, SEQUENCES, self.length)

    def runtime_logits(self, keys: Keys) -> np.ndarray:
        """What the runtime computes with these keys."""
        weights = nested({path: leaf.astype(np.float64) for path, leaf in leaf_paths(self.weights).items()})
        return logits(self.model, weights, keys, self.tokens, np.arange(self.length))

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        leaves = {path: canonical_leaf(path, leaf, self.layout) for path, leaf in leaf_paths(self.weights).items()}
        params = jax.tree.map(jnp.asarray, nested(leaves))
        return Checkpoint(Path(self.name), 0, params, self.model, self.layers, {"training_length": 64})

    def audit(self, keys: Keys) -> Audit:
        """The audit of what the runtime computes with these keys; what hypotheses compute is shared by all of them."""
        return Search(self._runner, [self.runtime_logits(keys)]).run()

    @functools.cached_property
    def _runner(self) -> HypothesisRunner:
        return HypothesisRunner(
            self.checkpoint, [Batch(self.tokens, np.arange(self.length, dtype=np.int32), self.length)]
        )


SHAPE = ModelConfig(
    vocab_size=VOCABULARY, layers=6, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=16, norm_epsilon=1e-5,
    tie_embeddings=False,
)  # fmt: skip
_QK = dataclasses.replace(SHAPE, qk_norm="head")
_GEMMA = dataclasses.replace(
    SHAPE, norm="rms_plus_one", activation="gelu_tanh", embedding_multiplier=32**0.5, kv_heads=1, tie_embeddings=True
)
_NEOX = dataclasses.replace(
    SHAPE, norm="layer", gated_mlp=False, activation="gelu", attention_bias=True, output_bias=True, mlp_bias=True,
    kv_heads=4, block="parallel",
)  # fmt: skip


def _models() -> tuple[SelfTestModel, ...]:
    """Six models for faults, and six more that are only audited as they are."""
    yarn, theirs = Yarn(4.0, 256), dict(scaling="yarn", factor=4.0, original=256)
    local, far = Layer(Rope(1e4), 24), Layer(Rope(1e6, 1.0, PI(8.0)))
    their_local, their_far = RotaryKeys(1e4, window=24), RotaryKeys(1e6, "linear", 8.0)
    rope = Layer(Rope(2e6, 1.0, yarn), 40)
    their_rope = RotaryKeys(2e6, window=40, **theirs)
    portion = Layer(Rope(1e6, 0.5, yarn))
    their_portion = RotaryKeys(1e6, rotated=0.5, proportional=True, **theirs)
    windowed, whole = Layer(Rope(1e6, 1.0, yarn), 32), Layer(Rope(1e6, 1.0, yarn))
    their_windowed, their_whole = RotaryKeys(1e6, window=32, **theirs), RotaryKeys(1e6, **theirs)
    short, long = (1.0, 1.0, 1.125, 1.25, 1.5, 1.5, 2.0, 2.0), (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0)
    return (
        SelfTestModel("llama", SHAPE, (Layer(Rope(5e5, 1.0, yarn)),) * 6, (RotaryKeys(5e5, **theirs),) * 6),
        SelfTestModel("qwen3", _QK, (windowed, whole) * 3, (their_windowed, their_whole) * 3),
        SelfTestModel(
            "smollm3", SHAPE, (rope, rope, Layer(NoPE())) * 2, (their_rope, their_rope, RotaryKeys(0.0)) * 2
        ),
        SelfTestModel(
            "gpt_neox", _NEOX, (Layer(PartialRope(500.0, 0.5, yarn)),) * 6,
            (RotaryKeys(500.0, rotated=0.5, **theirs),) * 6, Layout("half", 8),
        ),
        SelfTestModel("gemma3", _QK, (local, local, far) * 2, (their_local, their_local, their_far) * 2),
        SelfTestModel("p_rope", _GEMMA, (local, local, portion) * 2, (their_local, their_local, their_portion) * 2),
        SelfTestModel("llama, plain", SHAPE, (Layer(Rope(1e4)),) * 6, (RotaryKeys(1e4),) * 6),
        SelfTestModel(
            "llama, llama3", SHAPE, (Layer(Rope(5e5, 1.0, Llama3(8.0, 1.0, 4.0, 64))),) * 6,
            (RotaryKeys(5e5, "llama3", 8.0, 64),) * 6,
        ),
        SelfTestModel(
            "qwen2, dynamic", dataclasses.replace(SHAPE, attention_bias=True),
            (Layer(Rope(1e6, 1.0, DynamicNTK(64, 2.0))),) * 6, (RotaryKeys(1e6, "dynamic", 2.0, 64),) * 6,
        ),
        SelfTestModel(
            "phi3, longrope", SHAPE, (Layer(Rope(1e4, 1.0, LongRope(short, long, 64, 4.0))),) * 6,
            (RotaryKeys(1e4, "longrope", 4.0, 64, short_factor=short, long_factor=long),) * 6,
        ),
        SelfTestModel("gemma", _GEMMA, (Layer(Rope(1e4)),) * 6, (RotaryKeys(1e4),) * 6),
        SelfTestModel("drope", _QK, (Layer(NoPE()),) * 6, (RotaryKeys(0.0),) * 6),
    )  # fmt: skip


MODELS = _models()
FAULTY = tuple(model.name for model in MODELS[:6])


# What the runtime's keys are with a fault; a text says why a model cannot have it.
Injected = Keys | str


def _each(keys: Keys, **changes: Any) -> Keys:
    """Changes of all layers that rotate."""
    return tuple(dataclasses.replace(one, **changes) if one.theta else one for one in keys)


def _scaling(keys: Keys, **changes: Any) -> Injected:
    return _each(keys, **changes) if any(one.scaling != "default" for one in keys) else "no scaling"


def _yarn(keys: Keys, **changes: Any) -> Injected:
    yarn = any(one.scaling == "yarn" for one in keys)
    return _each(keys, **changes) if yarn else "no attention factor, and no ramp"


def _fraction(keys: Keys) -> Injected:
    partly = [one.rotated < 1 for one in keys]
    pairs = zip(keys, partly, strict=True)
    other = tuple(dataclasses.replace(one, proportional=one.proportional != part) for one, part in pairs)
    return other if any(partly) else "the whole head rotates"


def _keys_permuted(keys: Keys, model: ModelConfig) -> Injected:
    if model.kv_heads == model.heads:
        return "as many key heads as query heads"
    if model.qk_norm != "none":
        return "files with a QK-norm are not permuted"
    return tuple(dataclasses.replace(one, keys_permuted_by=model.heads) for one in keys)


def _bare(keys: Keys, first: int) -> Injected:
    """The layers without rotation have that of the others, from the one of number `first` among them on."""
    bare = [n for n, one in enumerate(keys) if not one.theta]
    rotated = next(one for one in keys if one.theta)
    found = list(keys)
    for n in bare[first:]:
        found[n] = dataclasses.replace(rotated, window=keys[n].window)
    return tuple(found) if bare else "every layer rotates"


def _windows(keys: Keys, change: Callable[[list[int]], list[int]]) -> Injected:
    windows = [one.window for one in keys]
    changed = zip(keys, change(windows), strict=True)
    after = tuple(dataclasses.replace(one, window=size) for one, size in changed)
    return after if any(windows) else "no layer has a window"


def _two_bases(keys: Keys, change: Callable[[RotaryKeys, RotaryKeys], tuple[RotaryKeys, RotaryKeys]]) -> Injected:
    """`change` takes the rope parameters of local and global layers, and gives those of the faulty runtime."""
    kinds = list(dict.fromkeys(dataclasses.replace(one, window=0) for one in keys if one.theta))
    if len(kinds) < 2:
        return "one base"
    after = dict(zip(kinds, change(*kinds), strict=True))
    own = [(after.get(dataclasses.replace(one, window=0), one), one.window) for one in keys]
    return tuple(dataclasses.replace(one, window=window) for one, window in own)


class Injection(NamedTuple):
    """A fault of the runtime.

    Attributes:
      name: for the table.
      answer: the one of `faults.FAULTS` that the audit has to find.
      inject: gives the runtime's keys of a model this fault.
    """

    name: str
    answer: str
    inject: Callable[[Keys, ModelConfig], Injected]


INJECTIONS: tuple[Injection, ...] = (
    Injection("base ignored", "base ignored", lambda k, m: _each(k, theta=1e4)),
    Injection("scaling ignored", "scaling ignored", lambda k, m: _scaling(k, scaling="default")),
    Injection("both ignored", "base and scaling ignored", lambda k, m: _scaling(k, theta=1e4, scaling="default")),
    Injection("scaling applied twice", "scaling applied twice", lambda k, m: _scaling(k, scaled=2)),
    Injection("attention factor missing", "attention factor", lambda k, m: _yarn(k, factored=0)),
    Injection("YaRN's ramp over half the dims", "YaRN's ramp", lambda k, m: _yarn(k, ramp_part=0.5)),
    Injection("query/key permutation", "query/key permutation", lambda k, m: _each(k, interleaved=True)),
    Injection("keys permuted by query heads", "query/key permutation", _keys_permuted),
    Injection("proportional against partial", "proportional and partial", lambda k, m: _fraction(k)),
    Injection("all NoPE layers rotated", "unrotated layers rotated", lambda k, m: _bare(k, 0)),
    Injection("one NoPE layer rotated", "unrotated layers rotated", lambda k, m: _bare(k, 1)),
    Injection(
        "a rotated layer not rotated",
        "rotated layers not rotated",
        lambda k, m: (k[0], dataclasses.replace(k[1], theta=0.0), *k[2:]),
    ),
    Injection(
        "windows one token longer", "windows off by one", lambda k, m: _windows(k, lambda w: [s and s + 1 for s in w])
    ),
    Injection(
        "windows one token shorter", "windows off by one", lambda k, m: _windows(k, lambda w: [s and s - 1 for s in w])
    ),
    Injection(
        "windows on the wrong layers", "windows on the wrong layers", lambda k, m: _windows(k, lambda w: w[1:] + w[:1])
    ),
    Injection("bases exchanged", "bases exchanged", lambda k, m: _two_bases(k, lambda one, two: (two, one))),
    Injection(
        "local layers scaled too",
        "encodings on the wrong layers",
        lambda k, m: _two_bases(k, lambda one, two: (dataclasses.replace(two, theta=one.theta, rotated=1.0), two)),
    ),
    Injection("queries one position later", "positions offset", lambda k, m: _each(k, query_offset=1)),
    Injection("cache counted wrong from 200 on", "positions offset", lambda k, m: _each(k, late_from=200)),
    Injection("positions in bfloat16", "positions in bfloat16", lambda k, m: _each(k, rounded_positions=True)),
    Injection("frequencies in bfloat16", "frequencies in bfloat16", lambda k, m: _each(k, rounded_frequencies=True)),
)


class Outcome(NamedTuple):
    """A line of the self-test.

    Attributes:
      fault: None: the runtime has none.
      model: its name.
      audit: None where the fault does not apply to the model, for the reason `why`.
      passed: the fault was found, or none was where there is none.
    """

    fault: str | None
    model: str
    audit: Audit | None
    passed: bool
    why: str = ""

    @property
    def error(self) -> str:
        """What the right hypothesis leaves; of no fault, what the config does."""
        trial = self.audit.found or self.audit.config
        return f"{trial.residual.largest:.1e}"


def outcomes(models: Sequence[SelfTestModel], injections: Sequence[Injection]) -> Iterator[Outcome]:
    """The audits of sound models, and of those in `FAULTY` with each fault."""
    for model in models:
        audit = model.audit(model.keys)
        yield Outcome(None, model.name, audit, audit.sound)
        for fault in injections if model.name in FAULTY else ():
            keys = fault.inject(model.keys, model.model)
            if isinstance(keys, str):
                yield Outcome(fault.name, model.name, None, True, keys)
                continue
            audit = model.audit(keys)
            right = audit.found is not None and (fault.answer,) in audit.found.names
            yield Outcome(fault.name, model.name, audit, right)


def self_test_table(found: Sequence[Outcome]) -> str:
    """The faults by model, with the error that the right hypothesis leaves; and why some do not apply."""
    names = list(dict.fromkeys(one.model for one in found if one.fault is not None))
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    sound = []
    for one in found:
        error = "-" if one.audit is None else "MISSED" if not one.passed else one.error
        if one.fault is None:
            sound.append((one.model, one.error, "sound" if one.passed else "FALSE ALARM"))
            continue
        cells.setdefault(one.fault, {})[one.model] = error
        if one.audit is None:
            reasons.setdefault((one.fault, one.why), []).append(one.model)
    lines = [(fault, *(by_model[name] for name in names)) for fault, by_model in cells.items()]
    return "\n".join(
        [
            table(["fault", *names], lines),
            *(f"does not apply: {fault}, to {', '.join(to)}: {why}" for (fault, why), to in reasons.items()),
            "",
            table(["no fault", "error", "verdict"], sound),
        ]
    )

"""Exports of every family with every rotation it can express, and what runtimes compute of them.

`VARIANTS` has at least one for each line of `pe_lab.checkpoints.runtimes.CONTENTS`; tests/checkpoints/
test_runtime_variants.py reads each in transformers, vLLM, SGLang and llama.cpp, and compares with pe_lab.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tables import HF, families, tensors
from checkpoints.external import logits
from runtime_environments import READERS, Job, Result
from safetensors.numpy import save_file

from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint, open_source
from pe_lab.checkpoints.families import FAMILIES
from pe_lab.checkpoints.hf_config import PE_LAB_KEY, write_config
from pe_lab.checkpoints.rope_parameters import WriteOptions, declared_length
from pe_lab.checkpoints.runtimes import LLAMA_CPP, LONGER, NO_START, SGLANG, SHORTER, VLLM, WRONG
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.config import ModelConfig
from pe_lab.model.shape import layer_heads
from pe_lab.positional import (
    PI,
    DynamicNTK,
    Encoding,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Scaling,
    Yarn,
    frequencies,
)

TRAINED, DECLARED = 16, 256  # tokens: of a scaling's original length; of models without a scaling
PREFIXES = (12, 17, 48)  # tokens read: within the training length, one more, and three times as many
WINDOW = 8

Config = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A model of tests/data/hf with other positions, in one of the forms that `convert` writes.

    Attributes:
      base: the model; its own architecture is written.
      what: for messages.
      layers: encodings, or layers, that are repeated; none: the model's own.
      length: the training length, in tokens.
      tables: no rotation, and scalings, are written as tables.
      prepare: changes a copy of the model first.
    """

    base: str
    what: str
    layers: tuple[Encoding | Layer, ...] = ()
    length: int = DECLARED
    tables: bool = False
    prepare: Callable[[Path], None] = lambda directory: None

    @property
    def title(self) -> str:
        return f"{self.base}, {self.what}"


# Changes of models, for what tests/data/hf does not have.


def _rewritten(directory: Path, arrays: Mapping[str, np.ndarray], **keys: Any) -> None:
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def _biased(directory: Path) -> None:
    """Adds biases of queries, keys, values and outputs."""
    found, random = tensors(directory), np.random.default_rng(1)
    for name in [name for name in found if ".self_attn." in name and name.endswith("_proj.weight")]:
        size = found[name].shape[0]
        found[name.replace(".weight", ".bias")] = random.normal(size=size).astype(found[name].dtype)
    _rewritten(directory, found, attention_bias=True)


def _four_times_as_wide(directory: Path) -> None:
    """Pads the MLP of Falcon or GPT-2 with zeros to four times the model's width, which computes the same."""
    found, config = tensors(directory), json.loads((directory / "config.json").read_text())
    wide = {"dense_h_to_4h.weight": 0, "dense_h_to_4h.bias": 0, "dense_4h_to_h.weight": 1}
    wide |= {"c_fc.weight": 1, "c_fc.bias": 0, "mlp.c_proj.weight": 0}  # GPT-2's matrices are [in, out]
    key, width = ("n_inner", config["n_embd"]) if "n_embd" in config else ("ffn_hidden_size", config["hidden_size"])
    for name, array in found.items():
        for axis in (axis for ending, axis in wide.items() if name.endswith(ending)):
            pads = [(0, 4 * width - size if n == axis else 0) for n, size in enumerate(array.shape)]
            found[name] = np.pad(array, pads)
    _rewritten(directory, found, **{key: 4 * width})


def _with_mlp_norm(directory: Path) -> None:
    """Makes the blocks of StableLM sequential, with a norm before the MLP."""
    found, random = tensors(directory), np.random.default_rng(1)
    for name in [name for name in found if ".input_layernorm." in name]:
        array = found[name]
        other = (array + 0.3 * random.normal(size=array.shape)).astype(array.dtype)
        found[name.replace("input_layernorm", "post_attention_layernorm")] = other
    _rewritten(directory, found, use_parallel_residual=False)


def _usual_scale(directory: Path) -> None:
    """Gives Gemma 2 or 3 the attention scale of its head dimension, as most published ones have it."""
    head_dim = json.loads((directory / "config.json").read_text())["head_dim"]
    _rewritten(directory, tensors(directory), query_pre_attn_scalar=head_dim)


def _small_epsilon(directory: Path) -> None:
    _rewritten(directory, tensors(directory), rms_norm_eps=1e-6)


# Every family with every rotation.

_PREPARED = {"gemma2": _usual_scale, "falcon_7b": _four_times_as_wide, "stablelm_parallel": _with_mlp_norm}
_ROTATED = {"phi3": 0.5, "gpt_neox": 0.25, "stablelm_parallel": 0.5, "glm4": 0.5}  # the share of the channels
_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3", "phi3", "gpt_neox", "gemma", "gemma2"),
    *("gemma3", "cohere2", "exaone4_full", "exaone4", "granite", "granite_swa", "starcoder2", "stablelm_parallel"),
    *("glm4", "falcon_7b"),
)
_SCALINGS: Mapping[str, Callable[[int], Scaling]] = {
    "PI": lambda pairs: PI(4),
    "YaRN": lambda pairs: Yarn(4, TRAINED),
    "YaRN with an attention factor": lambda pairs: Yarn(4, TRAINED, attention_factor=1.3),
    "llama3": lambda pairs: Llama3(4, original_length=TRAINED),
    "dynamic NTK": lambda pairs: DynamicNTK(TRAINED),
    "two tables": lambda pairs: LongRope((1.0,) * pairs, tuple(map(float, range(1, pairs + 1))), TRAINED, 4.0),
}
_ONLY_TABLES = ("phi3",)
_BASE_OF_LLAMA_CPP = ("gemma", "gemma2", "gpt_neox", "stablelm_parallel", "falcon_7b")


def _arranged(base: str, encoding: Encoding) -> tuple[Encoding | Layer, ...]:
    """An encoding on those layers of a family that may have any."""
    windowed, full = Layer(encoding, WINDOW), Layer(encoding)
    local = Layer(Rope(10000.0 if isinstance(encoding, NoPE) else encoding.base), WINDOW)
    if base == "gemma2":
        return windowed, full
    if base in ("gemma3", "olmo3"):
        return local, local, full, local
    if base in ("cohere2", "exaone4"):
        return windowed, windowed, windowed, Layer(NoPE())
    if base == "granite_swa":
        return windowed, windowed, full, windowed
    if base == "smollm3":
        return full, full, full, Layer(NoPE())
    return (full,)


def _of_family(base: str) -> list[Variant]:
    """Its variants, as far as it can express them."""
    config = json.loads((HF / base / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = _ROTATED.get(base, 1.0)
    pairs = int(width * share) // 2
    prepare = _PREPARED.get(base, Variant.prepare)

    def rotation(scaling: Scaling | None = None, theta: float = 500.0) -> Encoding:
        return Rope(theta, scaling=scaling) if share == 1 else PartialRope(theta, share, scaling)

    def variant(what: str, encoding: Encoding, length: int = DECLARED, **options: Any) -> Variant:
        return Variant(base, what, _arranged(base, encoding), length, prepare=prepare, **options)

    table = tuple(map(float, range(1, pairs + 1)))
    found = [variant("RoPE", rotation())]
    if base in _BASE_OF_LLAMA_CPP:
        found.append(variant("RoPE of base 10,000", rotation(theta=10000.0)))
    found += [variant("one table", rotation(LongRope(table, table, DECLARED, 1.0, 1.0)))]
    for what, scaling in _SCALINGS.items():
        if base not in _ONLY_TABLES or what == "two tables":
            found.append(variant(what, rotation(scaling(pairs)), TRAINED))
    dropped = Variant(base, "dropped", (NoPE(),), prepare=prepare)
    if base in ("gemma3", "olmo3"):
        dropped = variant("dropped", NoPE())
    found.append(dropped)
    if base not in (*_ONLY_TABLES, "smollm3", "granite_swa"):  # these have other keys for it
        found.append(replace(dropped, what="dropped, as a table", tables=True))
    return found


def _yarn(factor: float = 4, base: float = 500.0, length: int = TRAINED, **options: Any) -> Rope:
    return Rope(base, scaling=Yarn(factor, length, **options))


_R = Rope(500.0)
_IN_WINDOWS = Layer(_R, WINDOW)
# DroPE's layout, which no runtime has; other Llamas, whose rotations are below; Gemma 3 with PI on more tokens than are
# read.
_LEFT_OUT = {name for name in families() if name.startswith("llama")} - {"llama_bias", "llama_head_dim"} | {"gemma3"}
VARIANTS = (
    *(Variant(name, "as it is") for name in families() if name not in _LEFT_OUT),
    *(variant for base in _FAMILIES for variant in _of_family(base)),
    Variant("llama", "p-RoPE", (Rope(500.0, 0.5),)),
    Variant("llama", "partial RoPE", (PartialRope(500.0, 0.5),)),
    Variant("llama", "YaRN(2.3), as a table", (_yarn(2.3),), TRAINED),
    Variant("smollm3", "YaRN(2.3), as a table", (*[_yarn(2.3)] * 3, NoPE()), TRAINED),
    Variant("llama", "NTK-by-parts", (Rope(500.0, scaling=NTKByParts(4, TRAINED)),), TRAINED),
    Variant("llama", "YaRN with mscale", (_yarn(mscale=0.7, mscale_all_dim=0.3),), TRAINED),
    Variant("llama", "YaRN with betas", (_yarn(beta_fast=2.0, beta_slow=0.25),), TRAINED),
    Variant("llama", "YaRN without rounding", (_yarn(length=4096, truncate=False),), 4096),
    Variant("llama", "dynamic NTK, factor 4", (Rope(500.0, scaling=DynamicNTK(TRAINED, 4.0)),), TRAINED),
    Variant("olmo2", "dynamic NTK, factor 4", (Rope(500.0, scaling=DynamicNTK(TRAINED, 4.0)),), TRAINED),
    Variant("smollm3", "rotation on every second layer", (_R, NoPE())),
    Variant("smollm3", "windows", (_IN_WINDOWS, _IN_WINDOWS, _IN_WINDOWS, NoPE())),
    Variant("smollm3", "biases", (_R, _R, _R, NoPE()), prepare=_biased),
    Variant("qwen2_window", "windows on all layers", (_IN_WINDOWS,)),
    Variant("qwen2_window", "windows on some layers", (_IN_WINDOWS, _R)),
    Variant("qwen3", "windows on all layers", (_IN_WINDOWS,)),
    Variant("qwen3", "biases", (_R,), prepare=_biased),
    Variant("gemma", "biases", (Rope(10000.0),), prepare=_biased),
    Variant("gpt_neox_sequential", "RoPE of base 10,000", (Rope(10000.0),)),
    Variant("gemma3", "windows on all layers", (Layer(Rope(10000.0), WINDOW),)),
    Variant("gemma3", "windows on all layers, usual scale", (Layer(Rope(10000.0), WINDOW),), prepare=_usual_scale),
    Variant("olmo3", "two bases", (_IN_WINDOWS, Rope(10000.0))),
    Variant("olmo3", "YaRN on all layers", (Layer(_yarn(), WINDOW), _yarn()), TRAINED),
    Variant("ministral3", "RoPE", (_R,)),
    Variant("phi3", "windows", (Layer(PartialRope(500.0, 0.5), WINDOW),)),
    Variant("exaone4_full", "base 1,000,000", (Rope(1e6),), prepare=_small_epsilon),
    Variant("exaone4_full", "YaRN of base 1,000,000", (_yarn(base=1e6),), TRAINED, prepare=_small_epsilon),
    Variant("exaone4_full", "dropped, as a table; epsilon", (NoPE(),), tables=True, prepare=_small_epsilon),
    Variant("exaone4", "base 1,000,000", (*[Layer(Rope(1e6), WINDOW)] * 3, NoPE()), prepare=_small_epsilon),
    Variant("exaone4", "windows on all layers", (Layer(Rope(1e6), WINDOW),), prepare=_small_epsilon),
    Variant("starcoder2", "a base that is no whole number", (Rope(500.5),)),
    Variant("granite_swa", "no windows", (_R,)),
    Variant("granite_swa", "several bases", (_IN_WINDOWS, Rope(1000.0))),
    Variant("stablelm_parallel", "parallel blocks, RoPE of base 10,000", (PartialRope(10000.0, 0.5),)),
    *(
        Variant("gemma4", what, (Layer(Rope(100.0), WINDOW), encoding), length)
        for what, encoding, length in (
            ("RoPE in full layers", _R, DECLARED),
            ("p-RoPE of a half", Rope(500.0, 0.5), DECLARED),
            ("p-RoPE and PI", Rope(500.0, 0.25, PI(4)), TRAINED),
            ("PI", Rope(500.0, scaling=PI(4)), TRAINED),
            ("YaRN", _yarn(), TRAINED),
            ("dropped", NoPE(), DECLARED),
        )
    ),
    Variant("gpt2", "four times as wide", prepare=_four_times_as_wide),
    Variant("falcon_40b", "four times as wide", prepare=_four_times_as_wide),
    Variant("falcon_sequential", "four times as wide", prepare=_four_times_as_wide),
)


@dataclass(frozen=True)
class Written:
    """A variant's `config.json`, and its layers."""

    variant: Variant
    source: Path  # the model whose weights it has
    config: Config
    model: ModelConfig
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Computed:
    """A variant's directory, and what pe_lab computes of it."""

    written: Written
    directory: Path
    tokens: np.ndarray  # [T]
    logits: dict[int, np.ndarray]  # by the number of tokens, [T, V]


def write(variant: Variant, scratch: Path) -> Written:
    """The `config.json` of a variant."""
    directory = HF / variant.base
    if variant.prepare is not Variant.prepare:
        directory = scratch / f"{variant.base}{variant.prepare.__name__}"
        if not directory.exists():
            shutil.copytree(HF / variant.base, directory)
            variant.prepare(directory)
    source = _source(directory)
    family = FAMILIES[json.loads((directory / "config.json").read_text())["model_type"]]
    layers = tuple(layer if isinstance(layer, Layer) else Layer(layer) for layer in variant.layers)
    if layers:
        # GraniteSWA's layers have sinks.
        layers = tuple(replace(layers[n % len(layers)], extras=own.extras) for n, own in enumerate(source.layers))
    length = variant.length if layers else source.training_length
    layers = layers or source.layers
    options = WriteOptions(length, tables=variant.tables)
    config, _ = write_config(family, source.model, layers, options, "float32")
    return Written(variant, directory, config, source.model, layers)


@functools.lru_cache(maxsize=64)
def _source(directory: Path) -> CheckpointSource:
    return open_source(f"hf:{directory}")


def compute(written: Written, directory: Path) -> Computed:
    """Makes the directory of a variant, with the weights that its model has: they do not depend on encodings."""
    directory.mkdir()
    for file in written.source.glob("*.safetensors*"):
        shutil.copy(file, directory)
    config = {key: value for key, value in written.config.items() if key != PE_LAB_KEY}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = replace(_opened(written.source), layers=written.layers)
    tokens = np.random.default_rng(0).integers(0, written.model.vocab_size, max(PREFIXES))
    if any(layer.follows_length for layer in written.layers):
        computed = {n: logits(checkpoint, tokens[None, :n])[0] for n in PREFIXES}
    else:
        whole = logits(checkpoint, tokens[None])[0]
        computed = {n: whole[:n] for n in PREFIXES}
    return Computed(written, directory, tokens, computed)


@functools.lru_cache(maxsize=64)
def _opened(directory: Path) -> Checkpoint:
    return open_checkpoint(f"hf:{directory}")


def measure(runtime: str, computed: Sequence[Computed]) -> list[set[str]]:
    """How each variant fails in a runtime, as the kinds of `KINDS`; empty: it is right, at all of `PREFIXES`.

    A runtime that derives a shorter length than the export declares reads it once more with that length set. An
    encoding that follows the length is read beyond the length that it declares.
    """
    results = READERS[runtime]([Job(each.directory, each.tokens) for each in computed], PREFIXES)
    found = [failures(runtime, each, result) for each, result in zip(computed, results, strict=True)]
    if runtime == LLAMA_CPP:
        return found
    reach = [_reach(each.written) for each in computed]
    again = [n for n, x in enumerate(results) if not x.error and x.max_length < min(reach[n], max(PREFIXES))]
    jobs = [Job(computed[n].directory, computed[n].tokens, reach[n]) for n in again]
    for n, result in zip(again, READERS[runtime](jobs, PREFIXES) if jobs else (), strict=True):
        # It started with its own length, so that an error is one of this length.
        longer = {WRONG} if result.error else failures(runtime, computed[n], result)
        found[n] |= longer & {WRONG}
    return found


def _reach(written: Written) -> int:
    """The longest sequence that a variant is asked for, in tokens."""
    declared = declared_length(written.config)
    dynamic = any(isinstance(getattr(layer.encoding, "scaling", None), DynamicNTK) for layer in written.layers)
    return max(declared, max(PREFIXES)) if dynamic else declared


def failures(runtime: str, computed: Computed, result: Result) -> set[str]:
    """The kinds of failures that one result shows."""
    if result.error:
        return {NO_START}
    kinds = set()
    if runtime != LLAMA_CPP:
        declared = declared_length(computed.written.config)
        kinds |= {SHORTER} if result.max_length < declared else {LONGER} if result.max_length > declared else set()
    limit = tolerance(runtime, computed.written.config)
    differences = [np.abs(theirs - computed.logits[n]).max() for n, theirs in result.logits.items()]
    if result.errors or not differences or max(differences) > limit or not rotations_agree(computed, result):
        kinds.add(WRONG)
    return kinds


# Those in which a runtime has another GELU (in llama.cpp a table in float16); it changes logits by 6e-3 at most, and by
# 1.03e-2 in Gemma 4, which has one more in each layer (pe_lab with GELU in 16 bits differs by 1.03e-2, too).
OTHER_GELU = {
    LLAMA_CPP: ("gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt_neox", "gpt2", "bloom", "falcon", "starcoder2"),
    SGLANG: ("gemma",),
    VLLM: ("bloom",),
}


def tolerance(runtime: str, config: Mapping[str, Any]) -> float:
    """The largest difference of a logit that is called right."""
    family = config["model_type"]
    return 1e-4 if family not in OTHER_GELU[runtime] else 8e-3 if family != "gemma4_text" else 1.5e-2


def rotations_agree(computed: Computed, result: Result) -> bool:
    """Whether the rotations that a runtime calls are pe_lab's, cos and sin times the gain, at all positions read."""
    if result.rotations is None:
        return True
    positions, model = result.positions, computed.written.model
    heads = layer_heads(model) or [model] * model.layers
    for layer, own, theirs in zip(computed.written.layers, heads, result.rotations, strict=True):
        if theirs.size == 0:  # transformers' classes rotate
            continue
        if np.isnan(theirs).any():
            if not isinstance(layer.encoding, NoPE):
                return False
            continue
        inv_freq, gain = frequencies(layer.encoding, own.head_dim, len(positions))
        angles = positions[:, None] * np.asarray(inv_freq, np.float64)
        ours = np.stack([np.cos(angles), np.sin(angles)], -1) * np.asarray(gain)[None, :, None]
        pairs = theirs.shape[1]
        missing = np.broadcast_to([1.0, 0.0], (len(ours), max(0, pairs - ours.shape[1]), 2))
        ours = np.concatenate([ours, missing], 1)
        if np.abs(ours[:, :pairs] - theirs).max(initial=0) > 1e-5:
            return False
    return True

"""Exports of edited models, the forms that their `config.json` may take, and what runtimes compute of them.

`VARIANTS` has at least one for each line of `pe_lab.checkpoints.runtimes.CONTENTS`; tests/checkpoints/
test_runtime_variants.py reads each in vLLM, SGLang and llama.cpp, and compares with pe_lab.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tables import EDITS, HF, Edit, edited, families, tensors
from runtime_environments import READERS, Job, Result
from safetensors.numpy import save_file

from pe_lab.checkpoints.rope_parameters import NO_ROTATION, declared_length
from pe_lab.checkpoints.runtimes import LLAMA_CPP, LONGER, NO_START, SGLANG, SHORTER, VLLM, WRONG
from pe_lab.language_model import LanguageModel
from pe_lab.positional import DynamicNTK, Layer, Llama3, LongRope, NoPE, NTKByParts, PartialRope, Rope, Yarn, drop, frequencies, pattern

TRAINED = 16  # tokens, of the edits and of the models below
PREFIXES = (12, 17, 48)  # tokens read: within the training length, one more, and three times as many
_BASE = 500.0

Config = dict[str, Any]


class Unchanged(Edit):
    """A model of tests/data/hf, taken out as it is."""

    def apply(self, lm: LanguageModel) -> LanguageModel:
        return lm


@dataclass(frozen=True)
class Variant:
    """An exported model, in the form that `convert` writes or, with `rewrite`, in another one."""

    edit: Edit
    rewrite: Callable[[Config], Config] | None = None
    name: str = ""
    prepare: Callable[[Path], None] | None = None  # changes a copy of the model of tests/data/hf first

    @property
    def title(self) -> str:
        return self.name or self.edit.name


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
    """Pads Falcon's MLP with zeros to four times the model's width, which computes the same."""
    found = tensors(directory)
    width = next(x.shape[1] for name, x in found.items() if name.endswith("dense_h_to_4h.weight"))
    for name, array in found.items():
        if "dense_h_to_4h" in name:
            found[name] = np.pad(array, [(0, 4 * width - len(array))] + [(0, 0)] * (array.ndim - 1))
        elif name.endswith("dense_4h_to_h.weight"):
            found[name] = np.pad(array, [(0, 0), (0, 4 * width - array.shape[1])])
    _rewritten(directory, found, ffn_hidden_size=4 * width)


def _with_mlp_norm(directory: Path) -> None:
    """Makes the blocks of StableLM sequential, with a norm before the MLP."""
    found, random = tensors(directory), np.random.default_rng(1)
    for name in [name for name in found if ".input_layernorm." in name]:
        array = found[name]
        other = (array + 0.3 * random.normal(size=array.shape)).astype(array.dtype)
        found[name.replace("input_layernorm", "post_attention_layernorm")] = other
    _rewritten(directory, found, use_parallel_residual=False)


def _usual_scale(directory: Path) -> None:
    """Gives Gemma 2 the attention scale of its head dimension, as 2B and 9B have it."""
    head_dim = json.loads((directory / "config.json").read_text())["head_dim"]
    _rewritten(directory, tensors(directory), query_pre_attn_scalar=head_dim)


def _small_epsilon(directory: Path) -> None:
    _rewritten(directory, tensors(directory), rms_norm_eps=1e-6)


def _table_of(config: Config, divisors: Sequence[float], gain: float, mscales: bool) -> Config:
    rope = {
        "rope_type": "longrope",
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "attention_factor": gain,
    }
    rope |= {"short_mscale": gain, "long_mscale": gain} if mscales else {}
    keys = {"rope_scaling": rope, "rope_parameters": rope | {"rope_theta": config["rope_theta"]}}
    return config | keys | {"original_max_position_embeddings": config["max_position_embeddings"]}


def _dropped_as_table(config: Config) -> Config:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return _table_of(config, [NO_ROTATION] * (width // 2), 1.0, mscales=True)


def _without_mscales(config: Config) -> Config:
    config = json.loads(json.dumps(config))
    for keys in (config["rope_scaling"], config["rope_parameters"]):
        del keys["short_mscale"], keys["long_mscale"]
    return config


def _dropped_by_type_as_table(config: Config) -> Config:
    """As `_dropped_as_table`, where the rope parameters are by type of layers."""
    flat = _dropped_as_table(config)
    return flat | {"rope_parameters": {kind: flat["rope_parameters"] for kind in config["rope_parameters"]}}


def _with(**keys: Any) -> Callable[[Config], Config]:
    """Other keys of `config.json`."""
    return lambda config: config | keys


def _family(
    base: str,
    positional: object = None,
    suffix: str = "",
    rewrite: Callable[[Config], Config] | None = None,
    prepare: Callable[[Path], None] | None = None,
    length: int | None = None,
) -> Variant:
    """A model of tests/data/hf as its own architecture, as it is or with other positions."""
    kind = Edit if positional is not None else Unchanged
    model_type = json.loads((HF / base / "config.json").read_text())["model_type"]
    options = (f"--family={model_type}", *([f"--max-length={length}"] if length else []))
    return Variant(kind(f"{base}{suffix}", base, positional, options=options), rewrite, f"{base}{suffix}", prepare)


def _of(name: str, edit: str, rewrite: Callable[[Config], Config]) -> Variant:
    (found,) = (each for each in EDITS if each.name == edit)
    return Variant(found, rewrite, name)


# The gain is not the one that servers compute of the lengths.
_GAINED = Rope(_BASE, scaling=LongRope((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), TRAINED, 4.0, 1.4))
_YARN = Rope(_BASE, scaling=Yarn(4, TRAINED))
_WINDOWED = pattern([Layer(Rope(_BASE), 8)])
# Models whose form is among the edits, and one that no runtime has.
_NOT_AS_THEY_ARE = ("llama_drope", "llama_sharded", "llama_tied_bf16", "llama", "llama_bias", "llama_head_dim", "gpt_neox")
# Of families with one rotation, those whose dropped form is not among the edits.
_DROPPED = ("mistral", "ministral3", "olmo2", "gemma2", "cohere2", "exaone4", "granite", "starcoder2", "stablelm", "stablelm_parallel", "glm4", "falcon_sequential", "exaone4_full")
_SCALINGS = (NTKByParts(4, TRAINED), DynamicNTK(TRAINED), Yarn(2.3, TRAINED), LongRope((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), TRAINED, 4.0))
_EVERY_FOURTH = [Layer(Rope(_BASE), 8)] * 3 + [Layer(NoPE())]
_GEMMA3 = [Layer(Rope(100.0), 8), Layer(Rope(100.0), 8), Layer(Rope(5000.0)), Layer(Rope(100.0), 8)]
_GEMMA3_BARE = [Layer(Rope(100.0), 8), Layer(Rope(100.0), 8), Layer(NoPE()), Layer(Rope(100.0), 8)]
VARIANTS = (
    *(Variant(edit) for edit in EDITS),
    Variant(Edit("llama3 on Qwen3", "qwen3", Rope(_BASE, scaling=Llama3(4, original_length=TRAINED)))),
    Variant(Edit("one table with a gain", "llama", _GAINED)),
    Variant(Edit("YaRN(4) with mscale", "llama", Rope(_BASE, scaling=Yarn(4, TRAINED, mscale=0.7, mscale_all_dim=0.3)))),
    Variant(Edit("YaRN(4) with betas", "llama", Rope(_BASE, scaling=Yarn(4, TRAINED, beta_fast=2.0, beta_slow=0.25)))),
    Variant(Edit("YaRN(4) without rounding", "llama", Rope(_BASE, scaling=Yarn(4, 4096, truncate=False)))),
    Variant(Edit("YaRN(4) with an attention factor", "llama", Rope(_BASE, scaling=Yarn(4, TRAINED, attention_factor=1.3)))),
    Variant(Edit("windows on all layers, Qwen2", "qwen2_window", _WINDOWED)),
    Variant(Edit("windows on all layers, Qwen3", "qwen3", _WINDOWED)),
    Variant(Edit("windows on some layers, Qwen2", "qwen2_window", pattern([Layer(Rope(_BASE), 8), Layer(Rope(_BASE))] * 2))),
    Variant(Edit("windows of full layers, SmolLM3", "smollm3", pattern([Layer(Rope(_BASE), 8)] * 3 + [Layer(NoPE())]))),
    Variant(Edit("every fourth layer without rotation", "smollm3", pattern([Rope(_BASE)] * 3 + [NoPE()]))),
    Variant(Edit("biases, Llama", "llama_bias", Rope(_BASE))),
    Variant(Edit("biases, Qwen3", "qwen3", Rope(_BASE)), prepare=_biased),
    Variant(Edit("biases, SmolLM3", "smollm3", pattern([Rope(_BASE)] * 3 + [NoPE()])), prepare=_biased),
    Variant(Edit("biases, Gemma", "gemma", Rope(10000.0)), prepare=_biased),
    Variant(Edit("GPT-NeoX, tied", "gpt_neox_sequential", PartialRope(10000.0, 0.25))),
    Variant(Edit("Gemma, RoPE of base 10,000", "gemma", Rope(10000.0))),
    Variant(Edit("Gemma, RoPE of base 500", "gemma", Rope(_BASE))),
    Variant(Edit("Gemma, YaRN(4)", "gemma", Rope(_BASE, scaling=Yarn(4, TRAINED)))),
    Variant(Edit("GPT-NeoX, RoPE of base 10,000", "gpt_neox", PartialRope(10000.0, 0.25))),
    Variant(Edit("GPT-NeoX, RoPE of base 500", "gpt_neox", PartialRope(_BASE, 0.25))),
    Variant(Edit("heads of another width", "llama_head_dim", Rope(_BASE))),
    _of("dropped, as a table", "dropped", _dropped_as_table),
    _of("QK-norm, dropped, as a table", "QK-norm, dropped", _dropped_as_table),
    _of("Gemma, dropped, as a table", "Gemma, dropped", _dropped_as_table),
    Variant(Edit("one table with a gain", "llama", _GAINED), _without_mscales, "one table with a gain, without mscales"),
    Variant(Edit("dynamic NTK, factor 4", "llama", Rope(_BASE, scaling=DynamicNTK(TRAINED, 4.0)))),
    *(_family(name) for name in families() if name not in _NOT_AS_THEY_ARE),
    *(_family(name, drop(), ", dropped", length=256) for name in _DROPPED),
    *(_family(name, drop(), ", dropped, as a table", _dropped_as_table, length=256) for name in _DROPPED if name != "ministral3"),
    _family("phi3", pattern([NoPE()]), ", dropped, without windows"),
    _family("olmo3", drop(), ", dropped", length=256),
    _family("olmo3", drop(), ", dropped, as a table", _dropped_by_type_as_table, length=256),
    _family("gemma3", pattern(_GEMMA3), ", RoPE"),
    _family("gemma3", pattern(_GEMMA3_BARE), ", no encoding without a window"),
    _family("falcon_7b", None, ", four times as wide", prepare=_four_times_as_wide),
    _family("falcon_40b", None, ", four times as wide", prepare=_four_times_as_wide),
    _family("falcon_7b", Rope(10000.0), ", four times as wide, base 10,000", prepare=_four_times_as_wide),
    _family("falcon_7b", drop(), ", four times as wide, dropped", prepare=_four_times_as_wide),
    _family("falcon_7b", drop(), ", four times as wide, dropped, as a table", _dropped_as_table, _four_times_as_wide),
    _family("stablelm_parallel", None, ", sequential", prepare=_with_mlp_norm),
    _family("stablelm_parallel", PartialRope(10000.0, 0.5), ", base 10,000"),
    _family("stablelm_parallel", PartialRope(10000.0, 0.5), ", sequential, base 10,000", prepare=_with_mlp_norm),
    _family("stablelm_parallel", PartialRope(_BASE, 0.5, Yarn(4, TRAINED)), ", sequential, YaRN(4)", prepare=_with_mlp_norm),
    _family("stablelm_parallel", drop(), ", sequential, dropped", prepare=_with_mlp_norm),
    _family("stablelm_parallel", drop(), ", sequential, dropped, as a table", _dropped_as_table, _with_mlp_norm),
    _family("gemma2", None, ", usual scale", prepare=_usual_scale),
    _family("gemma2", pattern([Layer(Rope(10000.0), 8), Layer(Rope(10000.0))]), ", usual scale, base 10,000", prepare=_usual_scale),
    _family("gemma2", None, ", with hidden_act", _with(hidden_act="gelu_pytorch_tanh")),
    _family("gemma2", drop(), ", with hidden_act, dropped, as a table", lambda c: _dropped_as_table(c) | {"hidden_act": "gelu_pytorch_tanh"}),
    _family("cohere2", None, ", with rotary_pct", _with(rotary_pct=1.0)),
    _family("exaone4", None, ", with a pattern in words", _with(sliding_window_pattern="LLGL")),
    _family("exaone4_full", Rope(1000000.0), ", base 1,000,000"),
    _family("exaone4_full", Rope(1000000.0), ", base 1,000,000, epsilon 1e-6", prepare=_small_epsilon),
    _family("exaone4", pattern(_EVERY_FOURTH), ", every fourth layer"),
    _family("exaone4", pattern(_EVERY_FOURTH), ", every fourth layer, pattern in words, epsilon 1e-6", _with(sliding_window_pattern="LLLG"), _small_epsilon),
    _family("cohere2", pattern(_EVERY_FOURTH), ", every fourth layer, with rotary_pct", _with(rotary_pct=1.0)),
    _family("gemma3", pattern([Layer(Rope(10000.0), 8)]), ", windows of base 10,000"),
    _family("gemma3", pattern([Layer(Rope(10000.0), 8)]), ", windows of base 10,000, usual scale", prepare=_usual_scale),
    _family("granite_swa", pattern([Layer(Rope(_BASE), 8), Layer(Rope(_BASE), 8), Layer(NoPE()), Layer(Rope(_BASE), 8)]), ", one base, with no_rope_layers", _with(no_rope_layers=[1, 1, 0, 1])),
    *(Variant(Edit(f"GPT-NeoX, {x}", "gpt_neox", PartialRope(_BASE, 0.25, x))) for x in _SCALINGS[:3]),
    *(_family("smollm3", pattern([Rope(_BASE, scaling=x)] * 3 + [NoPE()]), f", {x}") for x in _SCALINGS),
    _family("gpt2", None, ", with n_ctx", _with(n_ctx=64)),
    _family("mistral", Rope(_BASE), ", without windows"),
    _family("mistral", _YARN, ", YaRN(4)"),
    _family("starcoder2", Rope(_BASE), ", without windows"),
    _family("starcoder2", _YARN, ", YaRN(4)"),
    _family("phi3", PartialRope(100.0, 0.5), ", without tables and windows"),
    _family("olmo2", _YARN, ", YaRN(4)"),
    _family("cohere2", pattern([Layer(_YARN, 8)] * 3 + [Layer(NoPE())]), ", YaRN(4), with rotary_pct", _with(rotary_pct=1.0)),
    _family("glm4", PartialRope(_BASE, 0.5, Yarn(4, TRAINED)), ", YaRN(4)"),
    _family("granite", _YARN, ", YaRN(4)"),
    _family("exaone4_full", _YARN, ", YaRN(4)"),
    _family("gemma2", pattern([Layer(_YARN, 8), Layer(_YARN)]), ", YaRN(4)"),
    _family("granite_swa", pattern([Layer(Rope(_BASE), 8), Layer(Rope(_BASE), 8), Layer(NoPE()), Layer(Rope(_BASE), 8)]), ", one base"),
    _family("granite_swa", pattern([Layer(Rope(_BASE), 8)]), ", no layer without rotation"),
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A variant's directory, and what pe_lab computes of it."""

    variant: Variant
    directory: Path
    config: Config
    tokens: np.ndarray  # [T]
    logits: dict[int, np.ndarray]  # by the number of tokens, [T, V]
    layers: tuple[Layer, ...]
    head_dim: int
    length: int | None = None  # that the encodings were fixed at, in tokens


def write(variant: Variant, scratch: Path) -> Written:
    """Exports a variant."""
    edit = variant.edit
    if variant.prepare is not None:
        copy = scratch / "prepared" / edit.base
        shutil.copytree(HF / edit.base, copy)
        variant.prepare(copy)
        edit = dataclasses.replace(edit, base=str(copy))
    lm, out, _ = edited(edit, scratch)
    file = out / "config.json"
    config = json.loads(file.read_text())
    if variant.rewrite is not None:
        config = {key: value for key, value in variant.rewrite(config).items() if key != "pe_lab"}
        file.write_text(json.dumps(config))
    lengths = [int(option.removeprefix("--length=")) for option in edit.options if "--length=" in option]
    lm = lm.at_length(lengths[0]) if lengths else lm
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, max(PREFIXES))
    if any(layer.follows_length for layer in lm.layers):
        logits = {n: np.asarray(lm.logits(tokens[None, :n]))[0] for n in PREFIXES}
    else:
        whole = np.asarray(lm.logits(tokens[None]))[0]
        logits = {n: whole[:n] for n in PREFIXES}
    return Written(variant, out, config, tokens, logits, tuple(lm.layers), lm.config.head_dim, lm.schedule_length)


def measure(runtime: str, written: Sequence[Written]) -> list[set[str]]:
    """How each variant fails in a runtime, as the kinds of `KINDS`; empty: it is right, at all of `PREFIXES`.

    A runtime that derives a shorter length than the export declares reads it once more with that length set. An encoding
    that follows the length is read beyond the length that it declares.
    """
    jobs = [Job(each.directory, each.tokens) for each in written]
    results = READERS[runtime](jobs, PREFIXES)
    found = [failures(runtime, each, result) for each, result in zip(written, results, strict=True)]
    if runtime == LLAMA_CPP:
        return found
    reach = [_reach(each) for each in written]
    again = [n for n, result in enumerate(results) if not result.error and result.max_length < min(reach[n], max(PREFIXES))]
    jobs = [dataclasses.replace(jobs[n], length=reach[n]) for n in again]
    for n, result in zip(again, READERS[runtime](jobs, PREFIXES) if jobs else (), strict=True):
        # It started with its own length, so that an error is one of this length.
        longer = {WRONG} if result.error else failures(runtime, written[n], result)
        found[n] |= longer & {WRONG}
    return found


def _reach(written: Written) -> int:
    """The longest sequence that a variant is asked for, in tokens."""
    declared = declared_length(written.config)
    dynamic = any(isinstance(getattr(layer.encoding, "scaling", None), DynamicNTK) for layer in written.layers)
    return max(declared, max(PREFIXES)) if dynamic else declared


def failures(runtime: str, written: Written, result: Result) -> set[str]:
    """The kinds of failures that one result shows."""
    if result.error:
        return {NO_START}
    kinds = set()
    if runtime != LLAMA_CPP:
        declared = declared_length(written.config)
        kinds |= {SHORTER} if result.max_length < declared else {LONGER} if result.max_length > declared else set()
    limit = tolerance(runtime, written.config)
    differences = [np.abs(logits - written.logits[n]).max() for n, logits in result.logits.items()]
    if result.errors or not differences or max(differences) > limit or not rotations_agree(written, result):
        kinds.add(WRONG)
    return kinds


def tolerance(runtime: str, config: Mapping[str, Any]) -> float:
    """The largest difference of a logit that is called right: that of another GELU where a runtime has one."""
    other_gelu = {LLAMA_CPP: ("gemma", "gemma2", "gemma3_text", "gpt_neox", "bloom", "falcon", "starcoder2"), SGLANG: ("gemma",), VLLM: ("bloom",)}
    return 4e-3 if config["model_type"] in other_gelu.get(runtime, ()) else 2e-5


def rotations_agree(written: Written, result: Result) -> bool:
    """Whether the rotations that a runtime calls are pe_lab's, cos and sin times the gain, at all positions read."""
    if result.rotations is None:
        return True
    positions = result.positions
    for layer, theirs in zip(written.layers, result.rotations, strict=True):
        if theirs.size == 0:  # transformers' classes rotate
            continue
        if np.isnan(theirs).any():
            if not isinstance(layer.encoding, NoPE):
                return False
            continue
        inv_freq, gain = frequencies(layer.encoding, written.head_dim, written.length or len(positions))
        angles = positions[:, None] * np.asarray(inv_freq, np.float64)
        ours = np.stack([np.cos(angles), np.sin(angles)], -1) * np.asarray(gain)[None, :, None]
        if np.abs(ours[:, : theirs.shape[1]] - theirs).max(initial=0) > 1e-5:
            return False
    return True

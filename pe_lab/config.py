"""The config of a run as frozen dataclasses, with defaults and bounds; and their codec, from and to JSON."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pe_lab.errors import ConfigError, UserError, call, did_you_mean, redacted

INT32 = 2**31 - 1  # counts of steps and tokens are int32 on the devices
SEED = 2**32 - 1  # of a random key
OMIT_DEFAULT = {"omit_default": True}  # metadata of a field that JSON has only where it is not the default


def number(default: float | str | tuple[int, ...], least: float, most: float) -> Any:
    """A numeric field: its default, and the bounds, ends included, that `check_bounds` enforces.

    The bounds exclude what no machine can hold or no formula means, not what is unwise.
    """
    return field(default=default, metadata={"bounds": (least, most)})


def check_name(what: str, name: str) -> None:
    """`ConfigError` for a name that a directory cannot have, or that leads out of the one above it."""
    if not name or name.startswith(".") or any(sign in "/\\" or not sign.isprintable() for sign in name):
        raise ConfigError(
            f"{what} is {name!r}; a directory gets this name: give one of printable characters, without slashes and "
            "with no dot in front."
        )


@dataclass(frozen=True)
class LayerShape:
    """Layers whose weights have another shape than the model's (Gemma 4), where other fields hold for all layers."""

    name: str  # of their parameters, which are stacked in `layers.shapes.NAME`
    layers: tuple[int, ...] = number((), 0, 2**11)
    head_dim: int = number(0, 0, 2**14)  # 0, of these three: the model's
    kv_heads: int = number(0, 0, 2**14)
    d_ff: int = number(0, 0, 2**22)
    values_are_keys: bool = False  # as in ModelConfig
    keys_of: int = number(-1, -1, 2**11)  # they attend to the keys and values of this earlier layer; -1: to their own


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the decoder. Its positional encoding is a key of each phase: `positional`."""

    vocab_size: int = number(0, 0, 2**24)  # 0: taken from the tokenizer, rounded up to a multiple of 128
    layers: int = number(12, 1, 2**11)
    d_model: int = number(768, 1, 2**20)
    d_ff: int = number(2048, 1, 2**22)
    heads: int = number(12, 1, 2**14)
    kv_heads: int = number(12, 1, 2**14)
    head_dim: int = number(0, 0, 2**14)  # 0: d_model / heads
    qk_norm: str = "none"  # before rotation: none | head | flat | query_head | query_flat | layer_heads
    attention_bias: bool = False  # bias on the query, key and value projections (Qwen2)
    output_bias: bool = False  # bias on the output projection of the attention
    mlp_bias: bool = False  # bias on every projection of the feed-forward
    norm: str = "rms"  # rms | rms_plus_one (scaled by 1 + w, Gemma) | layer | layer_no_bias
    # Norms before each branch, after it (OLMo 2), or both (Gemma 2); or parallel branches, with two norms or with one.
    block: str = "pre_norm"  # pre_norm | post_norm | pre_post_norm | parallel (GPT-NeoX) | parallel_one_norm (GPT-J)
    activation: str = "silu"  # silu | gelu_tanh | gelu (the exact one) | relu | relu2
    gated_mlp: bool = True  # down(activation(gate x) * up x), or else down(activation(up x))
    feed_forward: str = field(default="", metadata=OMIT_DEFAULT)  # a registered module in the place of the MLP
    attention_scale: float = number(0.0, 0, 10**6)  # factor on products of queries and keys; 0: 1 / sqrt(head_dim)
    attention_soft_cap: float = number(0.0, 0, 10**6)  # c: attention logits x become c tanh(x / c) (Gemma 2); 0: none
    qkv_clip: float = number(0.0, 0, 10**6)  # the largest query, key and value (MPT), which no weight bounds; 0: none
    # Of Gemma 4. No weight implies them; the scale acts on the residual stream too, so that no weight can hold it.
    value_norm: bool = field(default=False, metadata=OMIT_DEFAULT)  # an RMS norm of each head's values, without a scale
    values_are_keys: bool = field(default=False, metadata=OMIT_DEFAULT)  # before the keys' norm and rotation
    layer_scale: bool = field(default=False, metadata=OMIT_DEFAULT)  # a fixed factor on each layer's output
    per_layer_input: int = field(default=0, metadata={"bounds": (0, 2**14), **OMIT_DEFAULT})  # channels of LayerInput
    layer_shapes: tuple[LayerShape, ...] = field(default=(), metadata=OMIT_DEFAULT)  # layers with other weights
    residual_multiplier: float = number(1.0, 0, 10**6)  # of each branch, as it is added (Granite)
    tie_embeddings: bool = True
    embedding_multiplier: float = number(1.0, 0, 10**6)  # of the input embedding: sqrt(d_model) in Gemma
    embedding_norm: bool = False  # a norm of the input embedding (BLOOM); the residual stream carries its output
    unembedding_bias: bool = False  # a bias on the logits (GPT-J); no other weight is added to them
    logit_multiplier: float = number(1.0, 0, 10**6)  # of the model's logits (Cohere, Granite)
    logit_soft_cap: float = number(0.0, 0, 10**6)  # the same on the model's logits
    norm_epsilon: float = number(1e-6, 0, 1)
    init_std: float = number(0.02, 0, 1000)
    mup_base_width: int = field(default=0, metadata={"bounds": (0, 2**20), **OMIT_DEFAULT})  # model/parametrization.py
    mup_base_head_dim: int = field(default=0, metadata={"bounds": (0, 2**14), **OMIT_DEFAULT})  # 0: head_dim
    scaled_residual_init: bool = True  # output projections start at init_std / sqrt(2 layers) (GPT-2), else at init_std
    dtype: str = "bfloat16"  # compute; parameters are float32
    remat: str = "none"  # kept for the backward pass: none | dots_attention | dots | dots_offload | full | auto
    scan: bool | Literal["auto"] = True  # False unrolls the layers: faster on CPUs and GPUs, slower to compile
    attention: str = "auto"  # or a name that `python -m pe_lab.attention` lists
    attention_chunk: int = number(512, 1, 2**20)  # query and key block of the chunked attention, in tokens
    loss_chunks: int | Literal["auto"] = number(1, 1, 2**20)  # parts of a device's tokens, one loss after another


@dataclass(frozen=True)
class SourceConfig:
    """A corpus of the mixture. `options` are settings of one kind of source, such as needles."""

    source: str = "stdlib"
    weight: float = number(1.0, 0, 10**9)
    column: str = "text"
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str = field(default="", metadata=OMIT_DEFAULT)  # the text, of several columns: "{title}\n\n{meta.text}"
    chat: str = field(default="", metadata=OMIT_DEFAULT)  # a column of messages, or prompt/completion, or instruction
    name: str = ""  # in logs, and in `weights` and `epochs` of a phase; "": that of its `source`
    min_tokens: int = field(default=0, metadata={"bounds": (0, INT32), **OMIT_DEFAULT})  # of documents, EOS included
    epochs: float = number(0.0, 0, 10**6)  # passes that a phase may make over it; 0: any number
    when_dry: Literal["error", "repeat"] = "error"  # where a phase needs more than `epochs`


@dataclass(frozen=True)
class DataConfig:
    """The corpora, the tokenizer, and how tokens are packed into windows of `sequence_length` + 1."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    tokenizer: str = "bytes"  # bytes | hf:PATH | gguf:PATH | saved:DIR | sentencepiece:PATH or :train:SIZE | none
    prepared: str = ""  # a directory written by pe_lab.prepare; replaces `sources` and `tokenizer`
    grain: str = field(default="", metadata=OMIT_DEFAULT)  # FILE.py:FUNCTION of a Grain dataset; replaces `sources`
    cache_dir: str = "data"  # directory of the shards that the first use writes
    segments: bool = False  # mask attention between the documents of one window
    packing: Literal["concatenate", "best_fit"] = "concatenate"  # best_fit cuts no document that fits a window
    validation_fraction: float = number(0.01, 0, 1)
    seed: int = number(0, 0, SEED)
    workers: int = number(0, 0, 1024)  # threads that read batches ahead; 0: one


TOPOLOGIES = (  # what `pe_lab.plan --topology` takes
    "v4:4x4x4, v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:4x4x4 (--slices=N of them); "
    "a100:8, h100:8, h200:8, b200:8 (gpu:8 is h100:8); cpu:8; local"
)


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis. -1, on one axis at most: all remaining devices."""

    data: int = number(-1, -1, 2**20)
    fsdp: int = number(1, -1, 2**20)
    tensor: int = number(1, -1, 2**20)
    context: int = number(1, -1, 2**20)  # shards sequences along their length
    context_attention: Literal["auto", "ring", "ulysses"] = "auto"  # auto: what sends less
    slices: int = number(0, 0, 2**20)  # TPU slices that a data-center network joins, along data; 0: the devices say


@dataclass(frozen=True)
class MuonConfig:
    """Muon on the matrices of the layers (Jordan et al. 2024). AdamW updates all other parameters."""

    momentum: float = number(0.95, 0, 1)
    momentum_start: float = number(0.85, 0, 1)  # of the first step; it rises linearly to `momentum`
    momentum_warmup_steps: int = number(300, 0, INT32)
    nesterov: bool = True
    newton_schulz: Literal["polar_express", "jordan"] = "polar_express"  # coefficients of the iteration
    newton_schulz_steps: int = number(5, 1, 100)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the iteration; momentum and parameters are float32
    per_head: bool = True  # queries, keys and values: one matrix per head, else one for all heads
    scale: Literal["rms", "spectral"] = "rms"  # of an update: 0.2 sqrt(max(in, out)), or sqrt(max(1, out / in))
    cautious_decay: bool = False  # only where the update also moves the weight towards 0


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, with a warm-up and a decay of the learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = number(3e-4, 0, 1000)
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, decay) | constant
    warmup_steps: int = number(100, 0, INT32)
    decay_fraction: float = number(0.2, 0, 1)  # wsd: the fraction of the steps that decay
    final_fraction: float = number(0.0, 0, 1)  # learning rate at the end, as a fraction of the peak
    b1: float = number(0.9, 0, 1)
    b2: float = number(0.95, 0, 1)
    epsilon: float = number(1e-8, 0, 1)
    weight_decay: float = number(0.1, 0, 1000)  # on matrices only
    decay_embeddings: bool = True  # False: no weight decay on the embedding and the head
    clip_norm: float = number(1.0, 0, 10**30)
    # At `train --until`: the schedule of the new steps, the last rate, or a new warm-up and decay (auto: of cosine).
    on_prolong: Literal["auto", "stretch", "hold", "rewarm"] = "auto"
    embedding_multiplier: float = number(1.0, 0, 10**6)  # learning rate of the embedding, over `learning_rate`
    head_multiplier: float = number(1.0, 0, 10**6)  # of an output embedding that is not tied
    vector_multiplier: float = number(1.0, 0, 10**6)  # of norms and biases
    muon: MuonConfig = MuonConfig()


@dataclass(frozen=True)
class ProlongedConfig:
    """A phase of `steps` that `train --until` made longer: from step `at` on, the learning rate is that of `how`."""

    steps: int = number(1, 1, INT32)
    at: int = number(0, 0, INT32)
    how: Literal["stretch", "hold", "rewarm"] = "stretch"


@dataclass(frozen=True)
class DistillConfig:
    """A teacher of a phase, and the weights of the parts of its loss (model/distillation.py)."""

    teacher: str = "init"  # init: the checkpoint that the phase starts from, before its edits; or another, hf:DIR, ...
    cross_entropy: float = number(1.0, 0, 10**6)  # with the targets
    logits: float = number(1.0, 0, 10**6)  # KL(teacher || student)
    hidden: float = number(0.0, 0, 10**6)  # |student - teacher|^2 / |teacher|^2 of each layer's output
    attention: float = number(0.0, 0, 10**6)  # the same of each attention's output


@dataclass(frozen=True)
class TransitionConfig:
    """A gradual change of the encoding: over the first steps of a phase the schedule moves from another to its own."""

    start: Any = "init"  # init: the layers that the phase starts from; or an encoding, as `positional`
    until: float = number(1.0, 0, 1)  # the share of the steps after which the phase's own encoding is reached
    how: Literal["scale", "pairs", "layers"] = "scale"  # all frequencies shrink; pair by pair; or layer by layer


@dataclass(frozen=True)
class PhaseConfig:
    """A phase of training. It starts from the last checkpoint of the previous phase, unless `init_from` is set."""

    name: str = "pretrain"
    steps: int = number(1000, 1, INT32)
    epochs: float | Mapping[str, Any] = number(0.0, 0, 10**6)  # or {source: epochs}; above 0, `steps` follows from it
    weights: Mapping[str, Any] = field(default_factory=dict)  # {source: weight, or [[first step, weight], ...]}
    positional: Any = "rope"  # an encoding, its text ("rope:base=10000"), a list for the layers, or an edit
    qk_norm: str = ""  # model.qk_norm from this phase on; "" keeps the previous one
    qk_norm_init: Literal["matched", "ones"] = "matched"  # scales of an added norm: fitted to the logits, or 1 (DroPE)
    random_positions: int = number(0, 0, INT32)  # a step draws its positions below this (Ruoss et al. 2023); 0: none
    init_from: str = ""  # a checkpoint, hf:DIR, gguf:FILE, or "random"; "": the previous phase's last, else random
    other_tokenizer: bool = False  # whether init_from may have been trained with another tokenizer than the data's
    sequence_length: int = number(1024, 1, INT32)
    batch_size: int = number(256, 1, INT32)  # windows a step, over all devices and micro-batches
    accumulate: int | Literal["auto"] = number(1, 1, INT32)  # micro-batches a step
    optimizer: OptimizerConfig = OptimizerConfig()
    prolonged: tuple[ProlongedConfig, ...] = ()  # in the order in which it was
    distill: DistillConfig | None = field(default=None, metadata=OMIT_DEFAULT)  # learn from another model too
    transition: TransitionConfig | None = field(default=None, metadata=OMIT_DEFAULT)  # change the encoding gradually


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints a phase saves and keeps. Its last one is always kept."""

    every_steps: int = number(1000, 1, INT32)
    keep: int = number(2, 1, INT32)  # the latest ones
    keep_every: int = number(0, 0, INT32)  # steps that this number divides are kept too; 0: none
    milestones: tuple[int, ...] = number((), 1, INT32)  # steps of every phase that are saved, and never deleted
    best: str = ""  # the step with the lowest value of this metric is kept too, such as validation_loss
    verify: bool = True  # compare a checkpoint with its manifest before training goes on from it
    on_failure: Literal["stop", "continue"] = "stop"  # at a save that fails, for instance on a full disk

    def kept(self, steps: Sequence[int], metrics: Callable[[int], Mapping[str, float]]) -> set[int]:
        """The steps that a phase keeps, of ascending `steps`; `metrics` reads those of one."""
        kept = {*steps[-self.keep :], *(step for step in steps if step in self.milestones)}
        if self.keep_every:
            kept |= {step for step in steps if step and step % self.keep_every == 0}
        read = {step: metrics(step) for step in steps} if self.best else {}
        measured = {step: found[self.best] for step, found in read.items() if self.best in found}
        if measured:
            kept.add(min(measured, key=measured.__getitem__))  # the first one of equals
        return kept


@dataclass(frozen=True)
class WandbConfig:
    """The run of Weights & Biases to which a run is logged."""

    project: str = "pe_lab"
    entity: str = ""  # a team or user; "": the default of the account
    mode: Literal["online", "offline", "disabled"] = "online"  # offline: files in the workdir, for `wandb sync`
    group: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogConfig:
    """How often a run logs metrics and measures the validation loss, and where it shows them."""

    every_steps: int = number(1, 1, INT32)
    validate_every_steps: int = number(500, 1, INT32)
    validation_batches: int = number(8, 1, INT32)  # of each source, of the phase's batch_size
    trackers: tuple[str, ...] = ("tensorboard",)  # copies of the logs: tensorboard, wandb
    wandb: WandbConfig = WandbConfig()


@dataclass(frozen=True)
class StabilityConfig:
    """What happens at a loss that is not finite, or far above those of the last steps; and checks of the hardware."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"  # of a loss or a gradient norm that is NaN or infinite
    on_spike: Literal["warn", "skip", "rewind"] = "warn"
    spike_sigma: float = number(6.0, 0.1, 1e6)  # a spike is so many deviations above the last accepted steps' mean
    window: int = number(128, 4, 2**20)  # accepted steps that both are taken of; no spike is seen before half as many
    rewind_batches: int = number(1, 1, INT32)  # left out at a rewind: the spike's batch, and others before it
    replay_every: int = number(0, 0, INT32)  # steps between two whose gradients are computed twice; 0: never


@dataclass(frozen=True)
class EvaluationConfig:
    """What `pe_lab.evaluate` measures of this run by default, and training between its steps."""

    factors: tuple[int, ...] = number((1, 2, 4, 8), 1, 2**20)  # lengths, in multiples of the training length
    suites: tuple[str, ...] = ()  # as --suite: names, name:task, FILE.py:SUITE; (): those that are possible
    variants: tuple[str, ...] = ()  # as --variants; (): all that make sense; inside training: as trained
    options: Mapping[str, Any] = field(default_factory=dict)  # of suites, as their flags: {"tokens": 65536}
    seed: int = number(0, 0, SEED)
    every_steps: int = number(0, 0, INT32)  # steps between two measurements inside training; 0: none


@dataclass(frozen=True)
class Notes:
    """The source, cost and expected result of a recipe; copied into the run and its report."""

    paper: str = ""
    command: str = ""
    cost: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Config:
    """An experiment."""

    name: str = "run"
    seed: int = number(0, 0, SEED)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)  # of XLA, over those of parallel/compiler.py
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    stability: StabilityConfig = StabilityConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    notes: Notes = Notes()


# ---------------------------------------------------------------------------------------------------------------------
# The codec: frozen dataclasses from nested dicts, checking keys, types and bounds

# Keys of other training stacks, for the hint about an unknown key.
_ALIASES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "bs": "batch_size",
    "seq_len": "sequence_length",
    "max_steps": "steps",
    "num_steps": "steps",
    "gradient_accumulation_steps": "accumulate",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "n_layers": "layers",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
}


def from_dict(kind: type, value: Any, where: str = "config") -> Any:
    """A frozen dataclass (`Config`, `ModelConfig`, `Layer`, ...) from nested dicts, checking every key and every type.

    Raises:
      ConfigError: a key, a type or a bound that is wrong, or a field without default that is missing; names it.
    """
    if isinstance(value, kind):
        return value
    hints = field_types(kind)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}; it must be a set of keys: {', '.join(hints)}.{_literal(value)}")
    for key in value:
        _check_known(key, hints, where)
    without = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in without if name not in value]:
        raise ConfigError(f"{where} needs {', '.join(missing)}.")
    values = {key: _convert(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    made = call(kind, "", **values)
    check_bounds(made, where)
    return made


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(f"The types of the fields of {kind.__qualname__} cannot be read: {error}.") from None
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _check_known(key: Any, hints: Mapping[str, Any], where: str) -> None:
    if key not in hints:
        known = _ALIASES[key] if _ALIASES.get(key) in hints else str(key)
        raise ConfigError(f"{where} has no key '{key}'. {did_you_mean(known, list(hints))}")


def check_key(kind: type, key: str, where: str = "config") -> None:
    """`ConfigError` for a dotted key that no config of this kind has; what is inside a free set of keys passes."""
    hint: Any = kind
    for name in key.split("."):
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = next((one for one in typing.get_args(hint) if dataclasses.is_dataclass(one)), None)
        if typing.get_origin(hint) is tuple:
            where, hint = f"{where}[{name}]", typing.get_args(hint)[0]
        elif dataclasses.is_dataclass(hint):
            hints = field_types(hint)
            _check_known(name, hints, where)
            where, hint = f"{where}.{name}", hints[name]
        else:
            return


def check_bounds(config: Any, where: str) -> None:
    """`ConfigError` for a number in a config, or in a part of one, that is outside the bounds of its field."""
    hints = field_types(type(config))
    for declared in dataclasses.fields(config):
        given = getattr(config, declared.name)
        least, most = declared.metadata.get("bounds", (None, None))
        for i, value in enumerate(given) if isinstance(given, tuple) else ((None, given),):
            name = f"{where}.{declared.name}" + (f"[{i}]" if i is not None else "")
            if dataclasses.is_dataclass(type(value)) and hints[declared.name] is not Any:
                check_bounds(value, name)
            # A word such as "auto" has no bounds.
            elif least is not None and not isinstance(value, str | Mapping) and not least <= value <= most:
                limit = f"at most {most:,}" if value > most else f"at least {least}"
                raise ConfigError(f"{name} is {value}; it must be {'positive' if value < least == 1 else limit}.")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return with_descriptions(value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(hint), value, where)
    if typing.get_origin(hint) is Literal:
        if value not in (allowed := typing.get_args(hint)):
            raise ConfigError(f"{where} is {value!r}. {did_you_mean(str(value), allowed)}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}; it must be a list.{_literal(value)}")
        items = typing.get_args(hint)
        items = (items[0],) * len(value) if items[-1] is Ellipsis else items
        if len(items) != len(value):
            raise ConfigError(f"{where} is {value!r}; it must be a list of {len(items)}.")
        return tuple(_convert(item, v, f"{where}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True)))
    if typing.get_origin(hint) is not None:  # Mapping[str, Any]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; it must be a set of keys and values.{_literal(value)}")
        return dict(value)
    if _kinds_of((hint,)):
        return _described((hint,), value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # An int may be too large for a float; no bounds contain it.
        return float(max(min(value, 10**300), -(10**300)))
    # 1e3 is how people write a thousand steps.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is bool and value in (0, 1):
        return bool(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}.")
    return value


def _literal(value: Any) -> str:
    """How to write a list or a dict on a command line, where text was given."""
    return " Write it as a Python literal: names in quotes, {'key': 1} for a dict." if isinstance(value, str) else ""


def with_descriptions(value: Any, where: str) -> Any:
    """Plain data, whose sets of keys become descriptions."""
    if isinstance(value, list | tuple):
        return [with_descriptions(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping) or "" not in _KINDS:
        return value
    kind, fields = _kind_of((object,), value, where) if "kind" in value else (_KINDS[""], value)
    try:
        return from_dict(kind, fields, kind.__name__)
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None


def _one_of(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """A value of one of several types: None, words, numbers, sets of keys, or descriptions."""
    if value is None and types.NoneType in hints:
        return None
    words = [word for hint in hints if typing.get_origin(hint) is Literal for word in typing.get_args(hint)]
    others = tuple(hint for hint in hints if hint is not types.NoneType and typing.get_origin(hint) is not Literal)
    if isinstance(value, str) and words:
        if value not in words:
            raise ConfigError(f"{where} is {value!r}; it must be {words[0]!r} or of type {others[0].__name__}.")
        return value
    if _kinds_of(others):
        return _described(others, value, where)
    of_keys = [one for one in others if dataclasses.is_dataclass(one) or typing.get_origin(one) is not None]
    return _convert(of_keys[0] if of_keys and isinstance(value, Mapping) else others[0], value, where)


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions: dataclasses of other packages, which JSON holds as {"kind": name, fields}


_KINDS: dict[str, type] = {}
_OWN = "One of your own is registered by the file that defines it: --encodings=FILE.py."


def register_kind(name: str, kind: type) -> None:
    """Gives a dataclass its name in JSON; "" is that of a set of keys without a kind.

    Raises:
      ConfigError: another class has the name.
    """
    known = _KINDS.get(name, kind)
    if known.__qualname__ != kind.__qualname__:
        raise ConfigError(
            f"'{name}' is the name of {known.__qualname__} already; give {kind.__qualname__} another one."
        )
    _KINDS[name] = kind


def kind_name(kind: type) -> str:
    """The name of a description's class in JSON; "" for other dataclasses."""
    return next((name for name, known in _KINDS.items() if known is kind), "")


def _kinds_of(bases: tuple[Any, ...]) -> dict[str, type]:
    """The descriptions that fields of these types may hold, by name."""
    bases = tuple(base for base in bases if isinstance(base, type))
    return {name: kind for name, kind in _KINDS.items() if name and issubclass(kind, bases)}


def _described(bases: tuple[Any, ...], value: Any, where: str) -> Any:
    """The description that a field of these types holds."""
    if isinstance(value, bases) and dataclasses.is_dataclass(value):
        return value
    kind, fields = _kind_of(bases, value, where)
    return from_dict(kind, fields, kind.__name__)


def _kind_of(bases: tuple[Any, ...], value: Any, where: str) -> tuple[type, dict[str, Any]]:
    """The class of {"kind": name, fields}, which a field of these types holds, and the fields."""
    kinds = _kinds_of(bases)
    if not isinstance(value, Mapping):
        advice = did_you_mean(str(value), list(kinds))
        raise ConfigError(f"{where} is {value!r}; write it as {{'kind': NAME, ...}}. {advice}")
    fields = dict(value)
    written = str(fields.pop("kind", ""))
    if written not in kinds:
        raise ConfigError(f"{where}: there is no kind '{written}'. {did_you_mean(written, list(kinds))} {_OWN}")
    return kinds[written], fields


# ---------------------------------------------------------------------------------------------------------------------
# Back to plain data


def to_json(value: Any) -> Any:
    """A config, a part of one, or a description as plain JSON; registered kinds become {"kind": name, fields}.

    Credentials in addresses are `redacted`: what is written has none, and no fingerprint depends on them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        types = field_types(type(value))
        fields = {
            f.name: to_json(_as_declared(getattr(value, f.name), types[f.name]))
            for f in dataclasses.fields(value)
            if not (f.metadata.get("omit_default") and getattr(value, f.name) == f.default)
        }
        name = kind_name(type(value))
        return {"kind": name, **fields} if name else fields
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return redacted(value)
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _as_declared(value: Any, declared: Any) -> Any:
    """A whole number as a float where a float is declared, as `from_dict` reads it: both have one JSON."""
    is_float = declared is float or (float in typing.get_args(declared) and int not in typing.get_args(declared))
    return float(value) if is_float and type(value) is int else value


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(`a.b.0.c`, value) of every number, text and null in nested mappings and lists."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in value.items():
        yield from flat(item, f"{path}.{key}" if path else str(key))

"""What a family of external checkpoints is: its tensors, its keys of `config.json`, and how these describe layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from pe_lab.checkpoints.families.tensors import Tensor, TensorTable
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.config import ModelConfig, check_bounds
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.model import complete
from pe_lab.positional import Layer

Config = Mapping[str, Any]

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "relu2",
}
EXTERNAL_ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"
}  # fmt: skip
# What all families have unless they say otherwise: the values of fields that change what a model computes.
PLAIN: Mapping[str, Any] = {
    "feed_forward": "",
    "block": "pre_norm",
    "norm": "rms",
    "qk_norm": "none",
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "gated_mlp": True,
    "attention_scale": 0.0,
    "attention_soft_cap": 0.0,
    "qkv_clip": 0.0,
    "value_norm": False,
    "values_are_keys": False,
    "layer_scale": False,
    "per_layer_input": 0,
    "layer_shapes": (),
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "embedding_norm": False,
    "unembedding_bias": False,
    "logit_multiplier": 1.0,
    "logit_soft_cap": 0.0,
}
# Keys that no family supports, with the values that have no effect; a family's own `keys` and `constants` precede.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
}


@dataclass(frozen=True)
class Key:
    """The key of `config.json` that a field of `ModelConfig` has.

    Attributes:
      name: with dots for a key within another (`attn_config.clip_qkv`).
      default: of a file without the key: a value, or a function of the config. None: the key must be given.
      null: the value that null means; None: the default.
      read: the field's value from the key's.
      write: the key's value from the field's and the model.
    """

    name: str
    default: Any = None
    null: Any = None
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, model: value


def same_as(key: str) -> Callable[[Config], Any]:
    """A default: the value of another key."""
    return lambda config: lookup(config, key)


def times(key: str, factor: int) -> Callable[[Config], Any]:
    """A default: a multiple of the value of another key."""
    return lambda config: factor * whole(config, key)


def or_null(name: str, default: float = 0.0) -> Key:
    """A key that is null where the field is 0."""
    return Key(name, default, 0.0, write=lambda value, model: value or None)


class Positions(NamedTuple):
    """What a `config.json` says of positions.

    Attributes:
      layers: the encodings and windows.
      training_length: tokens, before any scaling.
      rotated: channels of a head that rotate, where it rotates in part.
    """

    layers: tuple[Layer, ...]
    training_length: int
    rotated: int | None = None


class PositionFormat(ABC):
    """How the `config.json` of a family describes the encodings and windows of its layers."""

    @abstractmethod
    def read(self, config: Config, model: ModelConfig) -> Positions:
        """The layers.

        Raises:
          UnsupportedError, CheckpointError, ConfigError: what pe_lab does not support, or what contradicts itself.
        """

    @abstractmethod
    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        """The keys with which transformers 4 and 5 compute these layers; logit scales are folded into weights.

        Raises:
          UnsupportedError: the family cannot express them.
          ConfigError: a `max_length` for an encoding whose scaling declares a length.
        """


@dataclass(frozen=True)
class Family:
    """A family of external checkpoints.

    Attributes:
      model_type, architecture: its names in `config.json`.
      positions: how that describes the layers.
      fixed: fields of `ModelConfig` with one value in all models of the family, where it is not that of `PLAIN`.
      keys: those that differ between its models, by field.
      reads, writes: fields that follow from several keys, as functions of the config; and those keys of a model, with
        such that transformers does not read and other runtimes ask for.
      tensors: the table of its tensors; a function of the model, where models of the family differ in names.
      activation: the key of its activation; "": it has one, in `fixed`.
      activations: names of activations that mean another one in this family: Gemma's files say `gelu` for gelu_tanh.
      constants: other keys that change what is computed, with the values that pe_lab computes, the first one by
        default; they are written where they are not what transformers has without the key.
      holds: reasons why an export cannot have a model's shape, beside other values of `fixed`.
      inferred: a config with what the names of tensors say and its keys may leave out.
      pairs: neighbours in a rotation: channels half a head apart, or adjacent ones (`interleaved`).
      stock: transformers reads it without remote code, as all but the layout of DroPE's authors.
    """

    model_type: str
    architecture: str
    positions: PositionFormat
    tensors: TensorTable | Callable[[ModelConfig], TensorTable]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    reads: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    writes: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    holds: Callable[[ModelConfig], list[str]] = lambda model: []
    inferred: Callable[[Config, Sequence[str]], Config] = lambda config, names: config
    pairs: Literal["half", "interleaved"] = "half"
    stock: bool = True

    def table(self, model: ModelConfig) -> TensorTable:
        """The tensors of models of this shape."""
        return self.tensors if isinstance(self.tensors, TensorTable) else self.tensors(model)

    def written_tensors(self, model: ModelConfig, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
        """The tensors of an export, in order; `UnsupportedError` for leaves that the family has no name for."""
        table = self.table(model)
        try:
            tensors = tuple(table.tensors(model, layers))
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.architecture} {error}.") from None
        return tensors + tuple(table.neutral_tensors(model, tensors))

    @property
    def one_value(self) -> dict[str, Any]:
        """The fields that have one value in all models of the family."""
        plain = {name: value for name, value in PLAIN.items() if name not in self.keys and name not in self.reads}
        return {**plain, **self.fixed}

    def read_model(self, config: Config) -> ModelConfig:
        """The shape of a model, completed.

        Raises:
          UnsupportedError: a value that pe_lab does not support.
          CheckpointError: a key that is missing, or contradicts another.
          ConfigError: a shape that no model has.
        """
        own = {key.name for key in self.keys.values()}
        refused = {key: values for key, values in REFUSED.items() if key not in own}
        for key, harmless in (refused | dict(self.constants)).items():
            found = lookup(config, key)
            if found is not None and found not in harmless:
                raise UnsupportedError(f"{key} is {found!r}, which pe_lab does not support.")
        found: dict[str, Any] = {"dtype": "float32", **self.one_value}
        kinds = {one.name: type(one.default) for one in fields(ModelConfig)}
        for name, key in self.keys.items():
            found[name] = self._value(config, key, kinds[name])
        # First: the functions below make lists with an entry for each layer, as many as a damaged file says.
        check_bounds(ModelConfig(**found), "model")
        found |= {name: read(config) for name, read in self.reads.items()}
        found["activation"] = self._read_activation(config)
        return complete(ModelConfig(**found))

    def _value(self, config: Config, key: Key, kind: type) -> Any:
        value = lookup(config, key.name, missing := object())
        if value is None and (key.null is not None or kind is float):
            if key.null is None:
                raise CheckpointError(f"{key.name} is null; it must be a number.")
            return key.null
        if value is None or value is missing:
            value = key.default(config) if callable(key.default) else key.default
        value = key.read(value)
        if kind is bool:
            return bool(value)
        if kind is int:
            return whole({key.name: value}, key.name)
        if kind is str:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise CheckpointError(f"{key.name} is {value!r}; it must be a number, and not negative.")
        return float(value)

    def _read_activation(self, config: Config) -> str:
        fixed = self.fixed.get("activation")
        if not self.activation:
            return fixed
        name = config.get(self.activation) or EXTERNAL_ACTIVATIONS[fixed or "gelu"]
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedError(
                f"{self.activation} is '{name}', a function that pe_lab does not compute. It computes "
                f"{', '.join(sorted(ACTIVATIONS))}; with one of these it would be another model."
            )
        activation = self.activations.get(name, ACTIVATIONS[name])
        if fixed not in (None, activation):
            raise CheckpointError(f"{self.activation} is '{name}', and {self.architecture} has {fixed}.")
        return activation

    def write_model(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of the shape; `UnsupportedError` for a model that the family cannot hold."""
        wrong = [
            f"{name} is {getattr(model, name)!r}, not {value!r}"
            for name, value in self.one_value.items()
            if getattr(model, name) != value
        ] + self.holds(model)
        if wrong:
            raise UnsupportedError(f"{self.model_type} cannot hold this model: {'; '.join(wrong)}.")
        config: dict[str, Any] = {}
        for name, key in self.keys.items():
            _put(config, key.name, key.write(getattr(model, name), model))
        config |= self.writes(model)
        for name, values in self.constants.items():
            _put(config, name, values[0])
        if self.activation:
            config[self.activation] = EXTERNAL_ACTIVATIONS[model.activation]
        return config


def lookup(config: Config, name: str, missing: Any = None) -> Any:
    """The value of a key with dots."""
    found: Any = config
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return missing
        found = found[part]
    return found


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for part in above:
        config = config.setdefault(part, {})
    config[last] = value


def whole(config: Config, key: str, default: int | None = None) -> int:
    """A whole number of a config; `CheckpointError` if it is missing, or something else."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        found = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(f"{key} {found}; it must be a whole number.")
    return value


SHAPE = {
    "vocab_size": Key("vocab_size"),
    "layers": Key("num_hidden_layers"),
    "d_model": Key("hidden_size"),
    "d_ff": Key("intermediate_size"),
    "heads": Key("num_attention_heads"),
    "tie_embeddings": Key("tie_word_embeddings", False),
}
# The factor on products of queries and keys.
ATTENTION_MULTIPLIER = Key("attention_multiplier", 1.0, write=lambda value, model: value or model.head_dim**-0.5)
LLAMA_KEYS = SHAPE | {
    "kv_heads": Key("num_key_value_heads", same_as("num_attention_heads")),
    "head_dim": Key("head_dim", 0),  # 0: d_model / heads
    "norm_epsilon": Key("rms_norm_eps", 1e-6),
}
ATTENTION_BIAS = {"attention_bias": Key("attention_bias", False), "output_bias": Key("attention_bias", False)}
MLP_BIAS = {"mlp_bias": Key("mlp_bias", False)}
TIED = {"tie_embeddings": Key("tie_word_embeddings", True)}


def one_bias(model: ModelConfig) -> list[str]:
    """A reason why a family with one key for all biases of attention cannot hold a model."""
    if model.attention_bias == model.output_bias:
        return []
    return ["its bias is on queries, keys, values and output together, or on none"]


def heads_fill_the_model(model: ModelConfig) -> list[str]:
    """A reason why a family without a key for the channels of a head cannot hold a model."""
    if model.head_dim * model.heads == model.d_model:
        return []
    return [f"head_dim is {model.head_dim}, not d_model / heads"]


def all_heads_have_keys(model: ModelConfig) -> list[str]:
    """A reason why a family without grouped queries cannot hold a model."""
    return [] if model.kv_heads == model.heads else [f"kv_heads is {model.kv_heads}, not heads {model.heads}"]


def four_times(model: ModelConfig) -> list[str]:
    """A reason why a family whose MLP is four times as wide as the model cannot hold one."""
    return [] if model.d_ff == 4 * model.d_model else [f"d_ff is {model.d_ff}, not 4 d_model"]

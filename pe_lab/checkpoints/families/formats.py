"""How `config.json` describes encodings and windows: the ways that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pe_lab.checkpoints.families.family import Config, PositionFormat, Positions, lookup, whole
from pe_lab.checkpoints.rope_parameters import (
    RopeKeys,
    Rotary,
    WriteOptions,
    by_layer_type,
    read_rope,
    read_rotation,
    write_rope,
)
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, excerpt
from pe_lab.model.shape import layer_heads
from pe_lab.positional import Alibi, Encoding, Layer, LearnedPositions, NoPE, PartialRope, Rope

FULL, SLIDING = "full_attention", "sliding_attention"
Sizes = list[int | None]  # the window of each layer


@dataclass(frozen=True)
class WindowFormat:
    """The windows of a family's layers; this one has none."""

    def read(self, config: Config, count: int) -> Sizes:
        """The window of each of `count` layers, in tokens; None sees all."""
        return [None] * count

    def write(self, windows: Sizes) -> dict[str, Any]:
        """The keys; `UnsupportedError` for windows that the family does not have."""
        if any(windows):
            raise UnsupportedError("it has no sliding windows.")
        return {}


@dataclass(frozen=True)
class OneWindow(WindowFormat):
    """All layers have one window, or none has; `default` is of a file without the key."""

    default: int | None = None

    def read(self, config: Config, count: int) -> Sizes:
        size = config.get("sliding_window") if "sliding_window" in config else self.default
        return [window_size(size)] * count

    def write(self, windows: Sizes) -> dict[str, Any]:
        if len(set(windows)) > 1:
            raise UnsupportedError(f"all of its layers have one window, and these have {_listed(windows)}.")
        return {"sliding_window": windows[0]}


@dataclass(frozen=True)
class WindowsByType(WindowFormat):
    """`layer_types` names the layers that have the window; `pattern(config, n)`: whether layer n has it by default."""

    default: int | None = 4096
    pattern: Callable[[Config, int], bool] = lambda config, n: False

    def read(self, config: Config, count: int) -> Sizes:
        sliding = layer_types(config, count)
        if sliding is None:
            sliding = [self.pattern(config, n) for n in range(count)]
        size = config.get("sliding_window") if "sliding_window" in config else self.default
        if size is None and any(sliding):
            raise CheckpointError("sliding_window is null, and layer_types has layers with a window.")
        return [window_size(size) if one else None for one in sliding]

    def write(self, windows: Sizes) -> dict[str, Any]:
        size = one_size(windows)
        # Without a window, a family may take all layers for windowed ones, or none for rotating: it gets one unused.
        return {"sliding_window": size or self.default, "layer_types": type_names(windows)}


def window_size(size: Any) -> int | None:
    """A window in tokens."""
    return None if size is None else whole({"sliding_window": size}, "sliding_window")


def layer_types(config: Config, count: int) -> list[bool] | None:
    """Which layers `layer_types` gives a window; None without that key; `CheckpointError` for other content."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        shown = excerpt(repr(kinds), 60)
        raise CheckpointError(f"layer_types is {shown}; it must be a list with one word for each layer.")
    unknown = [kind for kind in kinds if kind not in (SLIDING, FULL)]
    if unknown or len(kinds) != count:
        found = f" and {unknown[:3]}" if unknown else ""
        raise CheckpointError(f"layer_types has {len(kinds)} entries for {count} layers{found}.")
    return [kind == SLIDING for kind in kinds]


def type_names(windows: Sizes) -> list[str]:
    """`layer_types` of these windows."""
    return [FULL if size is None else SLIDING for size in windows]


def one_size(windows: Sizes) -> int | None:
    """The one size of the layers that have a window; `UnsupportedError` for several."""
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        raise UnsupportedError(f"it has one size of windows, and these layers have {_listed(windows)}.")
    return sizes.pop() if sizes else None


def _listed(windows: Sizes) -> str:
    return ", ".join(dict.fromkeys("all" if size is None else str(size) for size in windows))


def check_layers(layers: Sequence[Layer], extras: tuple[type[Encoding], ...] = ()) -> None:
    """`UnsupportedError` for layers with anything but a rotation or none, a window, and these kinds of extras."""
    for n, layer in enumerate(layers):
        if layer.heads:
            raise UnsupportedError(
                f"layer {n} has heads that differ ({len(layer.heads)} edits), which this architecture cannot express. "
                "Nearest: the same layer with one encoding for all heads."
            )
        if others := [extra for extra in layer.extras if not isinstance(extra, extras)]:
            names = ", ".join(type(extra).__name__ for extra in others)
            raise UnsupportedError(
                f"layer {n} has {names} beside its encoding, which this architecture does not compute. "
                "Nearest: the same layer without it."
            )
        if layer.logit_scale != 1.0:
            raise ValueError(f"layer {n} has a logit scale; fold it into the weights first")
        if not isinstance(layer.encoding, Rope | PartialRope | NoPE):
            raise UnsupportedError(
                f"layer {n} has {type(layer.encoding).__name__}, which this architecture does not have. "
                "Nearest: rope, or no encoding (drop)."
            )


def single_rotation(layers: Sequence[Layer], what: str = "these layers") -> Rotary | None:
    """The one rotation of layers that rotate; None: none does; `UnsupportedError`: there are several."""
    rotary = {layer.encoding for layer in layers if not isinstance(layer.encoding, NoPE)}
    if len(rotary) > 1:
        names = " and ".join(sorted(str(encoding) for encoding in rotary))
        raise UnsupportedError(f"it has one rotation, and {what} have {names}.")
    return rotary.pop() if rotary else None  # type: ignore[return-value]


def rotated_channels(layers: Sequence[Layer], head_dim: int) -> int | None:
    """The channels of heads that rotate in part; None: all."""
    partial = next((layer.encoding for layer in layers if isinstance(layer.encoding, PartialRope)), None)
    return None if partial is None else partial.rotated_channels(head_dim)


@dataclass(frozen=True)
class OneRotation(PositionFormat):
    """All layers have the same rotation, or none has one."""

    rope: RopeKeys = field(default_factory=RopeKeys)
    windows: WindowFormat = field(default_factory=WindowFormat)

    def read(self, config: Config, model: ModelConfig) -> Positions:
        encoding, length = read_rope(config, model.head_dim, self.rope)
        windows = self.windows.read(config, model.layers)
        rotates = self.read_rotates(config, windows)
        pairs = zip(rotates, windows, strict=True)
        layers = tuple(Layer(encoding if one else NoPE(), window) for one, window in pairs)
        return Positions(layers, length, rotated_channels(layers, model.head_dim))

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers)
        encoding, windows = single_rotation(layers), [layer.window for layer in layers]
        rotates = [not isinstance(layer.encoding, NoPE) for layer in layers]
        keys = self.windows.write(windows) | self.write_rotates(rotates, windows)
        encoding = encoding or self.without_rotation
        return keys | write_rope(encoding, model.head_dim, self.rope, options)

    # Families in which single layers are without rotation differ in these.

    def read_rotates(self, config: Config, windows: Sizes) -> list[bool]:
        """Which layers rotate."""
        return [True] * len(windows)

    def write_rotates(self, rotates: Sequence[bool], windows: Sizes) -> dict[str, Any]:
        """The keys of the layers that rotate; `UnsupportedError` for other layers than the family's."""
        if any(rotates) and not all(rotates):
            bare = len(rotates) - sum(rotates)
            raise UnsupportedError(
                f"it rotates on all layers or on none, and here {bare} of {len(rotates)} are without."
            )
        return {}

    @property
    def without_rotation(self) -> Rotary:
        """What is written as the rotation of a model in which no layer rotates."""
        return NoPE()


@dataclass(frozen=True)
class RotatedWindows(OneRotation):
    """Layers with a window rotate, and the others do not (Cohere 2).

    `unless_windows`: without windows in the model, all layers rotate (EXAONE 4).
    """

    unless_windows: bool = False

    def read_rotates(self, config: Config, windows: Sizes) -> list[bool]:
        if self.unless_windows and config.get("sliding_window", 0) is None:
            return [True] * len(windows)
        return [size is not None for size in windows]

    def write_rotates(self, rotates: Sequence[bool], windows: Sizes) -> dict[str, Any]:
        if self.unless_windows and all(rotates) and not any(windows):
            return {"sliding_window": None, "sliding_window_pattern": None}
        wrong = [n for n, one in enumerate(rotates) if one != (windows[n] is not None)]
        if wrong and any(rotates):
            n = wrong[0]
            has = "a rotation and no window" if rotates[n] else "a window and no rotation"
            raise UnsupportedError(f"its layers with a window rotate, and its others do not; layer {n} has {has}.")
        return {}


@dataclass(frozen=True)
class RotationByType(PositionFormat):
    """Layers with a window have one rotation, and the others another one (Gemma 3, OLMo 3).

    Attributes:
      full, sliding: of the two types of layers.
      windows: which layers have a window.
      local_key: of older files, the base of layers with a window; "": they have that of the others.
    """

    full: RopeKeys
    sliding: RopeKeys
    windows: WindowsByType
    local_key: str = ""

    def read(self, config: Config, model: ModelConfig) -> Positions:
        windows = self.windows.read(config, model.layers)
        nested = by_layer_type(config)
        if nested is None:
            nested = self._of_older_files(config)
        else:
            self._check_older_keys(config, nested)
        by_type, lengths = {}, {}
        for name, keys in ((FULL, self.full), (SLIDING, self.sliding)):
            channels = _channels(model, windows, name)
            by_type[name], lengths[name] = read_rotation(nested.get(name) or {}, config, channels, keys)
        layers = tuple(Layer(by_type[FULL if size is None else SLIDING], size) for size in windows)
        return Positions(layers, min(lengths.values()))

    def _check_older_keys(self, config: Config, nested: Mapping[str, Any]) -> None:
        """`CheckpointError` if the flat keys of transformers 4 contradict the nested ones of 5."""
        full, sliding = nested.get(FULL) or {}, nested.get(SLIDING) or {}
        pairs = [("rope_theta", config.get("rope_theta"), FULL, full.get("rope_theta", self.full.theta))]
        if self.local_key:
            base = sliding.get("rope_theta", self.sliding.theta)
            pairs.append((self.local_key, config.get(self.local_key), SLIDING, base))
        scaling = config.get("rope_scaling")
        if scaling and scaling is not nested and not by_layer_type({"rope_scaling": scaling}):
            kind = scaling.get("rope_type") or scaling.get("type")
            pairs.append(("rope_scaling.rope_type", kind, FULL, full.get("rope_type", "default")))
            pairs += [
                (f"rope_scaling.{k}", scaling[k], FULL, full[k]) for k in scaling if k in full and k != "rope_type"
            ]
        for key, flat, layer_type, value in pairs:
            if flat is not None and flat != value:
                raise CheckpointError(
                    f"{key} is {flat!r}, and rope_parameters.{layer_type} has {value!r}: versions of transformers read "
                    "different ones. Remove the wrong one."
                )

    def _of_older_files(self, config: Config) -> dict[str, dict[str, Any]]:
        """The rope parameters of both types from the flat keys of transformers 4."""
        if config.get("rope_parameters"):
            raise CheckpointError(
                f"the rope parameters are {excerpt(repr(config['rope_parameters']), 60)}; this architecture has them "
                f"by type of layers, under {FULL} and {SLIDING}."
            )
        base = config.get("rope_theta")
        full = dict(config.get("rope_scaling") or {}) | ({} if base is None else {"rope_theta": base})
        if self.local_key:
            local = config.get(self.local_key)
            return {FULL: full, SLIDING: {} if local is None else {"rope_theta": local}}
        if base not in (None, self.sliding.theta):
            raise CheckpointError(
                f"rope_theta is {base!r}: transformers 4 gives it to all layers, 5 to those without a window alone. "
                f"Write rope_parameters by type of layers, under {FULL} and {SLIDING}."
            )
        return {FULL: full, SLIDING: {}}

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers)
        windows = [layer.window for layer in layers]
        keys, nested = self.windows.write(windows), {}
        written: dict[str, dict[str, Any]] = {}
        for name, rope in ((FULL, self.full), (SLIDING, self.sliding)):
            these = [layer for layer in layers if (layer.window is None) == (name == FULL)]
            encoding = single_rotation(these, "those " + ("without" if name == FULL else "with") + " a window")
            bare = [layer for layer in these if isinstance(layer.encoding, NoPE)]
            if encoding is not None and bare:
                raise UnsupportedError("layers with a window rotate all or not at all, and so do those without.")
            default = Rope(rope.theta) if not these else NoPE()
            channels = _channels(model, windows, name)
            written[name] = write_rope(encoding or default, channels, rope, options)
            nested[name] = written[name]["rope_parameters"]
        local = nested[SLIDING]
        if self.local_key and local["rope_type"] != "default":
            raise UnsupportedError(
                "its layers with a window have a base alone (transformers 4), and here they have "
                f"'{local['rope_type']}'."
            )
        # The flat keys are those of transformers 4.
        keys |= written[FULL] | {"rope_parameters": nested}
        return keys | ({self.local_key: local["rope_theta"]} if self.local_key else {})


def _channels(model: ModelConfig, windows: Sizes, name: str) -> int:
    """The channels of a head in the layers of a type; `UnsupportedError` where they differ."""
    own = layer_heads(model) or ()
    found = {one.head_dim for one, size in zip(own, windows, strict=bool(own)) if (size is None) == (name == FULL)}
    if len(found) > 1:
        raise UnsupportedError(
            f"its layers of type {name} have heads of one size, and here of {sorted(found)} channels."
        )
    return found.pop() if found else model.head_dim


@dataclass(frozen=True)
class AlibiOnAll(PositionFormat):
    """ALiBi on all layers. `length_key`: of the training length, in tokens; `length`: of files without it."""

    length_key: str
    length: int

    def read(self, config: Config, model: ModelConfig) -> Positions:
        return Positions((Layer(Alibi()),) * model.layers, whole(config, self.length_key, self.length))

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        if other := [layer for layer in layers if layer != Layer(Alibi())]:
            raise UnsupportedError(f"it has ALiBi on all layers and nothing else, and here is {other[0].encoding}.")
        return {self.length_key: options.max_length or options.training_length}


@dataclass(frozen=True)
class LearnedTable(PositionFormat):
    """Learned positions, added to the embeddings.

    Attributes:
      length_key, length: of the number of positions; and that of files without the key.
      offset: rows of the table before that of position 0.
      copies: keys with the same number that other runtimes ask for.
    """

    length_key: str
    length: int
    offset: int = 0
    copies: tuple[str, ...] = ()

    def read(self, config: Config, model: ModelConfig) -> Positions:
        size = whole(config, self.length_key, self.length)
        return Positions((Layer(LearnedPositions(size, self.offset)),) * model.layers, size)

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        size = next((one.encoding.size for one in layers if isinstance(one.encoding, LearnedPositions)), 0)
        wanted = Layer(LearnedPositions(size, self.offset)) if size else None
        # The positions are added once: the other layers may have them, or no encoding.
        if wanted is None or any(layer not in (wanted, Layer(NoPE())) for layer in layers):
            other = next((layer.encoding for layer in layers if layer != wanted), None)
            raise UnsupportedError(
                f"it has learned positions with {self.offset} rows before them, and here is {other}."
            )
        if options.max_length is not None and options.max_length > size:
            raise ConfigError(f"--max-length is {options.max_length:,}, and the model has {size:,} positions.")
        return dict.fromkeys((self.length_key, *self.copies), size)


def every(interval: int, key: str = "") -> Callable[[Config, int], bool]:
    """A pattern: every `interval`-th layer has no window; `key` of the config may have another interval."""

    def sliding(config: Config, n: int) -> bool:
        given = lookup(config, key) if key else None
        step = interval if given is None else whole(config, key)
        return bool(step) and (n + 1) % step != 0

    return sliding

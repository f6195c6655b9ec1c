"""The positional encoding of a model as arrays, which may change without compiling the model again."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt32

from pe_lab.errors import ConfigError, call
from pe_lab.positional.codec import label, ranges, ranges_by
from pe_lab.positional.encodings import frequencies
from pe_lab.positional.hooks import HOOKS, Encoding, LayerHooks, acts_in_layers, has
from pe_lab.positional.layers import Bands, Layer, Uniform
from pe_lab.positional.registry import registered_name
from pe_lab.positional.rotation import fixed_point_frequencies
from pe_lab.terminal import table

LARGEST = 2**23  # layers times heads times channels of a schedule; the largest models have 2^21

ArrayLike = jax.Array | np.ndarray


@dataclass(frozen=True)
class LayerStructure:
    """The static part of a layer's encoding, which is compiled; the rest is data.

    Attributes:
      rotates: whether queries and keys are rotated.
      slopes: whether logits have ALiBi's penalty.
      window: see `Layer`.
      heads: `shared`: all heads have the same rotation; `grouped`: groups of query heads have different ones; `split`:
        heads of one group have different ones, so keys are rotated once per query head.
      hooks: the encodings that are more than frequencies and slopes, and more than an addition to the embeddings.
      pairs, shape, keys_of: of a layer with heads of its own, see `LayerHeads`; None: all R pairs, its own keys alone.
    """

    rotates: bool = False
    slopes: bool = False
    window: int | None = None
    heads: Literal["shared", "grouped", "split"] = "shared"
    hooks: tuple[LayerHooks, ...] = ()
    pairs: int | None = None
    shape: int = 0
    keys_of: int | None = None


class LayerHeads(NamedTuple):
    """The heads of one layer, in a model whose layers differ in them.

    Attributes:
      num_kv_heads, head_dim: G and K of the layer.
      shape: the number of its shape among those of the model's layers.
      keys_of: the layer whose keys and values it attends to: an earlier one, or itself where later ones attend to its
        own. None: its own, and no other layer does.
    """

    num_kv_heads: int
    head_dim: int
    shape: int = 0
    keys_of: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """The positional encoding of a whole model, as arrays. A pytree: `structure` is static, the rest is data.

    Attributes:
      inv_freq: [N, H, R] radians per position; 0 = the pair does not rotate.
      gain: [N, H, R] amplitude of the pair after rotation, in layers that rotate.
      fixed_freq: [N, H, R, 2] `inv_freq` in fixed point (see `fixed_point_frequencies`); the rotation uses it.
      alibi_slope: [N, H] logit penalty per token of distance.
      logit_scale: [N] factor on the attention logits (DroPE's beta).
      structure: one `LayerStructure` per layer.
      same_rotation: all layers that rotate have the same rotation, so one table serves them all.
      embeddings: the encodings with an `embed` hook, each with the first layer that has it.
    """

    inv_freq: Float[ArrayLike, "N H R"]
    gain: Float[ArrayLike, "N H R"]
    fixed_freq: UInt32[ArrayLike, "N H R 2"]
    alibi_slope: Float[ArrayLike, "N H"]
    logit_scale: Float[ArrayLike, " N"]
    structure: tuple[LayerStructure, ...] = field(metadata={"static": True})
    same_rotation: bool = field(default=False, metadata={"static": True})
    embeddings: tuple[tuple[int, LayerHooks], ...] = field(default=(), metadata={"static": True})

    @property
    def num_layers(self) -> int:
        return len(self.structure)

    @property
    def hooks(self) -> tuple[tuple[LayerHooks, ...], ...]:
        """The encodings with hooks of every layer, as in `layer_hooks`."""
        of_layers = [one.hooks for one in self.structure]
        for n, hook in self.embeddings:
            of_layers[n] += () if hook in of_layers[n] else (hook,)
        return tuple(of_layers)

    def check_length(self, length: int) -> None:
        """Raises a `ConfigError` for sequences of more tokens than an encoding has positions for."""
        for encoding in dict.fromkeys(hook.encoding for of_layer in self.hooks for hook in of_layer):
            if encoding.max_length is not None and length > encoding.max_length:
                name = registered_name(encoding)
                raise ConfigError(
                    f"{name} has {encoding.max_length:,} positions, and the sequences have {length:,} tokens. Use "
                    "shorter ones, or drop it."
                )

    def _repr_html_(self) -> str:
        """The table of `describe` for notebooks, with the frequencies of each range of layers as a strip of grey."""
        header, rows, first = _described(self, None)
        strips = [_strip(np.asarray(self.inv_freq)[n]) for n in first]
        header_cells = "".join(f"<th>{html.escape(name)}</th>" for name in [*header, "frequencies by pair"])
        lines = [
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}<td>{strip}</td></tr>"
            for cells, strip in zip(rows, strips, strict=True)
        ]
        return f"<table><thead><tr>{header_cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def generalize(self, heads: Literal["shared", "grouped", "split"] = "shared", slopes: bool = False) -> Schedule:
        """The same encoding with a more general structure: every layer rotates, by angle 0 where it did not.

        A layer whose hook encodes queries and keys rotates only if it did: the hook may make heads of more channels
        than a rotation is for.
        Schedules with the same windows and hooks that are generalized with the same arguments share one compilation.
        `heads` and `slopes` are added to the structure that this schedule needs.
        """
        order = ("shared", "grouped", "split")
        structure = tuple(
            dataclasses.replace(
                s,
                rotates=s.rotates or not any(has(one.encoding, "encode") for one in s.hooks),
                slopes=s.slopes or slopes,
                heads=max(s.heads, heads, key=order.index),
            )
            for s in self.structure
        )
        return dataclasses.replace(self, structure=structure, same_rotation=False)


def build_schedule(
    layers: Sequence[Layer],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    length: int | None = None,
    own: Sequence[LayerHeads] | None = None,
) -> Schedule:
    """The schedule of a model, on the host, in float32.

    Args:
      layers: one `Layer` per layer (see `pe_lab.positional.layers`).
      num_heads: H query heads.
      num_kv_heads: G key-value heads; divides H.
      head_dim: K; even.
      length: tokens of the sequence, for schemes that depend on it.
      own: the heads of every layer, where layers differ in them; `num_kv_heads` and `head_dim` have no meaning then.

    Returns:
      A `Schedule` with the least structure that these layers need: a layer without rotation has none compiled. R is
      that of the widest heads; what a layer with fewer pairs has beyond its own is not used.

    Raises:
      ConfigError: no layers or heads, G does not divide H, or an encoding does not fit, or has too few positions.
    """
    shapes = own or [LayerHeads(num_kv_heads, head_dim)] * len(layers)
    head_dim = max((one.head_dim for one in shapes), default=head_dim)
    if not layers or num_heads < 1:
        raise ConfigError(f"A schedule needs layers and heads, and has {len(layers)} layers and {num_heads} heads.")
    if (size := len(layers) * num_heads * head_dim) > LARGEST:
        raise ConfigError(
            f"{len(layers)} layers of {num_heads} heads of {head_dim} channels have {size:,} frequencies; a schedule "
            f"has at most {LARGEST:,}. Check layers, heads and head_dim."
        )
    if len(shapes) != len(layers):
        raise ConfigError(f"The model has {len(shapes)} layers, and {len(layers)} are described.")
    for one in set(shapes):
        if one.num_kv_heads < 1 or num_heads % one.num_kv_heads:
            raise ConfigError(f"{num_heads} query heads do not divide into {one.num_kv_heads} key-value heads.")
    # Most layers of a deep model are equal: compute each distinct one once.
    kinds = [(layer, one.head_dim) for layer, one in zip(layers, shapes, strict=True)]
    known: dict[tuple[Layer, int], tuple[np.ndarray, ...]] = {}
    for n, (layer, channels) in enumerate(kinds):
        if (layer, channels) not in known:
            *pairs, slope = _layer_arrays(layer, num_heads, channels, length, f"layer {n}")
            beyond = (0, 0), (0, (head_dim - channels) // 2)
            inv_freq, gain = (
                np.pad(one, beyond, constant_values=fill) for one, fill in zip(pairs, (0, 1), strict=True)
            )
            known[layer, channels] = (inv_freq, gain, slope)
    parts = zip(*(known[kind] for kind in kinds), strict=True)
    inv_freq, gain, slope = map(np.stack, parts)
    fixed_freq = fixed_point_frequencies(inv_freq)
    hooks = layer_hooks(layers, num_heads)
    embeddings: dict[Encoding, tuple[int, LayerHooks]] = {}
    for n, of_layer in enumerate(hooks):
        for hook in of_layer:
            if has(hook.encoding, "embed"):
                embeddings.setdefault(hook.encoding, (n, hook))
    in_layers = [tuple(hook for hook in of_layer if acts_in_layers(hook.encoding)) for of_layer in hooks]
    structure = [
        _structure(layer, *parts, one, None if one.head_dim == head_dim else one.head_dim // 2)
        for layer, *parts, one in zip(layers, fixed_freq, gain, slope, in_layers, shapes, strict=True)
    ]
    rotating = [n for n, s in enumerate(structure) if s.rotates]
    alike = {(fixed_freq[n].tobytes(), gain[n].tobytes(), shapes[n].head_dim) for n in rotating}
    schedule = Schedule(
        inv_freq.astype(np.float32),
        gain.astype(np.float32),
        fixed_freq,
        slope.astype(np.float32),
        np.array([layer.scale_at(length) for layer in layers], np.float32),
        tuple(structure),
        same_rotation=len(alike) == 1,
        embeddings=tuple(embeddings.values()),
    )
    if length is not None:
        schedule.check_length(length)
    return schedule


def _layer_arrays(
    layer: Layer, num_heads: int, head_dim: int, length: int | None, where: str
) -> tuple[np.ndarray, ...]:
    """A layer's inv_freq and gain [H, R] and slope [H], as in `Schedule`.

    Its encoding gives those of all heads, which its edits of single heads change, in order.
    """
    inv_freq, gain = (np.tile(array, (num_heads, 1)) for array in frequencies(layer.encoding, head_dim, length))
    slope = _slopes(layer.encoding, num_heads)
    for edit in layer.heads:
        at = list(edit.heads)
        for head in at:
            if not 0 <= head < num_heads:
                raise ConfigError(f"{where}: there is no query head {head}; the heads are 0 to {num_heads - 1}.")
        if isinstance(edit.to, Bands):
            slow = inv_freq[at] <= edit.to.threshold
            gain[at] = np.where(slow == (edit.to.keep == "slow"), gain[at], 0.0)
        elif isinstance(edit.to, Uniform):
            gain[at] = 0.0
        elif edit.to.stands_alone:
            inv_freq[at], gain[at] = frequencies(edit.to, head_dim, length)
            slope[at] = _slopes(edit.to, num_heads)[at]
    return inv_freq, gain, slope


def _slopes(encoding: Encoding, num_heads: int) -> np.ndarray:
    slope = np.array(call(encoding, "slopes", num_heads), np.float64)
    if slope.shape != (num_heads,) or not np.isfinite(slope).all():
        raise ConfigError(
            f"{type(encoding).__name__}.slopes returned shape {list(slope.shape)}; it must return [{num_heads}] finite "
            "numbers, one for each head."
        )
    return slope


def layer_hooks(layers: Sequence[Layer], num_heads: int) -> list[tuple[LayerHooks, ...]]:
    """The encodings with hooks of every layer, and the names of their parameters.

    Layers with the same description share an entry of `layers.positional`, which is stacked over them. Its name is that
    of the encoding; another description of an encoding has a number after it, by its first layer (`t5_2`). What is only
    added to the embeddings is listed, and has parameters, on the first layer that has it alone.
    """
    names: dict[Encoding, str] = {}
    embedded: set[Encoding] = set()
    found = []
    for layer in layers:
        of_layer = []
        for heads, encoding in layer.acting(num_heads):
            if not any(has(encoding, hook) for hook in HOOKS) or encoding in embedded:
                continue
            if not acts_in_layers(encoding):
                embedded.add(encoding)
            if has(encoding, "init") and encoding not in names:
                name = registered_name(encoding)
                others = sum(registered_name(one) == name for one in names)
                names[encoding] = f"{name}_{others + 1}" if others else name
            of_layer.append(LayerHooks(encoding, names.get(encoding), heads))
        found.append(tuple(of_layer))
    return found


def _structure(
    layer: Layer,
    fixed_freq: np.ndarray,
    gain: np.ndarray,
    slope: np.ndarray,
    hooks: tuple[LayerHooks, ...],
    own: LayerHeads,
    pairs: int | None,
) -> LayerStructure:
    """The structure that one layer's arrays [H, ...] need."""
    rotation = np.concatenate([fixed_freq.astype(np.float64), gain[..., None]], axis=-1)  # [H, R, 3]
    groups = rotation.reshape(own.num_kv_heads, -1, *rotation.shape[1:])
    heads: Literal["shared", "grouped", "split"] = "split"
    if (rotation == rotation[:1]).all():
        heads = "shared"
    elif (groups == groups[:, :1]).all():
        heads = "grouped"
    rotates = bool(fixed_freq.any() or (gain != 1).any())
    return LayerStructure(rotates, bool(slope.any()), layer.window, heads, hooks, pairs, own.shape, own.keys_of)


def describe(
    schedule: Schedule,
    layers: Sequence[Layer] | None = None,
    learned: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """A table of a schedule's arrays, one line for all layers that are equal; `layers` adds the encodings' names.

    `learned`, the parameters of encodings (`layers.positional` of a model), adds a second table with their values.
    """
    header, rows, _ = _described(schedule, layers)
    described = table(header, rows, words=len(header))
    return f"{described}\n\n{_learned_table(schedule, learned)}" if learned else described


def _learned_table(schedule: Schedule, learned: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each parameter of an encoding and each range of layers with the same values."""
    having: dict[str, list[int]] = {}
    for n, hooks in enumerate(schedule.hooks):
        for hook in hooks:
            if hook.parameters is not None:
                having.setdefault(hook.parameters, []).append(n)
    lines = []
    for name, places in having.items():
        for parameter, stacked in learned[name].items():
            values = [np.asarray(of_layer, np.float64) for of_layer in stacked]
            shape = " x ".join(map(str, values[0].shape)) or "1"
            cells = [_range(v) + ("" if v.min() == v.max() else f", mean {v.mean():.4g}") for v in values]
            for cell in dict.fromkeys(cells):
                equal = [n for n, other in zip(places, cells, strict=True) if other == cell]
                lines.append((f"{name}.{parameter}", ranges(equal), shape, cell))
    return table(["learned", "layers", "shape", "values"], lines, words=4)


def _described(
    schedule: Schedule, layers: Sequence[Layer] | None
) -> tuple[list[str], list[tuple[str, ...]], list[int]]:
    """The header and the lines of `describe`, and the first layer of each line."""
    if layers and len(layers) != schedule.num_layers:
        raise ConfigError(f"{len(layers)} layers cannot name the {schedule.num_layers} of this schedule.")
    rotated = (np.asarray(schedule.fixed_freq) != 0).any(-1)  # False where a frequency rounds to 0, as PI by 1e30 does
    freq, gain = np.asarray(schedule.inv_freq, np.float64), np.asarray(schedule.gain)
    slope, scale = np.asarray(schedule.alibi_slope), np.asarray(schedule.logit_scale)

    def columns(n: int) -> dict[str, str]:
        structure = schedule.structure[n]
        counts = sorted({int(c) for c in rotated[n].sum(-1)})
        waves = 2 * math.pi / freq[n][rotated[n]]
        return {
            **({"encoding": label(layers[n])} if layers else {}),
            "rotated pairs": f"{'-'.join(map(str, counts))}/{structure.pairs or freq.shape[-1]}",
            "wavelength (tokens)": f"{waves.min():.4g} .. {waves.max():.4g}" if len(waves) else "none",
            "gain": _range(gain[n]) if structure.rotates else "none",
            "slope": _range(slope[n]) if (slope[n] != 0).any() else "none",
            "window": str(structure.window or "all"),
            "logit scale": f"{scale[n]:.4g}",
            "heads": structure.heads if structure.rotates else "none",
            "other": _other(structure),
        }

    described = [columns(n) for n in range(schedule.num_layers)]
    header = [name for name in described[0] if name != "other" or any(layer["other"] for layer in described)]
    shown = [tuple(layer[name] for name in header) for layer in described]
    equal = ranges_by(shown)
    return ["layers", *header], [(where, *cells) for cells, where in equal.items()], [shown.index(c) for c in equal]


def _strip(inv_freq: Float[np.ndarray, "H R"]) -> str:
    """A line of a box a pair, the fastest first: dark as the logarithm of its mean frequency, white if unrotated."""
    mean = inv_freq.mean(0, dtype=np.float64)
    grey = [255 if f <= 0 else min(230, max(0, round(-16 * math.log(f)))) for f in mean]
    boxes = "".join(f'<rect x="{i}" width="1" height="1" fill="rgb({g},{g},{g})"/>' for i, g in enumerate(grey))
    size = f'viewBox="0 0 {len(mean)} 1" width="{4 * len(mean)}" height="12" preserveAspectRatio="none"'
    words = "frequencies, the fastest pair first: dark is fast, white is unrotated"
    return f'<svg {size} role="img" aria-label="{words}" style="border:1px solid #888">{boxes}</svg>'


def _range(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def _other(structure: LayerStructure) -> str:
    """The hooks of a layer's encodings."""
    parts = []
    for encoding, _, heads in structure.hooks:
        where = f" on heads {ranges(heads)}" if heads else ""
        parts.append(f"{registered_name(encoding)}: {', '.join(hook for hook in HOOKS if has(encoding, hook))}{where}")
    return ", ".join(parts)

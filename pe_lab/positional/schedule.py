"""Descriptions laid out as arrays: what the compiled model reads, and what may change without compiling it again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, UInt32

from pe_lab.errors import UserError
from pe_lab.positional.codec import label, ranges
from pe_lab.positional.encodings import Alibi, NotebookBias, NotebookYarn, alibi_slopes, frequencies
from pe_lab.positional.heads import HeadArrays, edit_heads
from pe_lab.positional.layers import Layer
from pe_lab.positional.rotation import Warp, fixed_point_frequencies

ArrayLike = jax.Array | np.ndarray


@dataclass(frozen=True)
class LayerStructure:
    """What is compiled into a layer; everything else about positions is data.

    `heads` says how far rotations differ within the layer: `shared` by all heads; `grouped`, differing between
    groups of query heads but not within one; `split`, differing within a group, so that keys are rotated once per
    query head (a query head whose key head still rotates would not be NoPE).

    `noisy` layers have heads whose queries and keys DoPE replaces by noise. `warp` and `self_bias` (strength, length)
    are the notebook's, and there for comparison only: they are constants of the program.
    """

    rotates: bool = False
    slopes: bool = False
    window: int | None = None
    heads: Literal["shared", "grouped", "split"] = "shared"
    noisy: bool = False
    warp: Warp | None = None
    diagonal_bias: tuple[float, int] | None = None


@dataclass(frozen=True)
class Schedule:
    """The positional encoding of a whole model, as arrays. A pytree: `structure` is static, the rest is data.

    Attributes:
      inv_freq: [N, H, R] radians per position; 0 = the pair does not rotate.
      gain: [N, H, R] amplitude of the pair after rotation, in layers that rotate.
      turns: [N, H, R, 2] `inv_freq` in fixed point (see `turns_per_position`); what the rotation reads.
      alibi_slope: [N, H] logit penalty per token of distance.
      logit_scale: [N] factor on the attention logits (DroPE's beta).
      noise: [N, H] seed of a head whose queries and keys are noise (DoPE-by-Gaussian); 0 = none.
      structure: one `LayerStructure` per layer.
      same_rotation: every layer that rotates does so alike, so one table serves them all.
    """

    inv_freq: Float[ArrayLike, "N H R"]
    gain: Float[ArrayLike, "N H R"]
    fixed_freq: UInt32[ArrayLike, "N H R 2"]
    alibi_slope: Float[ArrayLike, "N H"]
    logit_scale: Float[ArrayLike, " N"]
    noise: UInt32[ArrayLike, "N H"]
    structure: tuple[LayerStructure, ...]
    same_rotation: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.structure)

    def generalize(
        self,
        heads: Literal["shared", "grouped", "split"] = "shared",
        slopes: bool = False,
        noisy: bool = False,
    ) -> Schedule:
        """The same encoding in a structure that more schedules share: every layer takes a rotation, absent or not.

        Schedules generalized alike (and with the same windows) run through one compilation. `heads`, `slopes` and
        `noisy` are the least that the result offers; what this schedule itself needs is kept. Noise is drawn per
        query head, so `noisy` implies split heads.
        """
        if noisy:
            heads = "split"
        order = ("shared", "grouped", "split")
        structure = tuple(
            dataclasses.replace(
                s,
                rotates=True,
                slopes=s.slopes or slopes,
                noisy=s.noisy or noisy,
                heads=max(s.heads, heads, key=order.index),
            )
            for s in self.structure
        )
        return dataclasses.replace(self, structure=structure, same_rotation=False)

    def edit(
        self,
        layers: Sequence[int] | slice = slice(None),
        heads: Sequence[int] | slice = slice(None),
        *,
        num_kv_heads: int,
        inv_freq: Any = None,
        gain: Any = None,
        alibi_slope: Any = None,
        logit_scale: Any = None,
        noise: Any = None,
    ) -> Schedule:
        """A schedule with new values at some layers and heads; host side.

        Values broadcast to [layers, heads, R], `alibi_slope` and `noise` to [layers, heads], `logit_scale` to
        [layers].
        The structure is worked out anew: what `generalize` added is gone.

        Raises:
          UserError: for a layer or a head that is not there, a value whose shape does not broadcast to the place it
            goes to, or a frequency outside [0, 2 pi).
        """
        at_layers = _select(self.num_layers, layers, "layer")
        at_heads = _select(np.shape(self.gain)[1], heads, "head")

        def put(array: ArrayLike, value: Any, per_head: bool = True) -> np.ndarray:
            array = np.array(array)
            if value is None:
                return array
            place = np.ix_(at_layers, at_heads) if per_head else at_layers
            try:
                array[place] = value
            except ValueError:
                raise UserError(
                    f"A value of shape {np.shape(value)} does not broadcast to the chosen layers and heads, whose "
                    f"shape here is {array[place].shape}."
                ) from None
            return array

        # Frequencies keep their 64 bits where they are not edited: `turns` is authoritative, float32 would round.
        new_freq, fixed_freq = put(self.inv_freq, inv_freq), np.array(self.fixed_freq)
        if inv_freq is not None:
            changed = put(np.zeros(np.shape(self.inv_freq), bool), True)
            exact = put(np.array(self.inv_freq, np.float64), inv_freq)
            fixed_freq[changed] = fixed_point_frequencies(exact)[changed]
        return _assemble(
            new_freq,
            put(self.gain, gain),
            fixed_freq,
            put(self.alibi_slope, alibi_slope),
            put(self.logit_scale, logit_scale, per_head=False),
            put(self.noise, noise),
            self.structure,
            num_kv_heads,
        )


jax.tree_util.register_dataclass(
    Schedule,
    data_fields=["inv_freq", "gain", "fixed_freq", "alibi_slope", "logit_scale", "noise"],
    meta_fields=["structure", "same_rotation"],
)


def build_schedule(
    layers: Sequence[Layer], num_heads: int, num_kv_heads: int, head_dim: int, length: int | None = None
) -> Schedule:
    """Lays the descriptions of all layers out as arrays, on the host, in float32.

    Args:
      layers: one `Layer` per layer (see `pe_lab.positional.layers`).
      num_heads: H query heads.
      num_kv_heads: G key-value heads; divides H.
      head_dim: K; even.
      length: tokens the model is about to read, for schemes that depend on it.

    Returns:
      A `Schedule` whose structure says no more than these layers need: a layer without rotation has none compiled.
    """
    if not layers or num_heads < 1:
        raise UserError(f"A schedule needs layers and heads, and has {len(layers)} layers and {num_heads} heads.")
    slopes = alibi_slopes(num_heads)
    # A [N, H, R] array of a deep model is mostly repetition: work out each distinct layer once.
    known: dict[Layer, HeadArrays] = {}
    for n, layer in enumerate(layers):
        if layer not in known:
            known[layer] = _layer_arrays(layer, num_heads, head_dim, slopes, length, f"layer {n}")
    rows = [known[layer] for layer in layers]
    inv_freq = np.stack([row.inv_freq for row in rows])
    return _assemble(
        inv_freq,
        np.stack([row.gain for row in rows]),
        fixed_point_frequencies(inv_freq),
        np.stack([row.slope for row in rows]),
        np.array([layer.scale_at(length) for layer in layers]),
        np.stack([row.noise for row in rows]),
        [_constants(layer) for layer in layers],
        num_kv_heads,
    )


def _layer_arrays(
    layer: Layer, num_heads: int, head_dim: int, slopes: np.ndarray, length: int | None, where: str
) -> HeadArrays:
    inv_freq, gain = frequencies(layer.encoding, head_dim, length)
    arrays = HeadArrays(
        np.tile(inv_freq, (num_heads, 1)),
        np.tile(gain, (num_heads, 1)),
        slopes.copy() if isinstance(layer.encoding, Alibi) else np.zeros(num_heads),
        np.zeros(num_heads, np.uint32),
    )
    edit_heads(arrays, layer.heads, slopes, length, where)
    return arrays


def _constants(layer: Layer) -> LayerStructure:
    """What a description says of the compiled program; the rest of the structure follows from the arrays."""
    encoding = layer.encoding
    warp = diagonal_bias = None
    if isinstance(encoding, NotebookYarn):
        warp = Warp(encoding.alpha, encoding.beta, encoding.original_length, encoding.blend)
    if isinstance(encoding, NotebookBias):
        diagonal_bias = (encoding.strength, encoding.original_length)
    return LayerStructure(window=layer.window, warp=warp, diagonal_bias=diagonal_bias)


def _select(count: int, chosen: Sequence[int] | slice, what: str) -> np.ndarray:
    """The indices that `chosen` picks out of `count`; negative ones count from the end."""
    if isinstance(chosen, slice):
        return np.arange(count)[chosen]
    for index in chosen:
        if not -count <= index < count:
            raise UserError(f"There is no {what} {index}: this schedule has {count}, counted from 0.")
    return np.arange(count)[list(chosen)]


def _assemble(
    inv_freq: np.ndarray,
    gain: np.ndarray,
    fixed_freq: np.ndarray,
    alibi_slope: np.ndarray,
    logit_scale: np.ndarray,
    noise: np.ndarray,
    constants: Sequence[LayerStructure],
    num_kv_heads: int,
) -> Schedule:
    """A schedule around arrays; of `constants` only what does not follow from them is read."""
    if num_kv_heads < 1 or fixed_freq.shape[1] % num_kv_heads:
        raise UserError(f"{fixed_freq.shape[1]} query heads do not divide into {num_kv_heads} key-value heads.")
    every = np.broadcast_to(noise[..., None, None], (*gain.shape, 1))
    rows = np.concatenate([fixed_freq.astype(np.float64), gain[..., None], every], axis=-1)  # [N, H, R, 4], to compare
    noisy = (noise != 0).any(1)
    rotates = (fixed_freq != 0).any((1, 2, 3)) | (gain != 1).any((1, 2)) | noisy
    structure = []
    for n, constant in enumerate(constants):
        grouped = rows[n].reshape(num_kv_heads, -1, *rows.shape[2:])
        if (rows[n] == rows[n, :1]).all() and not noisy[n]:
            heads = "shared"
        else:
            # Noise is drawn per query head: a group's heads never share its key.
            heads = "grouped" if (grouped == grouped[:, :1]).all() and not noisy[n] else "split"
        structure.append(
            LayerStructure(
                bool(rotates[n]),
                bool((alibi_slope[n] != 0).any()),
                constant.window,
                heads,
                bool(noisy[n]),
                constant.warp,
                constant.diagonal_bias,
            )
        )
    rotating = rows[rotates]
    warps = {s.warp for s in structure if s.rotates}
    return Schedule(
        inv_freq.astype(np.float32),
        gain.astype(np.float32),
        fixed_freq,
        alibi_slope.astype(np.float32),
        logit_scale.astype(np.float32),
        noise.astype(np.uint32),
        tuple(structure),
        same_rotation=bool(len(rotating) and (rotating == rotating[:1]).all() and len(warps) == 1),
    )


def describe(schedule: Schedule, layers: Sequence[Layer] | None = None) -> str:
    """A table a person can check: one line for all layers that are equal, read from the arrays themselves.

    `layers`, where given, only adds the names people know the encodings by.
    """
    if layers and len(layers) != schedule.num_layers:
        raise UserError(f"{len(layers)} layers cannot name the {schedule.num_layers} of this schedule.")
    turning = (np.asarray(schedule.fixed_freq) != 0).any(-1)  # PI by 1e30 has frequencies, and yet nothing turns
    freq, gain = np.asarray(schedule.inv_freq, np.float64), np.asarray(schedule.gain)
    slope, scale, noise = (np.asarray(a) for a in (schedule.alibi_slope, schedule.logit_scale, schedule.noise))

    def line(n: int) -> tuple[str, ...]:
        rotating = turning[n]
        counts = sorted({int(c) for c in rotating.sum(-1)})
        waves = 2 * math.pi / freq[n][rotating] if rotating.any() else np.array([])
        return (
            label(layers[n]) if layers else "",
            f"{'-'.join(map(str, counts))}/{freq.shape[-1]}",
            f"{waves.min():.4g} .. {waves.max():.4g}" if len(waves) else "none",
            _span(gain[n]) if schedule.structure[n].rotates else "none",
            _span(slope[n]) if (slope[n] != 0).any() else "none",
            str(schedule.structure[n].window or "all"),
            f"{scale[n]:.4g}",
            schedule.structure[n].heads if schedule.structure[n].rotates else "none",
            _beside(schedule.structure[n], int((noise[n] != 0).sum())),
        )

    header = (
        "encoding",
        "pairs turning",
        "wavelength (tokens)",
        "gain",
        "slope",
        "window",
        "logit scale",
        "heads",
        "beside",
    )
    equal: dict[tuple[str, ...], list[int]] = {}
    for n in range(schedule.num_layers):
        equal.setdefault(line(n), []).append(n)
    cells = [("layers", *header)] + [(ranges(where), *rest) for rest, where in equal.items()]
    if all(not row[-1] for row in cells[1:]):
        cells = [row[:-1] for row in cells]
    if not layers:
        cells = [(c[0], *c[2:]) for c in cells]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _span(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def _beside(structure: LayerStructure, noisy_heads: int) -> str:
    """What a layer has that most have not."""
    parts = [f"{noisy_heads} heads are noise"] if noisy_heads else []
    if structure.warp:
        parts.append(f"positions times {structure.warp.alpha:g} .. {structure.warp.beta:g}")
    if structure.diagonal_bias:
        parts.append("{:+g} on itself below {}".format(*structure.diagonal_bias))
    return ", ".join(parts)

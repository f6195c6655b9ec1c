"""DoPE (Xiong et al. 2025, Section 4.3): heads chosen by their scores and denoised, and its noise."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.config import OMIT_DEFAULT
from pe_lab.errors import ConfigError, DataError
from pe_lab.positional.encodings import NoPE
from pe_lab.positional.hooks import Encoding, Hidden, Keys, Params, Positions, Queries
from pe_lab.positional.layers import Bands, HeadEdit, HeadKind, Layer, Uniform
from pe_lab.positional.registry import register
from pe_lab.positional.scalings import LARGEST, Limits
from pe_lab.storage import json_object

Head = tuple[int, int]  # (layer, query head)

# Methods by name: DoPE's, with each variant where its formulas and its text differ (docs/dope.md quotes both).
DOPE: dict[str, tuple[str, dict[str, Any]]] = {
    "all-nope": ("all", {"kind": "nope"}),
    "all-uniform": ("all", {"kind": "uniform"}),
    "parts-fast": ("parts", {"keep": "fast"}),
    "parts-slow": ("parts", {"keep": "slow"}),
    "gaussian": ("gaussian", {}),
    "gaussian-unit": ("gaussian", {"seed": 42, "sigma": 1.0, "one_seed": True}),  # appendix A.2
}


def select_heads(
    scores: Float[np.ndarray, "N H"], count: int, order: Literal["ascending", "descending"] = "ascending"
) -> tuple[Head, ...]:
    """The `count` heads with the lowest (ascending) or highest (descending) scores, over all layers together.

    The paper has both orders: "Only when $m_{h}=1$ do we remove the positional encoding for this head" with eq. 31,
    $m_{h}=\\mathbf{1}[\\rho_{h}^{\\,r}\\geq\\tau]$, and "only heads with low truncated matrix entropy [...] have their
    low-entropy frequency bands attenuated or masked". Equal scores are taken in the order of layers, then heads.

    Raises:
      ConfigError: scores that are not [N, H] numbers, a count outside [0, N * H], an unknown order.
    """
    try:
        scores = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            "Scores of heads are no array; give a finite number for each layer and head, [N, H]."
        ) from None
    if scores.ndim != 2 or not np.isfinite(scores).all():
        raise ConfigError(
            f"Scores of heads have shape {scores.shape}; give one finite number per layer and head, [N, H]."
        )
    if not 0 <= count <= scores.size:
        raise ConfigError(f"count is {count}; there are {scores.size} heads to choose from.")
    if order not in ("ascending", "descending"):
        raise ConfigError(f"order is '{order}'; it must be ascending (lowest scores) or descending (highest).")
    ranked = np.argsort(scores.ravel() if order == "ascending" else -scores.ravel(), kind="stable")
    return tuple((int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in sorted(ranked[:count]))


def read_scores(
    path: str | Path, num_layers: int, num_heads: int, weights: str = "", model: str = ""
) -> Float[np.ndarray, "N H"]:
    """Scores from a JSON file: a list of N lists of H numbers, or an object that holds it under "scores".

    Args:
      weights: a digest of the weights whose heads are chosen; a file that names other `weights` is refused. A file
        without that key is for any model of the shape.
      model: the name of that model, for the error.

    Raises:
      DataError: no such file, no JSON, scores of another model or of another shape; names the file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"The scores '{path}' cannot be read ({error.strerror}).") from None
    value: Any = json_object(content)
    value = json_object(content, list) if value is None else value
    if value is None:
        raise DataError(f"The scores '{path}' are not JSON: give a list of lists, alone or under \"scores\".")
    made_for = value.get("weights") if isinstance(value, dict) else None
    if weights and made_for not in (None, weights):
        raise DataError(
            f"The scores '{path}' were measured on the weights {made_for} of {value.get('checkpoint', 'a model')}, and "
            f"{model or 'this model'} has the weights {weights}. Measure its own: python -m pe_lab.analyze "
            "head_entropy."
        )
    value = value.get("scores") if isinstance(value, dict) else value
    try:
        scores = np.array(value, np.float64)
    except (TypeError, ValueError):
        scores = np.zeros(0)
    if scores.shape != (num_layers, num_heads) or not np.isfinite(scores).all():
        raise DataError(
            f"The scores '{path}' have shape {list(scores.shape)}; this model needs {num_layers} lists of {num_heads} "
            'numbers, all finite, alone or under "scores".'
        )
    return scores


def _edit(layers: Sequence[Layer], heads: Sequence[Head], kind: Callable[[Head], HeadKind]) -> tuple[Layer, ...]:
    """`layers` with one more edit on each of `heads`; equal edits of a layer are joined."""
    edits: dict[int, dict[HeadKind, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, head in heads:
        if not 0 <= n < len(layers):
            raise ConfigError(f"There is no layer {n} to denoise a head of; the layers are 0 to {len(layers) - 1}.")
        edits[n][kind((n, head))].append(head)
    return tuple(
        dataclasses.replace(layer, heads=(*layer.heads, *(HeadEdit(tuple(h), to) for to, h in edits[n].items())))
        if n in edits
        else layer
        for n, layer in enumerate(layers)
    )


def dope_by_parts(
    layers: Sequence[Layer],
    heads: Sequence[Head],
    training_length: int,
    keep: Literal["slow", "fast"] = "fast",
) -> tuple[Layer, ...]:
    """DoPE-by-parts (eq. 32 to 34): chosen heads lose the frequencies on one side of 2 pi / training_length.

    Equation 32, $\\mathbf{1}[\\theta_{f}\\leq\\theta]$, keeps the slow frequencies. The text beside it, "to retain
    sufficiently isotropic bands while filtering those dominated by low-rank spikes", keeps the fast ones. The threshold
    applies to the head's own frequencies, with their scaling.
    """
    if training_length < 1:
        raise ConfigError(f"training_length is {training_length}; give the tokens of a training window.")
    return _edit(layers, heads, lambda head: Bands(2 * math.pi / training_length, keep))


def dope_by_all(
    layers: Sequence[Layer], heads: Sequence[Head], kind: Literal["uniform", "nope"] = "nope"
) -> tuple[Layer, ...]:
    """DoPE-by-all: chosen heads lose their whole encoding.

    Equation 35 multiplies queries and keys by zero, which makes the attention `uniform`. The text beside it, such heads
    "have their entire positional encoding removed", "rather than completely zeroing out the head", makes it `nope`.
    """
    kinds: dict[str, HeadKind] = {"uniform": Uniform(), "nope": NoPE()}
    if kind not in kinds:
        raise ConfigError(f"kind is '{kind}'; it must be uniform (eq. 35) or nope (its text).")
    return _edit(layers, heads, lambda head: kinds[kind])


def dope_by_gaussian(
    layers: Sequence[Layer],
    heads: Sequence[Head],
    seed: int = 0,
    sigma: float | None = None,
    one_seed: bool = False,
) -> tuple[Layer, ...]:
    """DoPE-by-Gaussian (eq. 36, 37): queries and keys of chosen heads become noise.

    The paper's body takes the variance of the retained components, which is `sigma` None. Its appendix A.2 has sigma
    1.0 and one fixed seed, 42: `dope_by_gaussian(layers, heads, 42, 1.0, one_seed=True)`.

    Args:
      seed: not negative; with `one_seed` in [1, 2^32).
      sigma: standard deviation of the noise; None is that of the other heads' components at the same token.
      one_seed: all heads have the same noise; otherwise `seed`, layer and head determine it.
    """
    if seed < 0:
        raise ConfigError(f"seed is {seed}; give 0 or a positive whole number.")

    def noise(head: Head) -> Gaussian:
        drawn = seed if one_seed else np.random.default_rng((seed, head[0])).integers(1, 2**32)
        return Gaussian(int(drawn), sigma, one_seed)

    return _edit(layers, heads, noise)


@register("gaussian")
@dataclasses.dataclass(frozen=True)
class Gaussian(Encoding):
    """DoPE-by-Gaussian (eq. 36, 37): queries and keys of some heads are noise, a function of seed, head and position.

    The paper takes the noise's variance from the retained heads over the whole sequence. Here it is that of the token,
    so that a query does not depend on later tokens, packed documents are independent, and cached decoding is exact.

    The layer's rotation acts on the noise, which stays Gaussian, and multiplies it by a scaling's attention factor, as
    it does the components of other heads. The variance before rotation is the mean square: a rotation keeps it, and
    makes the mean of a sequence's components 0.

    Attributes:
      seed: in [1, 2^32).
      sigma: the noise's standard deviation. None: that of the components of the layer's other heads, as the paper's
        body has it, or of all heads where all are noise; its appendix A.2 has 1.0.
      same: whether all heads have the same noise.
      heads: those that are noise, set by the edit that names them; (): all.
    """

    display_name = "Gaussian noise"
    stands_alone = False

    seed: int
    sigma: float | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    same: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    heads: tuple[int, ...] = dataclasses.field(default=(), metadata=OMIT_DEFAULT)

    limits: ClassVar[Limits] = {
        "seed": (lambda x: 0 < x < 2**32 and x == int(x), "give a whole number in [1, 2^32)."),
        "sigma": (lambda x: x is None or 0 < x <= LARGEST, "it must be above 0 and at most 2^32, or left out."),
    }

    def on(self, heads: tuple[int, ...]) -> Gaussian:
        return dataclasses.replace(self, heads=heads)

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Queries]:
        H, K = q.shape[2:]
        kept = [h for h in range(H) if h not in self.heads] if self.heads else []
        head = np.zeros(H, np.uint32) if self.same else np.arange(H, dtype=np.uint32)

        def noise(side: int, x: Float[Array, "B T heads K"]) -> Queries:
            size = self.sigma
            if size is None:
                of_heads = jnp.square(jnp.repeat(x, H // x.shape[2], axis=2).astype(jnp.float32)).mean(-1)
                size = jnp.sqrt(of_heads[:, :, kept or slice(None)].mean(-1))[:, :, None, None]
            drawn = gaussian(self.seed, side, head[:, None], positions[:, :, None, None], np.arange(K))
            return jnp.broadcast_to(size * drawn, q.shape)

        return noise(0, q), noise(1, k)


def gaussian(seed: int, side: int, head: Any, position: Any, channel: Any) -> Float[Array, "*broadcast"]:
    """A standard normal number for each head, position and channel, which broadcast; `side`: 0 queries, 1 keys.

    A hash of the arguments and Box-Muller: the number of a token does not depend on the length of its sequence.
    """
    of_token = jnp.uint32(seed)
    for word in (side, head, position):
        of_token = _mixed(of_token + jnp.uint32(0x9E3779B9) * jnp.asarray(word).astype(jnp.uint32))
    of_channel = _mixed(of_token ^ (jnp.asarray(channel).astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    first, second = _mixed(of_channel + jnp.uint32(0x7F4A7C15)), _mixed(of_channel + jnp.uint32(0xBF58476D))
    # 24 bits each, the precision of float32; the first number is in (0, 1], so that its logarithm is finite.
    unit = lambda x: (x >> 8).astype(jnp.float32) * 2.0**-24  # noqa: E731
    return jnp.sqrt(-2 * jnp.log(unit(first) + 2.0**-24)) * jnp.cos(2 * math.pi * unit(second))


def _mixed(x: jax.Array) -> jax.Array:
    """A pseudo-random permutation of the 32-bit words (Wellons 2018, `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def denoise(
    layers: Sequence[Layer],
    scores: Float[np.ndarray, "N H"],
    method: Literal["parts", "all", "gaussian"],
    count: int,
    order: Literal["ascending", "descending"] = "ascending",
    **options: Any,
) -> tuple[Layer, ...]:
    """The layers with the heads that `select_heads` chooses denoised by one of DoPE's methods.

    `options` are those of `dope_by_parts` (training_length, keep), `dope_by_all` (kind) or `dope_by_gaussian`
    (seed, sigma, one_seed).
    """
    methods: dict[str, Callable[..., tuple[Layer, ...]]] = {
        "parts": dope_by_parts,
        "all": dope_by_all,
        "gaussian": dope_by_gaussian,
    }
    if method not in methods:
        raise ConfigError(f"DoPE has no method '{method}'; it must be parts, all or gaussian.")
    if len(scores) != len(layers):
        raise ConfigError(f"There are scores for {len(scores)} layers, and {len(layers)} layers to denoise.")
    return methods[method](layers, select_heads(scores, count, order), **options)


def denoise_by(
    name: str,
    layers: Sequence[Layer],
    scores: Float[np.ndarray, "N H"],
    count: int,
    order: Literal["ascending", "descending"],
    training_length: int,
    **noise: Any,
) -> tuple[Layer, ...]:
    """`denoise` by a method of `DOPE`; `noise` replaces the seed and the sigma of its Gaussian methods."""
    method, options = DOPE[name]
    more = {"training_length": training_length} if method == "parts" else noise
    return denoise(layers, scores, method, count, order, **{**options, **more})

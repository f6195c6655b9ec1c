"""DoPE: from scores of all heads to layers whose chosen heads are denoised (Xiong et al. 2025, Section 4.3)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pe_lab.errors import UserError
from pe_lab.positional.encodings import NoPE
from pe_lab.positional.heads import Bands, Gaussian, HeadEdit, HeadKind, Uniform
from pe_lab.positional.layers import Layer

Head = tuple[int, int]  # (layer, query head)


def select_heads(
    scores: Float[np.ndarray, "N H"], count: int, order: Literal["ascending", "descending"] = "ascending"
) -> tuple[Head, ...]:
    """The `count` heads with the lowest (ascending) or highest (descending) scores, over all layers together.

    The paper's text and tables contradict each other on which to take for which score (its ASC and DESC), so both are
    here. Equal scores go in the order of layers, then heads.

    Raises:
      UserError: scores that are not [N, H] numbers, a count outside [0, N * H], an unknown order.
    """
    try:
        scores = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        raise UserError("Scores of heads are no array; give a finite number per layer and head, [N, H].") from None
    if scores.ndim != 2 or not np.isfinite(scores).all():
        raise UserError(
            f"Scores of heads have shape {scores.shape}; give one finite number per layer and head, [N, H]."
        )
    if not 0 <= count <= scores.size:
        raise UserError(f"count is {count}; there are {scores.size} heads to choose from.")
    if order not in ("ascending", "descending"):
        raise UserError(f"order is '{order}'; it must be ascending (lowest scores) or descending (highest).")
    ranked = np.argsort(scores.ravel() if order == "ascending" else -scores.ravel(), kind="stable")
    return tuple((int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in sorted(ranked[:count]))


def read_scores(path: str | Path, num_layers: int, num_heads: int) -> Float[np.ndarray, "N H"]:
    """Scores from a JSON file: a list of N lists of H numbers, or an object that holds it under "scores".

    Raises:
      UserError: no such file, no JSON, or scores of another shape; names the file.
    """
    try:
        value = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"The scores '{path}' cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UserError(f"The scores '{path}' are not JSON ({error}).") from None
    value = value.get("scores") if isinstance(value, dict) else value
    try:
        scores = np.array(value, np.float64)
    except (TypeError, ValueError):
        scores = np.zeros(0)
    if scores.shape != (num_layers, num_heads) or not np.isfinite(scores).all():
        raise UserError(
            f"The scores '{path}' have shape {list(scores.shape)}; this model needs {num_layers} lists of {num_heads} "
            'numbers, all finite, alone or under "scores".'
        )
    return scores


def _edit(layers: Sequence[Layer], heads: Sequence[Head], kind: Callable[[Head], HeadKind]) -> tuple[Layer, ...]:
    """`layers` with one more edit on each of `heads`; heads of a layer that get the same are named together."""
    edits: dict[int, dict[HeadKind, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, head in heads:
        if not 0 <= n < len(layers):
            raise UserError(f"There is no layer {n} to denoise a head of; the layers are 0 to {len(layers) - 1}.")
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
    """DoPE-by-parts (eq. 32 to 34): chosen heads lose the bands on one side of 2 pi / training_length.

    Equation 32 as printed keeps the slow bands, the text and the aim of the method the fast ones: both readings are
    here. What is compared is the frequency that the head has, scaled where it is scaled.
    """
    if training_length < 1:
        raise UserError(f"training_length is {training_length}; give the tokens of a training window.")
    return _edit(layers, heads, lambda head: Bands(2 * math.pi / training_length, keep))


def dope_by_all(
    layers: Sequence[Layer], heads: Sequence[Head], reading: Literal["uniform", "nope"] = "nope"
) -> tuple[Layer, ...]:
    """DoPE-by-all: chosen heads lose the encoding whole.

    Equation 35 multiplies their queries and keys by zero, and the head becomes `uniform`; the text says that the
    positional encoding is removed, and the head becomes `nope`.
    """
    kinds: dict[str, HeadKind] = {"uniform": Uniform(), "nope": NoPE()}
    if reading not in kinds:
        raise UserError(f"reading is '{reading}'; it must be uniform (eq. 35 as printed) or nope (its text).")
    return _edit(layers, heads, lambda head: kinds[reading])


def dope_by_gaussian(layers: Sequence[Layer], heads: Sequence[Head], seed: int = 0) -> tuple[Layer, ...]:
    """DoPE-by-Gaussian (eq. 36, 37): queries and keys of chosen heads become noise; every head's is its own."""

    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or a positive whole number.")

    def noise(head: Head) -> Gaussian:
        if head[1] < 0:
            raise UserError(f"layer {head[0]}: there is no query head {head[1]}; the heads are counted from 0.")
        drawn = np.random.default_rng((seed, *head)).integers(1, 2**32)
        return Gaussian(int(drawn))

    return _edit(layers, heads, noise)


def denoise(
    layers: Sequence[Layer],
    scores: Float[np.ndarray, "N H"],
    method: Literal["parts", "all", "gaussian"],
    count: int,
    order: Literal["ascending", "descending"] = "ascending",
    **options: Any,
) -> tuple[Layer, ...]:
    """From scores to layers in one call: `select_heads`, then a method; `build_schedule` lays the result out.

    `options` are those of `dope_by_parts` (training_length, keep), `dope_by_all` (reading) and `dope_by_gaussian`
    (seed).
    """
    methods: dict[str, Callable[..., tuple[Layer, ...]]] = {
        "parts": dope_by_parts,
        "all": dope_by_all,
        "gaussian": dope_by_gaussian,
    }
    if method not in methods:
        raise UserError(f"DoPE knows no method '{method}'; it must be parts, all or gaussian.")
    if len(scores) != len(layers):
        raise UserError(f"There are scores for {len(scores)} layers, and {len(layers)} layers to denoise.")
    return methods[method](layers, select_heads(scores, count, order), **options)

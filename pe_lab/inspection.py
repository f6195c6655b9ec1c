"""What happens inside a loaded model: hidden states, queries, keys, values and attention weights of chosen layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int

from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.attention.statistics import ArrayLike, attention_rows, checked_indices
from pe_lab.errors import ConfigError
from pe_lab.model import Model
from pe_lab.model.layer_pass import LayerView, Measure, forward_model, hook_encoded, layer_pass
from pe_lab.parallel import AxisRules, use_mesh
from pe_lab.positional import HeadEdit, Layer, Uniform
from pe_lab.positional.codec import parse

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel, Tokens


class QueriesKeysValues(NamedTuple):
    """Queries, keys and values of L layers, as attention reads them.

    Rotated keys have H heads in layers where the heads of a group rotate differently, else G.
    """

    query: Float[np.ndarray, "L B T H K"]
    key: Float[np.ndarray, "L B T heads K"]
    value: Float[np.ndarray, "L B T G K"]


@dataclasses.dataclass(frozen=True)
class _Weights:
    heads: tuple[int, ...]

    def __call__(self, view: LayerView, queries: jax.Array) -> jax.Array:
        common = dict(x=view.normed, positions=view.positions, segments=view.segments, window=view.window)
        rows = attention_rows(view.query, view.key, view.encoding, rows=queries, **common)
        return rows[:, list(self.heads)]


def _input(view: LayerView, data: Any) -> jax.Array:
    return view.x


def _unrotated(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    return view.query, view.key, view.value


def _rotated(view: LayerView, data: Any) -> tuple[jax.Array, ...]:
    H, G = view.query.shape[2], view.key.shape[2]
    query, key = hook_encoded(view)
    query = encode_queries(query, view.encoding, G)
    return query, encode_keys(key, view.encoding, H), view.value


class Inspection:
    """Methods of `LanguageModel`. Tokens are a string, ids [T] (a batch of one) or ids [B, T]."""

    def attention_weights(
        self: LanguageModel,
        tokens: Tokens,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
    ) -> Float32[np.ndarray, "L B H Q T"]:
        """Attention weights of chosen queries to all keys, float32. Each row adds up to 1.

        Memory is linear in the length for a fixed number of queries.

        Args:
          layers, heads: None: all.
          queries: indices of tokens; negative ones count from the end. None: all, which are T * T numbers a head.

        Raises:
          UserError: a layer, head or token that does not exist.
        """
        ids = self.sequences(tokens)
        T, H = ids.shape[1], self.config.heads
        chosen = tuple(range(H) if heads is None else heads)
        for h in chosen:
            if not 0 <= h < H:
                raise ConfigError(f"There is no query head {h}; the model has {H}, counted from 0.")
        at = range(T) if queries is None else [q + T if q < 0 else q for q in queries]
        return np.stack(self.layer_pass(ids, _Weights(chosen), layers, checked_indices(list(at), T, "queries")))

    def hidden_states(
        self: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None
    ) -> Float[np.ndarray, "L B T D"]:
        """The residual stream at the input of each chosen layer, in the compute dtype. Layer 0 reads the embeddings.

        Raises:
          UserError: a layer that does not exist.
        """
        return np.stack(self.layer_pass(self.sequences(tokens), _input, layers))

    def queries_keys_values(
        self: LanguageModel, tokens: Tokens, layers: Sequence[int] | None = None, rotated: bool = False
    ) -> QueriesKeysValues:
        """Queries, keys and values of each chosen layer, after projection and QK-norm.

        Args:
          rotated: whether queries and keys have their positional encoding (rotation, or DoPE's noise) already.

        Raises:
          UserError: a layer that does not exist.
        """
        found = self.layer_pass(self.sequences(tokens), _rotated if rotated else _unrotated, layers)
        query, key, value = zip(*found, strict=True)
        heads = max(k.shape[2] for k in key)
        same = [np.repeat(k, heads // k.shape[2], axis=2) for k in key]
        return QueriesKeysValues(np.stack(query), np.stack(same), np.stack(value))

    def with_heads(self: LanguageModel, layer: int, heads: Sequence[int], to: Any) -> LanguageModel:
        """The same weights with another encoding on some query heads of one layer.

        Args:
          to: an encoding (`NoPE()`, `Rope(1e4)`), one of DoPE's edits (`Uniform()`, `Bands(...)`, `Gaussian(...)`), or
            the text of an encoding (`"nope"`).

        Raises:
          UserError: a layer, a head or an encoding that does not exist.
        """
        if not 0 <= layer < len(self.layers):
            raise ConfigError(f"There is no layer {layer}; the model has {len(self.layers)}, counted from 0.")
        for h in heads:
            if not 0 <= h < self.config.heads:
                raise ConfigError(f"There is no query head {h}; the model has {self.config.heads}, counted from 0.")
        if isinstance(to, str):
            to = Uniform() if to == "uniform" else parse(to).encoding
        edited: list[Layer] = list(self.layers)
        before = edited[layer]
        edited[layer] = dataclasses.replace(before, heads=(*before.heads, HeadEdit(tuple(heads), to)))
        return self.with_positional(edited)

    def initialized(self: LanguageModel, seed: int) -> LanguageModel:
        """The same shape and encodings with random weights, those that training starts from with this seed."""
        checkpoint = self.checkpoint
        params = jax.jit(Model(checkpoint.model, hooks=self.schedule.hooks).init)(jax.random.key(seed))
        metadata = {**checkpoint.metadata, "id": f"init-{seed}-{checkpoint.metadata['id']}", "lineage": []}
        return dataclasses.replace(
            self, checkpoint=dataclasses.replace(checkpoint, params=params, metadata=metadata, step=0)
        )

    def layer_pass(
        self: LanguageModel,
        ids: Int[ArrayLike, "B T"],
        measure: Measure,
        layers: Sequence[int] | None = None,
        data: Any = None,
        segments: Int[ArrayLike, "B T"] | None = None,
        positions: Int[ArrayLike, "#B T"] | None = None,
    ) -> list[Any]:
        """What `measure` returns in each chosen layer; arguments as in `model.layer_pass`.

        The sequences are sharded over the mesh's data axis, where they divide.
        """
        mesh, run = self.mesh, contextlib.nullcontext()
        if mesh is not None:
            run = use_mesh(mesh, AxisRules())
            if ids.shape[0] % mesh.shape["data"] == 0:
                ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
        schedule = self.schedule_for(ids.shape[1])
        places = dict(layers=layers, data=data, segments=segments, positions=positions)
        with run:
            model = forward_model(self.whole_pass_config())
            return [x for _, x in layer_pass(model, self.checkpoint.params, ids, schedule, measure, **places)]

"""Forward passes over sequences of any length in bounded memory: chunk after chunk, against a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from pe_lab.config import ModelConfig
from pe_lab.model.cache import Cache
from pe_lab.model.decoder import Params
from pe_lab.model.loss import cross_entropy
from pe_lab.model.programs import DecodingWeights, Programs, chunk_of, outputs_at, part_of
from pe_lab.parallel import AxisRules, fetch
from pe_lab.positional import Schedule

CHUNK = 512  # tokens per chunk


class ChunkedForward(Programs):
    """The losses and hidden states of a forward pass, for sequences that are too long for one pass.

    A pass over a whole sequence has the activations of all its tokens in memory. This one has those of a chunk, and the
    keys and values of all layers. All chunks use the schedule for the whole length, so that the result does not depend
    on the chunks.

    Args:
      config, mesh, rules: as `Programs` takes them.
      chunk: tokens per chunk.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh | None = None, rules: AxisRules | None = None, chunk: int = CHUNK
    ):
        # A scan compiles faster, and its cost per call is small for a chunk.
        super().__init__(config, mesh, rules, scan=config.scan)
        self.chunk = chunk
        self._prepared: tuple[Params, DecodingWeights] | None = None  # for the last parameters
        self._losses = jax.jit(self._forward_losses, donate_argnames=("cache",))
        self._hidden = jax.jit(self._forward_hidden, donate_argnames=("cache", "found"))

    def losses(
        self,
        params: Params,
        tokens: Int[np.ndarray, "B T"],
        targets: Int[np.ndarray, "B T"],
        schedule: Schedule,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Float32[np.ndarray, "B T"]:
        """Cross-entropy of every target in nats; `progress` is called with the number of tokens done in each row."""
        results = []
        weights, cache, placed = self._begin(params, tokens, schedule)
        for start in range(0, tokens.shape[1], self.chunk):
            part, wanted = (part_of(x, start, self.chunk) for x in (tokens, targets))
            with self.on_mesh():
                loss, cache = self._losses(weights, cache, part, wanted, np.int32(start), placed)
            # The host waits one chunk behind, so that the device always has the next one.
            results.append(loss)
            if len(results) > 1:
                results[-2] = fetch(results[-2])
            progress(min(start + self.chunk, tokens.shape[1]))
        return np.concatenate([fetch(loss) for loss in results], axis=1)[:, : tokens.shape[1]]

    def hidden(
        self,
        params: Params,
        tokens: Int[np.ndarray, "B T"],
        at: Int[np.ndarray, "B Q"],
        schedule: Schedule,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Float[Array, "B Q D"]:
        """The output of the final norm at chosen positions of each row."""
        config = self.model.config
        found = self.place(jnp.zeros((*at.shape, config.d_model), config.dtype))
        weights, cache, placed = self._begin(params, tokens, schedule)
        for start in range(0, tokens.shape[1], self.chunk):
            part = part_of(tokens, start, self.chunk)
            with self.on_mesh():
                found, cache = self._hidden(
                    weights, cache, found, part, np.asarray(at, np.int32), np.int32(start), placed
                )
            progress(min(start + self.chunk, tokens.shape[1]))
        return found

    def _begin(self, params: Params, tokens: np.ndarray, schedule: Schedule) -> tuple[Any, Cache, Schedule]:
        """The weights as `forward` takes them, an empty cache, and the schedule on the devices."""
        rows, length = tokens.shape
        # The capacity is a multiple of a quarter of the next power of two: for few programs, and little unused memory.
        unit = max(self.chunk, 1 << max(0, (length - 1).bit_length() - 2))
        layout = self.layout(schedule.structure, (False,) * schedule.num_layers, -(-length // unit) * unit)
        if self._prepared is None or self._prepared[0] is not params:
            self._prepared = (params, self.prepare(params))
        with self.on_mesh():
            return self.arranged(self._prepared[1], layout), self.allocate(layout, rows), self.place(schedule)

    def _normalized(
        self, params: Any, cache: Cache, tokens: jax.Array, start: jax.Array, schedule: Schedule
    ) -> tuple[Float[Array, "B C D"], Cache]:
        B, C = tokens.shape
        chunk = chunk_of(tokens, start, jnp.broadcast_to(start + C, (B,)))
        x, cache = self.forward(params, cache, chunk, schedule)
        return self.model.final_norm(params, x), cache

    def _forward_losses(
        self,
        params: Any,
        cache: Cache,
        tokens: Int[Array, "B C"],
        targets: Int[Array, "B C"],
        start: Int[Array, ""],
        schedule: Schedule,
    ) -> tuple[Float[Array, "B C"], Cache]:
        self.traces["losses", *tokens.shape, cache.layout.capacity] += 1
        x, cache = self._normalized(params, cache, tokens, start, schedule)
        return cross_entropy(x, self.model.unembedding(params), targets), cache

    def _forward_hidden(
        self,
        params: Any,
        cache: Cache,
        found: Float[Array, "B Q D"],
        tokens: Int[Array, "B C"],
        at: Int[Array, "B Q"],
        start: Int[Array, ""],
        schedule: Schedule,
    ) -> tuple[Float[Array, "B Q D"], Cache]:
        self.traces["hidden", *tokens.shape, cache.layout.capacity] += 1
        x, cache = self._normalized(params, cache, tokens, start, schedule)
        return outputs_at(at, x, start, found), cache

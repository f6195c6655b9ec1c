"""The compiled programs of decoding: prefill, a step of a batch, and passes over long sequences in chunks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Float32, Int

from pe_lab.attention.dispatch import cache_kernel
from pe_lab.attention.key_block import KeyBlockKernel
from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.model.cache import Cache, CacheLayout, Chunk, allocate, arrange_layers, forward_chunk, plan
from pe_lab.model.decoder import Model, Params
from pe_lab.model.learned import split_layers
from pe_lab.model.loss import cross_entropy
from pe_lab.model.sampling import Draw, choose
from pe_lab.parallel import AxisRules, check_memory, fetch, put, use_mesh
from pe_lab.positional import LayerStructure, Schedule


@dataclass
class DecodingWeights:
    """Parameters for decoding: in the compute dtype, and grouped as layers repeat."""

    params: Params
    repetitions: dict[Any, Any] = field(default_factory=dict)


class Programs:
    """The programs that decode a batch, compiled once per chunk size, capacity and batch, for all lengths.

    Args:
      config: the model's shape.
      mesh: of the parameters, if they are on several devices.
      rules: how arrays are sharded over it.
      scan: repeat equal layers by a scan. Default: as in the config, but never on a single CPU, where a scan copies
        each layer's weights at every token, which doubles its time.
      kernel: attends to KV caches. Default: the fastest one for the devices; none on a CPU.

    Attributes:
      traces: (program, sequences, tokens, capacity) -> how often it was traced and compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        rules: AxisRules | None = None,
        scan: bool | None = None,
        kernel: KeyBlockKernel | None = None,
    ):
        self.model = Model(dataclasses.replace(config, remat="none"))
        self.traces: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self._on_cpu = mesh is None and jax.default_backend() == "cpu"
        self.scan = (config.scan and not self._on_cpu) if scan is None else scan
        # A chunk may be one token: devices of a context axis shard the cache, not the chunk.
        self._mesh, self._rules = mesh, dataclasses.replace(rules or AxisRules(), length=None)
        with self.on_mesh():
            shapes = [LayerStructure(shape=n) for n in range(len(self.model.stacks))]
            requests = [self.model.attention_request(one, length=1, partial=True) for one in shapes]
            kernels = {cache_kernel(config.attention, request) for request in requests}
            self.kernel = kernel or (kernels.pop() if len(kernels) == 1 else None)
        self.rows_at_once = mesh.shape["data"] * mesh.shape["fsdp"] if mesh is not None else 1
        self._device = SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else None
        make = functools.partial(allocate, self.model.config)
        self._allocate = jax.jit(make, static_argnums=(0, 1), out_shardings=self._device)
        self.prefill = jax.jit(self._prefill, donate_argnames=("cache",))
        self.first = jax.jit(self._choose)
        self.whole = jax.jit(self._whole)
        self.next = jax.jit(self._step, donate_argnames=("cache",))

    def allocate(self, layout: CacheLayout, count: int) -> Cache:
        """An empty cache for `count` sequences; `UnsupportedError` if there is less memory."""
        shapes = jax.tree.leaves(jax.eval_shape(self._allocate, layout, count))
        devices = jax.local_devices()[:1] if self._mesh is None else list(self._mesh.local_devices)
        parts = 1 if self._mesh is None else self._mesh.size
        needed = sum(shape.size * shape.dtype.itemsize for shape in shapes) * len(devices) // parts
        sequences = "one sequence" if count == 1 else f"{count} sequences"
        check_memory(
            needed,
            f"The KV cache of {sequences} of {layout.capacity:,} tokens",
            devices,
            "Ask for fewer tokens or fewer sequences at a time.",
        )
        return self._allocate(layout, count)

    def _prefill(
        self,
        params: Any,
        cache: Cache,
        last: Float[Array, "B D"],
        tokens: Int[Array, "B C"],
        start: Int[Array, ""],
        lengths: Int[Array, " B"],
        schedule: Schedule,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Prefills tokens start .. start + C of prompts of `lengths`; `last` collects the output of each last token."""
        self.traces["prefill", *tokens.shape, cache.layout.capacity] += 1
        chunk = chunk_of(tokens, start, lengths)
        x, cache = forward_chunk(self.model, params, cache, chunk, schedule, self.kernel)
        return outputs_at((lengths - 1)[:, None], x, start, last[:, None])[:, 0], cache

    def _choose(
        self,
        params: Any,
        last: Float[Array, "B D"],
        lengths: Int[Array, " B"],
        sequences: Int[Array, " B"],
        draw: Draw,
    ) -> Int[Array, " B"]:
        """The token at position `lengths` of each sequence, from the last layer's output for the token before."""
        self.traces["choose", last.shape[0], draw.kind] += 1
        return choose(self._logits(params, last), draw, sequences, lengths)

    def _whole(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        sequences: Int[Array, " B"],
        draw: Draw,
        schedule: Schedule,
    ) -> Int[Array, " B"]:
        """`_choose` after a pass over whole sequences, for encodings that are not exact under a cache."""
        self.traces["whole", *tokens.shape] += 1
        x = self.model.hidden(params, tokens, None, None, schedule)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return choose(self.model.logits(params, last), draw, sequences, lengths)

    def _logits(self, params: Any, last: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return self.model.logits(params, self.model.output(params, last))

    def _step(
        self,
        params: Any,
        cache: Cache,
        tokens: Int[Array, " B"],
        lengths: Int[Array, " B"],
        sequences: Int[Array, " B"],
        draw: Draw,
        schedule: Schedule,
    ) -> tuple[Int[Array, " B"], Int[Array, " B"], Cache]:
        """Reads one token of each sequence, at position `lengths`; returns the next ones, the lengths and the cache."""
        self.traces["decode", tokens.shape[0], 1, cache.layout.capacity] += 1
        chunk = Chunk(tokens[:, None], lengths[:, None], lengths, jnp.ones_like(lengths))
        x, cache = forward_chunk(self.model, params, cache, chunk, schedule, self.kernel)
        logits = self._logits(params, x[:, 0])
        return choose(logits, draw, sequences, lengths + 1), lengths + 1, cache

    def prepare(self, params: Params) -> DecodingWeights:
        """Parameters in the compute dtype, cast once instead of at every step. Float32 parameters are not copied."""
        dtype = jnp.dtype(self.model.config.dtype)

        def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            # Norms multiply, and logits have their bias, in float32; encodings choose their own precision.
            kept = any(part.key in ("positional", "unembedding_bias") or "norm" in part.key for part in path)
            if kept or x.dtype == dtype:
                return x
            return x.astype(dtype)

        return DecodingWeights(jax.tree_util.tree_map_with_path(cast, params))

    def arranged(self, weights: DecodingWeights, layout: CacheLayout) -> Any:
        """The parameters in the structure of a cache, for `forward_chunk`."""
        key = (layout.repetitions, tuple(cached.structure.hooks for cached in layout.layers))
        if key not in weights.repetitions:
            stacked = weights.params["layers"]
            if self._on_cpu:
                # Slices of numpy arrays are views, which JAX uses in place: there is no second copy of the weights.
                views = arrange_layers(jax.tree.map(np.asarray, stacked), layout, self.model.stacks)
                weights.repetitions[key] = jax.tree.map(jax.device_put, views)
            else:
                weights.repetitions[key] = arrange_layers(stacked, layout, self.model.stacks)
        return {
            "token_embedder": weights.params["token_embedder"],
            "positional": split_layers(weights.params["layers"])[1],
            "layers": weights.repetitions[key],
        }

    def layout(self, structure: Sequence[LayerStructure], follows: Sequence[bool], capacity: int) -> CacheLayout:
        """The layout of a cache for sequences of at most `capacity` tokens; see `cache.plan`.

        Raises:
          UnsupportedError: an encoding says that it is not exact under a cache.
        """
        for one in structure:
            for hook in one.hooks:
                if not hook.encoding.exact_cache:
                    raise UnsupportedError(
                        f"{type(hook.encoding).__name__} is not exact under a KV cache: sequences are computed in one "
                        "pass. Use shorter sequences, or more memory."
                    )
        return plan(self.model.config, structure, follows, capacity, self.scan, kernel_rotates=self.kernel is not None)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else use_mesh(self._mesh, self._rules)

    def place(self, tree: Any) -> Any:
        """Small arrays on the device or mesh of the programs."""
        # They are committed, like the outputs of a program: an uncommitted argument would need another compilation.
        if self._mesh is None:
            return jax.device_put(tree, self._device)
        return put(tree, NamedSharding(self._mesh, PartitionSpec()))


def part_of(sequences: Sequence[np.ndarray] | np.ndarray, start: int, size: int) -> Int[np.ndarray, "B C"]:
    """Tokens start .. start + size of each sequence, padded by zeros."""
    tokens = np.zeros((len(sequences), size), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        part = sequence[start : start + size]
        row[: len(part)] = part
    return tokens


def chunk_of(tokens: Int[Array, "B C"], start: Int[Array, ""], lengths: Int[Array, " B"]) -> Chunk:
    """Tokens start .. start + C of sequences of `lengths`."""
    C = tokens.shape[1]
    positions = (start + jnp.arange(C, dtype=jnp.int32))[None]
    return Chunk(tokens, positions, jnp.minimum(start, lengths), jnp.clip(lengths - start, 0, C))


def outputs_at(
    at: Int[Array, "B Q"], x: Float[Array, "B C D"], start: Int[Array, ""], before: Float[Array, "B Q D"]
) -> Float[Array, "B Q D"]:
    """The outputs at positions `at`: from `x`, those of tokens start .. start + C; elsewhere those of `before`."""
    place, C = at - start, x.shape[1]
    here = jnp.take_along_axis(x, jnp.clip(place, 0, C - 1)[..., None], axis=1)
    return jnp.where(((place >= 0) & (place < C))[..., None], here, before)


class ForwardPasses:
    """The forward passes of one model shape, compiled once for every schedule of one structure."""

    def __init__(self, config: ModelConfig):
        self.traces = 0
        model = Model(config, backward=False)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*args: Any) -> Any:
                self.traces += 1
                return function(*args)

            return jax.jit(traced)

        self.apply, self.token_loss = counted(model.apply), counted(model.token_loss)


CHUNK = 512  # tokens per chunk


class ChunkedForward(Programs):
    """The losses and hidden states of a forward pass, for sequences that are too long for one pass.

    In memory are the activations of a `chunk` of tokens, and the keys and values of all layers. All chunks use the
    schedule for the whole length, so that the result does not depend on them.
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
        self._branches = jax.jit(self._forward_branches)

    def losses(
        self,
        params: Params,
        tokens: Int[np.ndarray, "B T"],
        targets: Int[np.ndarray, "B T"],
        schedule: Schedule,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Float32[np.ndarray, "B T"]:
        """Cross-entropy of every target in nats; `progress` is called with the tokens done in each sequence."""
        results = []
        weights, cache, placed = self._begin(params, *tokens.shape, schedule)
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
        """The output of the final norm at chosen positions of each sequence."""
        config = self.model.config
        found = self.place(jnp.zeros((*at.shape, config.d_model), config.dtype))
        weights, cache, placed = self._begin(params, *tokens.shape, schedule)
        for start in range(0, tokens.shape[1], self.chunk):
            part = part_of(tokens, start, self.chunk)
            with self.on_mesh():
                found, cache = self._hidden(
                    weights, cache, found, part, np.asarray(at, np.int32), np.int32(start), placed
                )
            progress(min(start + self.chunk, tokens.shape[1]))
        return found

    def branches(
        self,
        params: Params,
        tokens: Int[np.ndarray, "B P"],
        suffixes: Int[np.ndarray, "B J S"],
        at: Int[np.ndarray, "B J A"],
        schedule: Schedule,
    ) -> Float[Array, "B J A D"]:
        """The output of the final norm at positions `at` of J suffixes of each sequence, which count from their start.

        A suffix follows the P tokens alone, not the suffixes before it. These tokens are read once.
        """
        count, length = tokens.shape
        weights, cache, placed = self._begin(params, count, length + suffixes.shape[2], schedule)
        last = self.place(jnp.zeros((count, self.model.config.d_model), self.model.config.dtype))
        lengths = self.place(np.full(count, length, np.int32))
        for start in range(0, length, self.chunk):
            part = part_of(tokens, start, self.chunk)
            with self.on_mesh():
                last, cache = self.prefill(weights, cache, last, part, np.int32(start), lengths, placed)
        given = np.asarray(suffixes, np.int32), np.asarray(at, np.int32)
        with self.on_mesh():
            return self._branches(weights, cache, *given, np.int32(length), placed)

    def _begin(self, params: Params, count: int, length: int, schedule: Schedule) -> tuple[Any, Cache, Schedule]:
        """The weights as `forward` takes them, an empty cache, and the schedule on the devices."""
        schedule.check_length(length)
        # The capacity is a multiple of a quarter of the next power of two: for few programs, and little unused memory.
        unit = max(self.chunk, 1 << max(0, (length - 1).bit_length() - 2))
        layout = self.layout(schedule.structure, (False,) * schedule.num_layers, -(-length // unit) * unit)
        if self._prepared is None or self._prepared[0] is not params:
            self._prepared = (params, self.prepare(params))
        with self.on_mesh():
            return self.arranged(self._prepared[1], layout), self.allocate(layout, count), self.place(schedule)

    def _normalized(
        self, params: Any, cache: Cache, tokens: jax.Array, start: jax.Array, schedule: Schedule
    ) -> tuple[Float[Array, "B C D"], Cache]:
        B, C = tokens.shape
        chunk = chunk_of(tokens, start, jnp.broadcast_to(start + C, (B,)))
        x, cache = forward_chunk(self.model, params, cache, chunk, schedule, self.kernel)
        return self.model.output(params, x), cache

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
        return cross_entropy(x, self.model.head(params), targets), cache

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

    def _forward_branches(
        self,
        params: Any,
        cache: Cache,
        suffixes: Int[Array, "B J S"],
        at: Int[Array, "B J A"],
        start: Int[Array, ""],
        schedule: Schedule,
    ) -> Float[Array, "B J A D"]:
        self.traces["branches", *suffixes.shape, cache.layout.capacity] += 1

        def one(branch: tuple[Int[Array, "B S"], Int[Array, "B A"]]) -> Float[Array, "B A D"]:
            tokens, places = branch
            x, _ = self._normalized(params, cache, tokens, start, schedule)
            return jnp.take_along_axis(x, places[..., None], axis=1)

        # One after another: each writes to a copy of the cache.
        return jax.lax.map(one, (suffixes.swapaxes(0, 1), at.swapaxes(0, 1))).swapaxes(0, 1)

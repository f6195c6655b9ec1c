"""What decoding compiles: reading a chunk of prompts, choosing a token, and one step of a batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.cached_span import Span
from pe_lab.attention.capabilities import Request
from pe_lab.attention.dispatch import choose as choose_attention
from pe_lab.config import ModelConfig
from pe_lab.model.cache import Cache, Layout, allocate, arrange, plan, read_on
from pe_lab.model.decoder import Model, Params
from pe_lab.model.pattern import Run
from pe_lab.model.sampling import Draw, choose
from pe_lab.parallel import AxisRules, platform, slots_are_cut, use_mesh
from pe_lab.positional import LayerStructure, Schedule

BLOCK = 512  # slots of the cache that attention reads at once


def cache_reader(config: ModelConfig) -> Span | None:
    """The kernel that reads caches on the devices that are being traced for; None: XLA does, in blocks.

    What a config names for training says nothing here, unless it can read caches.
    """
    asked = Request(platform=platform(), head_dim=config.head_dim, dtype=config.dtype, spans=True)
    named = config.attention != "auto" and IMPLEMENTATIONS[config.attention].span is not None
    found = IMPLEMENTATIONS[choose_attention(config.attention if named else "auto", asked)]
    return found.span if found.kernel or slots_are_cut() else None


@dataclass
class Weights:
    """Parameters as decoding wants them: in the compute dtype, grouped by the runs of layers."""

    params: Params
    runs: dict[tuple[Run, ...], Any] = field(default_factory=dict)


class Programs:
    """What reads and continues a batch; one compilation per chunk size, capacity and batch, whatever the lengths.

    Args:
      config: the model's shape.
      mesh: where the parameters live, if on several devices.
      rules: how arrays are cut over it.
      scan: repeat alike layers by a scan. Default: as the config says, but never on a single CPU, where a scan copies
        each layer's weights at every token, which doubles its time.
      span: the kernel that reads caches. Default: the fastest that there is for the devices; none on a CPU.

    Attributes:
      traces: (what, rows, tokens, capacity) -> how often it was traced, which is how often it was compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        rules: AxisRules | None = None,
        scan: bool | None = None,
        span: Span | None = None,
    ):
        self.model = Model(dataclasses.replace(config, remat="none"))
        self.traces: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self._on_cpu = mesh is None and jax.default_backend() == "cpu"
        self.scan = (config.scan and not self._on_cpu) if scan is None else scan
        # A chunk of a text is as short as one token: devices of a context axis share the cache, and read it together.
        self._mesh, self._rules = mesh, dataclasses.replace(rules or AxisRules(), length=None)
        with self.on_mesh():
            self.span = span or cache_reader(self.model.config)
        self.rows_at_once = mesh.shape["data"] * mesh.shape["fsdp"] if mesh is not None else 1
        self._device = SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else None
        make = functools.partial(allocate, self.model.config)
        self.allocate = jax.jit(make, static_argnums=(0, 1), out_shardings=self._device)
        self.read_chunk = jax.jit(self._read_chunk, static_argnames=("layout",), donate_argnames=("cache",))
        self.first = jax.jit(self._choose, static_argnames=("kind",))
        self.next = jax.jit(self._step, static_argnames=("layout", "kind"), donate_argnames=("cache",))

    def _read_chunk(
        self,
        params: Any,
        cache: Cache,
        last: Float[Array, "B D"],
        tokens: Int[Array, "B C"],
        start: Int[Array, ""],
        lengths: Int[Array, " B"],
        schedule: Schedule,
        layout: Layout,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads tokens start .. start + C of prompts of `lengths`; `last` gathers what each row's last one gives."""
        B, C = tokens.shape
        self.traces["prefill", B, C, layout.capacity] += 1
        positions = (start + jnp.arange(C, dtype=jnp.int32))[None]
        counts, real = jnp.minimum(start, lengths), jnp.clip(lengths - start, 0, C)
        x, cache = read_on(
            self.model, params, cache, layout, tokens, positions, counts, real, schedule, BLOCK, self.span
        )
        at = lengths - 1 - start
        here = jnp.take_along_axis(x, jnp.clip(at, 0, C - 1)[:, None, None], axis=1)[:, 0]
        return jnp.where(((at >= 0) & (at < C))[:, None], here, last), cache

    def _choose(
        self,
        params: Any,
        last: Float[Array, "B D"],
        lengths: Int[Array, " B"],
        rows: Int[Array, " B"],
        draw: Draw,
        kind: str,
    ) -> Int[Array, " B"]:
        """The token at position `lengths` of each row, from what the last layer wrote for the one before."""
        self.traces["choose", last.shape[0], kind] += 1
        return choose(self._logits(params, last), kind, draw, rows, lengths)

    def _logits(self, params: Any, last: Float[Array, "B D"]) -> Float[Array, "B V"]:
        x = self.model.final_norm(params, last)
        weights = self.model.unembedding(params).astype(x.dtype)
        return jnp.einsum("bd,vd->bv", x, weights, preferred_element_type=jnp.float32)

    def _step(
        self,
        params: Any,
        cache: Cache,
        tokens: Int[Array, " B"],
        lengths: Int[Array, " B"],
        rows: Int[Array, " B"],
        draw: Draw,
        schedule: Schedule,
        layout: Layout,
        kind: str,
    ) -> tuple[Int[Array, " B"], Int[Array, " B"], Cache]:
        """Reads one token of each row, at position `lengths`; the tokens after them, the new lengths, the cache."""
        self.traces["decode", tokens.shape[0], 1, layout.capacity] += 1
        one = jnp.ones_like(lengths)
        x, cache = read_on(
            self.model,
            params,
            cache,
            layout,
            tokens[:, None],
            lengths[:, None],
            lengths,
            one,
            schedule,
            BLOCK,
            self.span,
        )
        logits = self._logits(params, x[:, 0])
        return choose(logits, kind, draw, rows, lengths + 1), lengths + 1, cache

    def prepare(self, params: Params) -> Weights:
        """Parameters cast once to what every step would cast them to. Float32 ones are not copied."""
        dtype = jnp.dtype(self.model.config.dtype)

        def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            # Norms multiply in float32.
            if any("norm" in part.key for part in path) or x.dtype == dtype:
                return x
            return x.astype(dtype)

        return Weights(jax.tree_util.tree_map_with_path(cast, params))

    def arranged(self, weights: Weights, layout: Layout) -> Any:
        if layout.runs not in weights.runs:
            stacked = weights.params["layers"]
            if self._on_cpu:
                # Through numpy, whose slices are views that JAX takes as they lie: no second copy of the weights.
                views = arrange(jax.tree.map(np.asarray, stacked), layout.runs)
                weights.runs[layout.runs] = jax.tree.map(jax.device_put, views)
            else:
                weights.runs[layout.runs] = arrange(stacked, layout.runs)
        return {"token_embedder": weights.params["token_embedder"], "layers": weights.runs[layout.runs]}

    def layout(self, structure: Sequence[LayerStructure], follows: Sequence[bool], capacity: int) -> Layout:
        """The layout of a cache for texts of at most `capacity` tokens; see `cache.plan`."""
        return plan(self.model.config, structure, follows, capacity, self.scan, turning=self.span is not None)

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        if self._mesh is None:
            yield
        else:
            with use_mesh(self._mesh, self._rules):
                yield

    def place(self, tree: Any) -> Any:
        """Small arrays where every step finds them.

        On a device by name, as the outputs of a program are: an argument that JAX may still move is another program.
        """
        if self._mesh is None:
            return jax.device_put(tree, self._device)
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

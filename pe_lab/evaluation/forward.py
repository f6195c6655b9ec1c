"""The compiled forward passes of a model: one per suite and length, whatever the weights and the encoding."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int, Int32

from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.model import Model, Params
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Layer, Schedule, build_schedule

LOGITS = 2**26  # next-token or attention logits held at once, at most: 256 MB in float32
BATCH_TOKENS = {"cpu": 2**11}  # what a CPU keeps in its caches: eight times as many took twice as long a token
BATCH_TOKENS_ELSEWHERE = 2**17  # per device
# Batches differ in what they hold, never in shape: padding rows repeat the last one, and are cut off again.
Batch = Mapping[str, np.ndarray]


class Forward:
    """Losses and predictions of one model shape over batches of any number of rows.

    Schedules, like parameters, are arguments of the compiled function: all methods and checkpoints share it.

    Args:
      config: the model's shape.
      slopes: whether any schedule that will come has ALiBi's slopes.
      devices: rows are spread over these (all local ones).

    Attributes:
      traces: (what, length) -> how many times it was traced, which is how many times it was compiled.
    """

    def __init__(self, config: ModelConfig, slopes: bool = False, devices: Sequence[Any] | None = None):
        self.config = dataclasses.replace(config, remat="none")
        self.traces: collections.Counter[tuple[str, int]] = collections.Counter()
        devices = list(jax.local_devices() if devices is None else devices)
        self._slopes = slopes
        self._mesh: Mesh | None = make_mesh(MeshConfig(data=-1), devices) if len(devices) > 1 else None
        self._devices = len(devices)
        self._rows: dict[tuple[str, int], int] = {}
        self._compiled: dict[tuple[str, int], Callable[..., jax.Array]] = {}

    def schedule(self, layers: Sequence[Layer], length: int) -> Schedule:
        """The layers as arrays, in the structure that all methods share."""
        config = self.config
        schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim, length)
        return schedule.generalize(slopes=self._slopes)

    def place(self, params: Params) -> Params:
        """Parameters where the forward passes want them: on every device."""
        if self._mesh is None:
            return params
        return jax.device_put(params, NamedSharding(self._mesh, PartitionSpec()))

    def losses(self, params: Params, batch: Batch, layers: Sequence[Layer]) -> Float32[np.ndarray, "n T"]:
        """Cross-entropy of every target, nats. `batch`: tokens, targets, perhaps segments and positions."""
        length = batch["tokens"].shape[1]
        used = {name: batch[name] for name in ("tokens", "targets", "segments", "positions") if name in batch}
        return self._run("losses", params, used, self.schedule(layers, length))

    def predictions(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n T"],
        at: Int[np.ndarray, "n Q"],
        layers: Sequence[Layer],
    ) -> Int32[np.ndarray, "n Q"]:
        """The likeliest next token after each of the positions `at`, of the whole vocabulary."""
        batch = {"tokens": np.asarray(tokens, np.int32), "at": np.asarray(at, np.int32)}
        return self._run("predictions", params, batch, self.schedule(layers, tokens.shape[1]))

    def _run(self, what: str, params: Params, batch: Batch, schedule: Schedule) -> np.ndarray:
        total, length = batch["tokens"].shape
        rows = self._rows.setdefault((what, length), self._rows_per_batch(total, length))
        compiled = self._function(what, length, rows)
        results = []
        with self._on_mesh():
            for start in range(0, total, rows):
                part = {name: array[start : start + rows] for name, array in batch.items()}
                results.append(compiled(params, self._spread(_pad(part, rows)), schedule))
        return np.concatenate([np.asarray(result) for result in results])[:total]

    def _rows_per_batch(self, total: int, length: int) -> int:
        """Rows that keep a batch within its memory: a power of two, and no more than there are rows."""
        tokens = BATCH_TOKENS.get(jax.default_backend(), BATCH_TOKENS_ELSEWHERE)
        seen = length if length <= self.config.attention_chunk else self.config.attention_chunk
        attention = LOGITS // (self.config.heads * seen * seen)
        each = max(1, min(tokens // length, attention, -(-total // self._devices)))
        power = 1 << (each.bit_length() - 1)
        if power < each and power * self._devices < total <= 2 * power * self._devices:
            power *= 2  # one batch, a little padded, instead of two
        return power * self._devices

    def _function(self, what: str, length: int, rows: int) -> Callable[..., jax.Array]:
        key = (what, length)
        if key not in self._compiled:
            config = self.config
            vocabulary = config.vocab_size
            fitting = (n for n in range(1, vocabulary + 1) if vocabulary % n == 0)
            held = rows // self._devices * length * vocabulary
            chunks = next(n for n in fitting if held // n <= LOGITS or n == vocabulary)
            model = Model(dataclasses.replace(config, loss_chunks=max(chunks, config.loss_chunks)))
            compute = {"losses": _losses, "predictions": _predictions}[what]

            @jax.jit
            def counted(params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
                self.traces[key] += 1
                return compute(model, params, batch, schedule)

            self._compiled[key] = counted
        return self._compiled[key]

    def _spread(self, batch: Batch) -> Any:
        if self._mesh is None:
            return batch
        return jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec(("data", "fsdp"))))

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        if self._mesh is None:
            yield
        else:
            with use_mesh(self._mesh, AxisRules()):
                yield


def _losses(model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
    return model.token_loss(params, batch, schedule)


def _predictions(model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
    """Only the asked positions meet the vocabulary: [B, T, V] never exists."""
    x = model.hidden(params, batch["tokens"], None, None, schedule)
    x = jnp.take_along_axis(x, batch["at"][..., None], axis=1)
    logits = jnp.einsum("bqd,vd->bqv", x, model.unembedding(params).astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _pad(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    return {
        name: array if len(array) == rows else np.concatenate([array, np.repeat(array[-1:], rows - len(array), 0)])
        for name, array in batch.items()
    }

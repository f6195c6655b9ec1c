"""The compiled forward passes of a model: one per what is asked and length, whatever the weights and the encoding."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.model import Model, Params
from pe_lab.model.chunked_forward import ChunkedForward
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Layer, Schedule, build_schedule

LOGITS = 2**26  # next-token or attention logits held at once, at most: 256 MB in float32
BATCH_TOKENS = {"cpu": 2**11}  # what a CPU keeps in its caches: eight times as many took twice as long a token
BATCH_TOKENS_ELSEWHERE = 2**17  # per device
WHOLE = 2**13  # tokens up to which a text is read in one pass; longer ones chunk by chunk
CHUNK = {"cpu": 2**9}
CHUNK_ELSEWHERE = 2**12
CUT_FROM = 2**11  # tokens beyond which a text is cut over devices that would otherwise have nothing to do
# Batches differ in what they hold, never in shape: padding rows repeat the last one, and are cut off again.
Batch = Mapping[str, np.ndarray]


class Forward:
    """Losses, predictions and scores of one model shape over batches of any number of rows and any length.

    Schedules, like parameters, are arguments of the compiled function: all methods and checkpoints share it. Rows are
    spread over the devices; of long texts, fewer than there are devices, each is cut over several. On one device,
    texts longer than `whole` tokens are read in chunks.

    Args:
      config: the model's shape.
      slopes: whether any schedule that will come has ALiBi's slopes.
      devices: rows are spread over these (all local ones).
      whole: tokens up to which a text is read in one pass.

    Attributes:
      traces: (what, length) -> how many times it was traced, which is how many times it was compiled.
      heard: is called with the number of tokens read, as reading goes on.
    """

    def __init__(
        self,
        config: ModelConfig,
        slopes: bool = False,
        devices: Sequence[Any] | None = None,
        whole: int = WHOLE,
    ):
        self.config = dataclasses.replace(config, remat="none")
        self.traces: collections.Counter[tuple[str, int]] = collections.Counter()
        self.heard: Callable[[int], None] = lambda _: None
        devices = list(jax.local_devices() if devices is None else devices)
        self._slopes, self._whole = slopes, whole
        self._meshes = Meshes(devices)
        self._devices = len(devices)
        self._rows: dict[tuple[str, int, Mesh | None], int] = {}
        self._compiled: dict[tuple[str, int, Mesh | None, int], Callable[..., jax.Array]] = {}
        self._readers: dict[tuple[int, Mesh | None], ChunkedForward] = {}

    def schedule(self, layers: Sequence[Layer], length: int) -> Schedule:
        """The layers as arrays, in the structure that all methods share."""
        config = self.config
        schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim, length)
        return schedule.generalize(slopes=self._slopes)

    def check_attention(self, layers: Sequence[Layer], length: int) -> None:
        """`UserError` where the config names an implementation of attention that cannot read these layers here."""
        with _on(self._meshes.over_rows):
            structure = self.schedule(layers, length).structure
            Model(self.config, backward=False).attention_by_layer(structure, length)

    def place(self, params: Params) -> Params:
        """Parameters where the forward passes want them: on every device."""
        mesh = self._meshes.over_rows
        return params if mesh is None else jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

    def losses(self, params: Params, batch: Batch, layers: Sequence[Layer]) -> Float32[np.ndarray, "n T"]:
        """Cross-entropy of every target, nats. `batch`: tokens, targets, perhaps segments and positions."""
        length = batch["tokens"].shape[1]
        used = {name: batch[name] for name in ("tokens", "targets", "segments", "positions") if name in batch}
        schedule = self.schedule(layers, length)
        if self._in_chunks(used):
            return np.concatenate(list(self._chunked(used, lambda reader, part, heard: reader.losses(
                params, part["tokens"], part["targets"], schedule, heard
            ))))  # fmt: skip
        return np.concatenate(list(self._run("losses", params, used, schedule)))

    def predictions(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n T"],
        at: Int[np.ndarray, "n Q"],
        layers: Sequence[Layer],
    ) -> Int32[np.ndarray, "n Q"]:
        """The likeliest next token after each of the positions `at`, of the whole vocabulary."""
        batch = {"tokens": np.asarray(tokens, np.int32), "at": np.asarray(at, np.int32)}
        schedule = self.schedule(layers, tokens.shape[1])
        if self._in_chunks(batch):

            def likeliest(reader: ChunkedForward, part: Batch, heard: Callable[[int], None]) -> np.ndarray:
                x = reader.hidden(params, part["tokens"], part["at"], schedule, heard)
                return np.asarray(_likeliest(reader.programs.model, params, x))

            return np.concatenate(list(self._chunked(batch, likeliest)))
        return np.concatenate(list(self._run("predictions", params, batch, schedule)))

    def scores(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n T"],
        at: Int[np.ndarray, "n Q"],
        targets: Int[np.ndarray, "n Q"],
        layers: Sequence[Layer],
        read_as: int | None = None,
        rows: int | None = None,
    ) -> Iterator[tuple[Float32[np.ndarray, "rows Q"], Bool[np.ndarray, "rows Q"]]]:
        """The log-probability of each target after its position `at`, nats, and whether it is the likeliest token.

        Batch after batch, in the order of the rows. A position may be asked for several targets.

        Args:
          read_as: the length whose schedule the texts are read with, where an encoding follows it; by default T.
          rows: so many at once on each device, instead of what its memory is good for.
        """
        batch = {name: np.asarray(array, np.int32) for name, array in (("tokens", tokens), ("at", at))}
        batch["targets"] = np.asarray(targets, np.int32)
        schedule = self.schedule(layers, read_as or tokens.shape[1])
        if self._in_chunks(batch):

            def score(reader: ChunkedForward, part: Batch, heard: Callable[[int], None]) -> np.ndarray:
                x = reader.hidden(params, part["tokens"], part["at"], schedule, heard)
                chunks = self._loss_chunks(part["at"].size // self._devices)
                return np.asarray(_score(reader.programs.model, params, x, part["targets"], chunks))

            found = self._chunked(batch, score)
        else:
            found = self._run("scores", params, batch, schedule, rows)
        for one in found:
            yield one[..., 0], one[..., 1] > 0

    def _in_chunks(self, batch: Batch) -> bool:
        """Whether texts are read chunk by chunk: long ones, one document each, each on one device."""
        total, length = batch["tokens"].shape
        alone = "segments" not in batch and "positions" not in batch
        return length > self._whole and alone and not self._meshes.cuts(total, length)

    def _chunked(
        self, batch: Batch, read: Callable[[ChunkedForward, Batch, Callable[[int], None]], np.ndarray]
    ) -> Iterator[np.ndarray]:
        total, length = batch["tokens"].shape
        chunk = CHUNK.get(jax.default_backend(), CHUNK_ELSEWHERE)
        mesh = self._meshes.over_rows
        key = (chunk, mesh)
        if key not in self._readers:
            config = dataclasses.replace(self.config, loss_chunks=self._loss_chunks(chunk))
            self._readers[key] = ChunkedForward(config, mesh, chunk=chunk)
        rows = self._devices * max(1, min(BATCH_TOKENS_ELSEWHERE // length, -(-total // self._devices)))
        for start in range(0, total, rows):
            part = {name: array[start : start + rows] for name, array in batch.items()}
            real = len(part["tokens"])
            yield read(self._readers[key], _pad(part, rows), self._hearing(real))[:real]

    def _hearing(self, rows: int) -> Callable[[int], None]:
        """What a reader tells of its position in each of so many rows, as tokens read since it last told."""
        before = 0

        def told(position: int) -> None:
            nonlocal before
            self.heard(rows * (position - before))
            before = position

        return told

    def _run(
        self, what: str, params: Params, batch: Batch, schedule: Schedule, rows: int | None = None
    ) -> Iterator[np.ndarray]:
        total, length = batch["tokens"].shape
        mesh = self._meshes.of(total, length)
        spread = 1 if mesh is None else mesh.shape["data"]
        if what == "scores":  # asked again and again, with few rows and many
            rows = min(rows * spread, total) if rows else self._rows_per_batch(total, length, spread)
            rows = -(-rows // spread) * spread
        else:
            rows = self._rows.setdefault((what, length, mesh), self._rows_per_batch(total, length, spread))
        scored = batch["at"].shape[1] if what == "scores" else length
        compiled = self._function(what, length, mesh, rows // spread * scored)
        if mesh is not self._meshes.over_rows:
            # They lie on all devices already, and stay there; only the name of where changes.
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        waiting = None
        for start in range(0, total, rows):
            part = {name: array[start : start + rows] for name, array in batch.items()}
            with _on(mesh):
                result = compiled(params, _spread(_pad(part, rows), mesh), schedule)
            real = len(part["tokens"])
            if waiting is not None:
                # One batch behind, so that the devices always have the next.
                yield np.asarray(waiting)
            waiting = result
            self.heard(real * length)
        yield np.asarray(waiting)[:real]

    def _rows_per_batch(self, total: int, length: int, spread: int) -> int:
        """Rows that keep a batch within its memory: a power of two, and no more than there are rows."""
        tokens = BATCH_TOKENS.get(jax.default_backend(), BATCH_TOKENS_ELSEWHERE)
        seen = length if length <= self.config.attention_chunk else self.config.attention_chunk
        attention = LOGITS // (self.config.heads * seen * seen)
        each = max(1, min(tokens // length, attention, -(-total // spread)))
        power = 1 << (each.bit_length() - 1)
        if power < each and power * spread < total <= 2 * power * spread:
            power *= 2  # one batch, a little padded, instead of two
        return power * spread

    def _loss_chunks(self, tokens: int) -> int:
        """In how many parts of the vocabulary the losses of so many tokens are computed."""
        vocabulary = self.config.vocab_size
        fitting = (n for n in range(1, vocabulary + 1) if vocabulary % n == 0)
        chunks = next(n for n in fitting if tokens * vocabulary // n <= LOGITS or n == vocabulary)
        return max(chunks, self.config.loss_chunks)

    def _function(self, what: str, length: int, mesh: Mesh | None, tokens: int) -> Callable[..., jax.Array]:
        """What a batch goes through on each device, where so many of its tokens meet the vocabulary."""
        chunks = self._loss_chunks(tokens)
        key = (what, length, mesh, chunks)
        if key not in self._compiled:
            model = Model(dataclasses.replace(self.config, loss_chunks=chunks), backward=False)
            compute = {"losses": _losses, "predictions": _predictions, "scores": _scores}[what]

            @jax.jit
            def counted(params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
                self.traces[what, length] += 1
                return compute(model, params, batch, schedule)

            self._compiled[key] = counted
        return self._compiled[key]


class Meshes:
    """Devices laid out for a batch: rows over all of them, or fewer rows, each cut over several."""

    def __init__(self, devices: Sequence[Any]):
        self.over_rows: Mesh | None = make_mesh(MeshConfig(data=-1), devices) if len(devices) > 1 else None
        self._count = len(devices)

    def cuts(self, rows: int, length: int) -> bool:
        """Whether texts are cut: there are fewer of them than devices, and they are long."""
        return length > CUT_FROM and rows < self._count

    def of(self, rows: int, length: int) -> Mesh | None:
        """The mesh for a batch; None for a single device."""
        if self.over_rows is None or not self.cuts(rows, length):
            return self.over_rows
        over = max(n for n in range(1, self._count + 1) if self._count % n == 0 and n <= rows)
        # The same devices in the same order: what lies on all of them need not move.
        grid = self.over_rows.devices.reshape(over, 1, 1, self._count // over)
        return Mesh(grid, self.over_rows.axis_names, axis_types=self.over_rows.axis_types)


def _on(mesh: Mesh | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if mesh is None else use_mesh(mesh, AxisRules())


def _spread(batch: Batch, mesh: Mesh | None) -> Any:
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def _losses(model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
    return model.token_loss(params, batch, schedule)


def _predictions(model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
    return _likeliest(model, params, _hidden_at(model, params, batch, schedule))


def _scores(model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
    return _score(model, params, _hidden_at(model, params, batch, schedule), batch["targets"], model.config.loss_chunks)


def _hidden_at(
    model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule
) -> Float[Array, "B Q D"]:
    """Only the asked positions meet the vocabulary: [B, T, V] never exists."""
    x, places = model.hidden_in_order(params, batch["tokens"], None, None, schedule)
    at = batch["at"] if places is None else jnp.asarray(places)[batch["at"]]
    return jnp.take_along_axis(x, at[..., None], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(model: Model, params: Params, x: Float[Array, "B Q D"]) -> Int32[Array, "B Q"]:
    logits = jnp.einsum("bqd,vd->bqv", x, model.unembedding(params).astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _score(
    model: Model, params: Params, x: Float[Array, "B Q D"], targets: Int32[Array, "B Q"], chunks: int
) -> Float32[Array, "B Q 2"]:
    """Log-probability of each target, and 1 where it is the likeliest token (of equals, the one with the lowest id).

    The vocabulary is walked as `cross_entropy` walks it: chunk c is the tokens c, c + chunks, c + 2 chunks ...
    """
    weights = model.unembedding(params).astype(x.dtype)
    parts = jnp.moveaxis(weights.reshape(-1, chunks, weights.shape[-1]), 1, 0)

    def step(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        highest, likeliest, total, at_target = carry
        index, part = chunk
        logits = jnp.einsum("bqd,vd->bqv", x, part, preferred_element_type=jnp.float32)
        best, top = jnp.argmax(logits, axis=-1) * chunks + index, logits.max(-1)
        first = (top > highest) | ((top == highest) & (best < likeliest))
        new = jnp.maximum(highest, top)
        total = total * jnp.exp(highest - new) + jnp.exp(logits - new[..., None]).sum(-1)
        place = jnp.where(targets % chunks == index, targets // chunks, -1)
        at_target += jnp.where(place[..., None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)
        return (new, jnp.where(first, best, likeliest), total, at_target), None

    shape = targets.shape
    start = (jnp.full(shape, -jnp.inf), jnp.full(shape, 2**31 - 1), jnp.zeros(shape), jnp.zeros(shape))
    (highest, likeliest, total, at_target), _ = jax.lax.scan(step, start, (jnp.arange(chunks), parts))
    return jnp.stack([at_target - highest - jnp.log(total), likeliest == targets], axis=-1).astype(jnp.float32)


def _pad(batch: Batch, rows: int) -> dict[str, np.ndarray]:
    return {
        name: array if len(array) == rows else np.concatenate([array, np.repeat(array[-1:], rows - len(array), 0)])
        for name, array in batch.items()
    }

"""Compiled forward passes of a model, one for each output and length, for any weights and positional encoding."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model, Params, model_schedule
from pe_lab.model.cache import cache_bytes
from pe_lab.model.learned import split_layers
from pe_lab.model.loss import LOGITS, Head, tokens_per_device, vocabulary_chunks
from pe_lab.model.programs import ChunkedForward
from pe_lab.parallel import (
    AxisRules,
    check_memory,
    compute_devices,
    computes_together,
    fetch,
    make_mesh,
    put,
    shared,
    use_mesh,
)
from pe_lab.positional import Layer, Schedule, label_layers

BATCH_TOKENS = {"cpu": 2**11}  # fits a CPU's caches: with eight times as many a token took twice as long
BATCH_TOKENS_ELSEWHERE = 2**17  # per device
WHOLE = 2**13  # the most tokens of a sequence that is read in one pass; longer ones are read in chunks
CHUNK = {"cpu": 2**9}
CHUNK_ELSEWHERE = 2**12
SHARD_FROM = 2**11  # longer sequences are sharded over devices that would otherwise be idle
Batch = Mapping[str, np.ndarray]  # [n, ...] each; the last sequence is repeated to fill the last compiled batch
OnTokens = Callable[[int], None]  # is called with the number of tokens read since the last call


def check_length(config: ModelConfig, layers: Sequence[Layer], length: int) -> None:
    """`UnsupportedError` if one sequence does not fit the memory of this process's share of the devices.

    On one device a long sequence is read in chunks, with the KV cache of all of it; on several it is sharded over them,
    and the hidden states of one layer are in memory.
    """
    devices = compute_devices()
    here = [device for device in devices if device.process_index == jax.process_index()]
    if len(devices) == 1:
        structure = model_schedule(config, layers, length).structure
        needed = cache_bytes(config, structure, length) if length > WHOLE else 0
    else:
        needed = 3 * length * config.d_model * np.dtype(config.dtype).itemsize * len(here) // len(devices)
    check_memory(needed, f"One sequence of {length:,} tokens", here, "Ask for shorter --lengths, or use more devices.")


class Forward:
    """Losses, predictions and scores of one model shape, for any number of sequences of any length.

    Schedules and parameters are arguments of the compiled functions, which all variants and checkpoints share. The
    sequences of a batch are sharded over the devices; long sequences, fewer than there are devices, are each sharded
    over several. Otherwise sequences of more than `whole` tokens are read in chunks. Several processes share batches.

    Args:
      config: the model's shape.
      slopes: whether any schedule to come has ALiBi's slopes.
      devices: the devices to use; None: `compute_devices()`.
      whole: the most tokens of a sequence that is read in one pass.
      tensor: the devices that the weights are sharded over; 1: every device has all weights.
      mesh: of a training run, on which the weights lie as they are: sequences are sharded over its data and fsdp axes,
        whatever their length. Instead of `devices` and `tensor`.

    Attributes:
      traces: (output, length) -> how often it was traced, and so compiled.
      on_tokens: see `OnTokens`.
    """

    def __init__(
        self,
        config: ModelConfig,
        slopes: bool = False,
        devices: Sequence[Any] | None = None,
        whole: int = WHOLE,
        tensor: int = 1,
        mesh: Mesh | None = None,
    ):
        self.config = dataclasses.replace(config, remat="none")
        self.traces: collections.Counter[tuple[str, int]] = collections.Counter()
        self.on_tokens: OnTokens = lambda tokens: None
        self._live = mesh is not None and mesh.size > 1
        if mesh is not None:
            devices = mesh.devices.flatten()
        devices = list(compute_devices() if devices is None else devices)
        self._slopes, self._whole = slopes, sys.maxsize if self._live else whole
        self._meshes = Meshes(devices, tensor, mesh if self._live else None)
        self._devices = len(devices)
        self._batch_sizes: dict[tuple[str, int, Mesh | None], int] = {}
        self._compiled: dict[tuple[str, int, Mesh | None, int], Callable[..., jax.Array]] = {}

    def schedule(self, layers: Sequence[Layer], length: int) -> Schedule:
        """The schedule of layers at a length, in the structure that all variants share."""
        config = self.config
        schedule = model_schedule(config, layers, length)
        return schedule.generalize(slopes=self._slopes)

    def check_attention(self, layers: Sequence[Layer], length: int) -> None:
        """Checks that the attention that the config names can run these layers here; a `UserError` if not."""
        with _on(self._meshes.over_sequences):
            structure = self.schedule(layers, length).structure
            Model(self.config, backward=False).attention_by_layer(structure, length)

    def place(self, params: Params) -> Params:
        """The parameters on the devices: replicated on every one, or sharded over `tensor` of them."""
        return self._placed(params, self._meshes.over_sequences)

    def _placed(self, params: Params, mesh: Mesh | None) -> Params:
        if mesh is None or self._live:
            return params
        if mesh.shape["tensor"] > 1:
            blocks, learned = split_layers(params["layers"])
            bare = {**params, "layers": blocks}
            placed = jax.tree.map(put, bare, parameter_shardings(Model(self.config), mesh, AxisRules()))
            placed["layers"] |= {"positional": put(learned, NamedSharding(mesh, PartitionSpec()))} if learned else {}
            return placed
        return put(params, NamedSharding(mesh, PartitionSpec()))

    def losses(self, params: Params, batch: Batch, layers: Sequence[Layer]) -> Float32[np.ndarray, "n T"]:
        """The cross-entropy of every target, nats. `batch`: tokens, targets, and perhaps segments and positions."""
        used = {name: batch[name] for name in ("tokens", "targets", "segments", "positions") if name in batch}
        return np.concatenate(list(self._outputs("losses", params, used, layers)))

    def population_losses(
        self, params: Params, batch: Batch, population: Sequence[Sequence[Layer]]
    ) -> Float32[np.ndarray, "P n"]:
        """The sum over targets of weight times cross-entropy, nats, of each sequence under each of P encodings.

        The encodings share one structure, so that their schedules are one array more: candidates are vmapped through
        one compilation, and sharded over the devices, each of which has all sequences. Where weights are sharded,
        candidates are measured one after another.

        Args:
          batch: tokens, targets and weights [n, T].

        Raises:
          ConfigError: the encodings have different structures.
        """
        total, length = batch["tokens"].shape
        if not population:
            return np.zeros((0, total), np.float32)
        if self._meshes.over_sequences is not None and self._meshes.over_sequences.shape["tensor"] > 1:
            found = [self.losses(params, batch, layers) * batch["weights"] for layers in population]
            return np.stack([one.sum(1) for one in found]).astype(np.float32)
        schedules = [self.schedule(layers, length) for layers in population]
        for layers, schedule in zip(population, schedules, strict=True):
            if jax.tree.structure(schedule) != jax.tree.structure(schedules[0]):
                raise ConfigError(
                    "A population needs encodings of one structure (the same windows, heads and hooks), and "
                    f"{label_layers(layers)} differs from {label_layers(population[0])}."
                )
        mesh, each = self._meshes.over_sequences, self._batch_size(total, length, 1)
        size = min(self.candidates_at_once(total, length), -(-len(population) // self._devices) * self._devices)
        compiled, used = self._population_function(length, mesh), ("tokens", "targets", "weights")
        found = []
        for first in range(0, len(population), size):
            part = schedules[first : first + size]
            stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *part, *[part[-1]] * (size - len(part)))
            columns = []
            for start in range(0, total, each):
                sequences, count = part_of({name: np.asarray(batch[name]) for name in used}, start, each)
                columns.append(fetch(compiled(params, sequences, stacked))[: len(part), :count])
                self.on_tokens(len(part) * count * length)
            found.append(np.concatenate(columns, axis=1))
        return np.concatenate(found)

    def candidates_at_once(self, sequences: int, length: int) -> int:
        """How many encodings `population_losses` measures in one batch, of `sequences` of `length` tokens each."""
        fitting = self._batch_size(2**20, length, 1)
        return self._devices * max(1, fitting // min(sequences, fitting))

    def _population_function(self, length: int, mesh: Mesh | None) -> Callable[..., jax.Array]:
        """The compiled function from parameters, sequences and stacked schedules to weighted losses [P, n]."""
        key = ("population", length, mesh)
        if key not in self._compiled:
            model = Model(self.config, backward=False)

            def one(params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
                self.traces["population", length] += 1
                return (model.token_loss(params, batch, schedule) * batch["weights"]).sum(1)

            several = jax.vmap(one, in_axes=(None, None, 0))
            if mesh is not None:
                axes, everywhere = PartitionSpec(("data", "fsdp")), PartitionSpec()
                several = jax.shard_map(
                    several, mesh=mesh, in_specs=(everywhere, everywhere, axes), out_specs=axes, check_vma=False
                )
            self._compiled[key] = jax.jit(several)
        return self._compiled[key]

    def predictions(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n T"],
        at: Int[np.ndarray, "n Q"],
        layers: Sequence[Layer],
    ) -> Int32[np.ndarray, "n Q"]:
        """The likeliest next token after each of the positions `at`."""
        batch = {"tokens": np.asarray(tokens, np.int32), "at": np.asarray(at, np.int32)}
        return np.concatenate(list(self._outputs("predictions", params, batch, layers)))

    def scores(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n T"],
        at: Int[np.ndarray, "n Q"],
        targets: Int[np.ndarray, "n Q"],
        layers: Sequence[Layer],
        schedule_length: int | None = None,
        per_device: int | None = None,
    ) -> Iterator[tuple[Float32[np.ndarray, "b Q"], Bool[np.ndarray, "b Q"]]]:
        """The log-probability of each target after its position `at`, nats, and whether it is the likeliest token.

        Yields batch after batch, in the order of the sequences. A position may have several targets.

        Args:
          schedule_length: the length of the schedule, for encodings that depend on it; None: T.
          per_device: the sequences in a batch on each device; None: as many as its memory is good for.
        """
        batch = {
            name: np.asarray(array, np.int32) for name, array in (("tokens", tokens), ("at", at), ("targets", targets))
        }
        for found in self._outputs("scores", params, batch, layers, schedule_length, per_device):
            yield found[..., 0], found[..., 1] > 0

    def branch_scores(
        self,
        params: Params,
        tokens: Int[np.ndarray, "n P"],
        suffixes: Int[np.ndarray, "n J S"],
        at: Int[np.ndarray, "n J A"],
        targets: Int[np.ndarray, "n J A"],
        layers: Sequence[Layer],
    ) -> tuple[Float32[np.ndarray, "n J A"], Bool[np.ndarray, "n J A"]]:
        """The log-probability of each target after its position, nats, and whether it is the likeliest token.

        Each of the J suffixes follows the P tokens alone, which are read once, into a KV cache; `at` counts from the
        first token of the suffix.

        Raises:
          UnsupportedError: an encoding is not exact under a cache.
        """
        schedule = self.schedule(layers, tokens.shape[1] + suffixes.shape[2])
        given = {"tokens": tokens, "suffixes": suffixes, "at": at, "targets": targets}
        batch = {name: np.asarray(array, np.int32) for name, array in given.items()}
        reader, (branches, answers) = self._chunked, at.shape[1:]
        each = max(1, BATCH_TOKENS.get(jax.default_backend(), BATCH_TOKENS_ELSEWHERE) // reader.chunk)
        size = self._devices * min(each, -(-len(tokens) // self._devices))

        def read(parts: Iterable[tuple[Batch, int]]) -> Iterator[np.ndarray]:
            for part, count in parts:
                x = reader.branches(params, part["tokens"], part["suffixes"], part["at"], schedule)
                with reader.on_mesh():
                    flat = x.reshape(len(x), branches * answers, -1)
                    found = _score(reader.model, params, flat, part["targets"].reshape(len(x), -1))
                self.on_tokens(count * (tokens.shape[1] + branches * suffixes.shape[2]))
                yield fetch(found)[:count]

        found = np.concatenate(list(self._batch_by_batch(batch, size, read))).reshape(*targets.shape, 2)
        return found[..., 0], found[..., 1] > 0

    def _outputs(
        self,
        output: str,
        params: Params,
        batch: Batch,
        layers: Sequence[Layer],
        schedule_length: int | None = None,
        per_device: int | None = None,
    ) -> Iterator[np.ndarray]:
        """An output of all sequences, batch after batch."""
        total, length = batch["tokens"].shape
        schedule = self.schedule(layers, schedule_length or length)
        one_document = "segments" not in batch and "positions" not in batch
        if length > self._whole and one_document and not self._meshes.shards(total, length):
            return self._read_in_chunks(output, params, batch, schedule)
        return self._read_whole(output, params, batch, schedule, per_device)

    @functools.cached_property
    def _chunked(self) -> ChunkedForward:
        chunk = CHUNK.get(jax.default_backend(), CHUNK_ELSEWHERE)
        return ChunkedForward(self.config, self._meshes.over_sequences, chunk=chunk)

    def _read_in_chunks(self, output: str, params: Params, batch: Batch, schedule: Schedule) -> Iterator[np.ndarray]:
        total, length = batch["tokens"].shape
        reader = self._chunked
        size = self._devices * max(1, min(BATCH_TOKENS_ELSEWHERE // length, -(-total // self._devices)))

        def read(parts: Iterable[tuple[Batch, int]]) -> Iterator[np.ndarray]:
            for part, count in parts:
                on_position = self._on_position(count)
                if output == "losses":
                    found = reader.losses(params, part["tokens"], part["targets"], schedule, on_position)
                else:
                    x = reader.hidden(params, part["tokens"], part["at"], schedule, on_position)
                    with reader.on_mesh():
                        found = _of_hidden(output, reader.model, params, x, part)
                yield fetch(found)[:count]

        return self._batch_by_batch(batch, size, read)

    def _batch_by_batch(
        self, batch: Batch, size: int, read: Callable[[Iterable[tuple[Batch, int]]], Iterator[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        """What `read` yields for each part of `size` sequences. Several processes share the parts."""
        total, length = batch["tokens"].shape
        starts = range(0, total, size)
        own: set[int] = set()

        def parts(chosen: Iterable[int]) -> Iterator[tuple[Batch, int]]:
            for start in chosen:
                own.add(start)
                yield part_of(batch, start, size)

        for start, found in zip(starts, shared(starts, lambda chosen: read(parts(chosen))), strict=True):
            if start not in own:
                self.on_tokens(len(found) * length)
            yield found

    def _on_position(self, sequences: int) -> Callable[[int], None]:
        """A callback for the position that was reached in each of `sequences`, which calls `on_tokens`."""
        before = 0

        def on_position(position: int) -> None:
            nonlocal before
            self.on_tokens(sequences * (position - before))
            before = position

        return on_position

    def _read_whole(
        self, output: str, params: Params, batch: Batch, schedule: Schedule, per_device: int | None
    ) -> Iterator[np.ndarray]:
        total, length = batch["tokens"].shape
        mesh = self._meshes.of(total, length)
        shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        if output == "scores":  # called many times, with few sequences or many
            size = min(per_device * shards, total) if per_device else self._batch_size(total, length, shards)
            size = -(-size // shards) * shards
        else:
            size = self._batch_sizes.setdefault((output, length, mesh), self._batch_size(total, length, shards))
        compiled = self._function(output, length, mesh)
        if mesh is not self._meshes.over_sequences:
            # The same devices under another mesh: nothing is copied.
            params = self._placed(params, mesh)

        def read(parts: Iterable[tuple[Batch, int]]) -> Iterator[np.ndarray]:
            waiting = None
            for part, count in parts:
                with _on(mesh):
                    result = compiled(params, _shard(part, mesh), schedule)
                if waiting is not None:
                    # One batch behind, so that the devices always have the next.
                    yield fetch(waiting[0])[: waiting[1]]
                waiting = result, count
                self.on_tokens(count * length)
            if waiting is not None:
                yield fetch(waiting[0])[: waiting[1]]

        return self._batch_by_batch(batch, size, read)

    def _batch_size(self, total: int, length: int, shards: int) -> int:
        """The sequences of a batch that fits memory: a power of two a shard, and no more than `total` needs."""
        tokens = BATCH_TOKENS.get(jax.default_backend(), BATCH_TOKENS_ELSEWHERE)
        seen = length if length <= self.config.attention_chunk else self.config.attention_chunk
        attention = LOGITS // (self.config.heads * seen * seen)
        each = max(1, min(tokens // length, attention, -(-total // shards)))
        power = 1 << (each.bit_length() - 1)
        if power < each and power * shards < total <= 2 * power * shards:
            power *= 2  # one padded batch instead of two
        return power * shards

    def _function(self, output: str, length: int, mesh: Mesh | None) -> Callable[..., jax.Array]:
        """The compiled function of an output."""
        key = (output, length, mesh)
        if key not in self._compiled:
            model = Model(self.config, backward=False)

            @jax.jit
            def counted(params: Params, batch: Mapping[str, jax.Array], schedule: Schedule) -> jax.Array:
                self.traces[output, length] += 1
                return _compute(output, model, params, batch, schedule)

            self._compiled[key] = counted
        return self._compiled[key]


class Meshes:
    """Meshes for batches: sequences sharded over all devices, or fewer sequences that are each sharded over several.

    Args:
      tensor: the devices that the weights are sharded over.
      live: the mesh of a training run, which is then the one of every batch.
    """

    def __init__(self, devices: Sequence[Any], tensor: int = 1, live: Mesh | None = None):
        self.over_sequences, self._count, self._together = live, 1, computes_together()
        if live is None and len(devices) > 1:
            self.over_sequences = make_mesh(MeshConfig(data=-1, tensor=tensor), devices)
            self._count = len(devices) // tensor

    def shards(self, sequences: int, length: int) -> bool:
        """Whether each sequence is sharded: they are long, and fewer than the devices.

        Where processes compute together, any number of long sequences is: one of them is too much for a device.
        """
        return length > SHARD_FROM and self._count > 1 and (self._together or sequences < self._count)

    def of(self, sequences: int, length: int) -> Mesh | None:
        """The mesh for a batch; None for a single device."""
        if self.over_sequences is None or not self.shards(sequences, length):
            return self.over_sequences
        fitting = (n for n in range(1, self._count + 1) if self._count % n == 0 and n <= sequences)
        over = 1 if self._together else max(fitting)
        # The same devices in the same order, so that replicated arrays need not move.
        grid = self.over_sequences.devices.reshape(over, self._count // over, 1, -1).transpose(0, 2, 3, 1)
        return Mesh(grid, self.over_sequences.axis_names, axis_types=self.over_sequences.axis_types)


def tensor_shards(mesh: Mesh | None) -> int:
    """The devices that scoring shards weights over: those of the mesh, if processes compute together.

    Otherwise every device has all weights.
    """
    return mesh.shape["tensor"] if mesh is not None and computes_together() else 1


def _on(mesh: Mesh | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if mesh is None else use_mesh(mesh, AxisRules())


def _shard(batch: Batch, mesh: Mesh | None) -> Any:
    return batch if mesh is None else put(batch, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))


def _compute(
    output: str, model: Model, params: Params, batch: Mapping[str, jax.Array], schedule: Schedule
) -> jax.Array:
    if output == "losses":
        return model.token_loss(params, batch, schedule)
    x, places, _, _ = model.forward(params, batch["tokens"], None, None, schedule)
    at = batch["at"] if places is None else jnp.asarray(places)[batch["at"]]
    # Hidden states at the positions `at` alone: logits of [B, T, V] never exist.
    x = jnp.take_along_axis(x, at[..., None], axis=1)
    return _of_hidden(output, model, params, x, batch)


def _of_hidden(
    output: str, model: Model, params: Params, x: Float[Array, "B Q D"], batch: Mapping[str, Any]
) -> jax.Array:
    if output == "predictions":
        return _likeliest(model, params, x)
    return _score(model, params, x, batch["targets"])


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(model: Model, params: Params, x: Float[Array, "B Q D"]) -> Int32[Array, "B Q"]:
    return jnp.argmax(model.logits(params, x), axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _score(
    model: Model, params: Params, x: Float[Array, "B Q D"], targets: Int32[Array, "B Q"]
) -> Float32[Array, "B Q 2"]:
    """The log-probability of each target, and 1 if it is the likeliest token (of equals, the one of the lowest id).

    The vocabulary is split as in `cross_entropy`: chunk c has the tokens c, c + chunks, c + 2 chunks ...
    """
    head = model.head(params)
    chunks = vocabulary_chunks(tokens_per_device(targets.size, ("batch",)), len(head.embedding))
    parts = head.parts(chunks)

    def step(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, Head]) -> tuple[tuple[jax.Array, ...], None]:
        highest, likeliest, total, at_target = carry
        index, part = chunk
        logits = part.logits(x)
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


def part_of(batch: Batch, start: int, size: int) -> tuple[dict[str, np.ndarray], int]:
    """`size` sequences from `start` on, and how many of them are not padding, which repeats the last sequence."""
    total = len(batch["tokens"])
    indices = np.minimum(np.arange(start, start + size), total - 1)
    return {name: array[indices] for name, array in batch.items()}, min(size, total - start)

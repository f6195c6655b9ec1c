"""The search for the hypothesis that explains a runtime's logits, on the weights of the checkpoint.

A hypothesis explains them if, at every position of every batch, its logits differ from the runtime's by no more than
rounding. One batch at which it fails refutes it, so that each is first tried on the shortest one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.checkpoints.audit.faults import hypotheses
from pe_lab.checkpoints.audit.hypotheses import AuditedModel, ChannelOrder, Computation, Hypothesis, KeysOfAnother
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.families import leaf_paths
from pe_lab.checkpoints.families.tensors import block_leaf, leaf_shapes
from pe_lab.checkpoints.parity import PER_POSITION, RELATIVE
from pe_lab.checkpoints.source import nested
from pe_lab.errors import CheckpointError, UserError
from pe_lab.model import Model, Params
from pe_lab.model.layer_pass import Stream, advance, begin, forward_model
from pe_lab.model.shape import layer_heads
from pe_lab.positional import NoPE, Schedule, build_schedule

KEPT_BYTES = 2**27  # of logits that are kept for hypotheses that are asked for again
NEAREST = 3  # faults of some layers that are followed; hypotheses to each of which a second one is added
GAIN = 0.95  # a layer is added to those of a fault if it leaves at most this part of the error
# What a hypothesis may leave of the config's error: at most the first, and so little as the second is rounding, which
# grows in a model whose layers do not get what they were trained for.
RELATED, CLEAR = 0.9, 1e-4
# Numbers of 16 bits or fewer: of the first token's error, which no fault of positions changes, others may have so much
# more, but for a part of them; and beyond the last number the first token's error is no rounding.
NOISE, STRAY, MOST_NOISE = 4.0, 0.05, 0.1


class Batch(NamedTuple):
    """Tokens, and where they stand.

    Attributes:
      length: of the whole sequence, of which these tokens may be the beginning.
      at: the tokens whose logits are compared, in ascending order; None: all.
    """

    tokens: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, " T"]
    length: int
    at: Int[np.ndarray, " P"] | None = None

    @property
    def compared(self) -> Int[np.ndarray, " P"]:
        """The tokens whose logits are compared."""
        return np.arange(len(self.positions)) if self.at is None else self.at


class Rounding(NamedTuple):
    """What rounding may make of an error.

    Attributes:
      tolerance: as a part of the largest logit, at position 0; at position n `parity.PER_POSITION` n more.
      stray: the part of the positions that may exceed it.
    """

    tolerance: float = RELATIVE
    stray: float = 0.0


class Residual(NamedTuple):
    """The difference of a hypothesis' logits and the runtime's.

    Attributes:
      tokens: [P] those that were compared.
      by_position: [P] the largest difference of a logit, as a part of the runtime's largest logit.
      allowed: [P] what rounding may make of it.
      rms: the root of the mean square, as a part of that of the runtime's logits, without the stray positions.
      stray: see `Rounding`.
    """

    tokens: Int[np.ndarray, " P"]
    by_position: Float[np.ndarray, " P"]
    allowed: Float[np.ndarray, " P"]
    rms: float
    stray: float

    @property
    def largest(self) -> float:
        """The largest difference, without the stray positions."""
        return float(np.quantile(self.by_position, 1 - self.stray, method="higher"))

    @property
    def _beyond(self) -> np.ndarray:
        return ~(self.by_position <= self.allowed)

    @property
    def explained(self) -> bool:
        return bool(self._beyond.mean() <= self.stray)

    @property
    def begins(self) -> int | None:
        """The first token at which the difference is more than rounding; None: it is not."""
        if self.explained:
            return None
        # Stray positions lie alone: of those from the beginning of an error on, most exceed what rounding does.
        share = np.cumsum(self._beyond[::-1])[::-1] / np.arange(len(self._beyond), 0, -1)
        found = np.flatnonzero(self._beyond & (share > 0.5 if self.stray else True))
        return int(self.tokens[(found if len(found) else np.flatnonzero(self._beyond))[0]])


def centred(logits: Float[Any, "B T V"]) -> Float[Array, "B T V"]:
    """Logits without the mean of each position, which changes no probability."""
    logits = jnp.asarray(logits, jnp.float32)
    return logits - logits.mean(-1, keepdims=True)


@jax.jit
def _differences(found: Float[Array, "B T V"], expected: Float[Array, "B T V"]) -> tuple[Array, ...]:
    difference = found - expected
    return jnp.abs(difference).max((0, 2)), (difference**2).mean((0, 2)), (expected**2).mean(), jnp.abs(expected).max()


def compare(
    found: Float[Array, "B P V"], expected: Float[Array, "B P V"], batch: Batch, rounding: Rounding
) -> Residual:
    """The residual of centred logits."""
    by_position, squares, whole, largest = map(np.asarray, _differences(found, expected))
    kept = np.sort(squares)[: max(1, round(len(squares) * (1 - rounding.stray)))]
    rms = float(np.sqrt(kept.mean() / max(float(whole), 1e-30)))
    allowed = rounding.tolerance + PER_POSITION * batch.positions[batch.compared]
    return Residual(batch.compared, by_position / max(float(largest), 1e-30), allowed, rms, rounding.stray)


@functools.partial(jax.jit, static_argnums=0)
def _head(model: Model, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    return centred(model.logits(params, model.output(params, x)))


class HypothesisRunner:
    """Computes the logits of hypotheses, in float32, from the first layer on in which they differ from the config.

    Attributes:
      at: what the config says.
      passes: forward passes so far; one that begins in the middle counts by its layers.
    """

    def __init__(self, checkpoint: Checkpoint, batches: Sequence[Batch]):
        self.params, self.batches = checkpoint.params, tuple(batches)
        self.at = AuditedModel(checkpoint.layers, checkpoint.model)
        self.model = forward_model(dataclasses.replace(checkpoint.model, dtype="float32"))
        self.passes = 0.0
        leaves = leaf_shapes(checkpoint.model, checkpoint.layers)
        self._layers = {path: leaf.layers for path, leaf in leaves.items() if leaf.layers is not None}
        self.hypotheses = functools.cache(lambda begins: hypotheses(dataclasses.replace(self.at, begins=begins)))
        self._keys: dict[tuple[Hypothesis | None, int], tuple[Hashable, ...]] = {}
        self._streams: dict[int, list[Stream]] = {}  # by batch: the input of every layer, and the last output
        self._kept: dict[Hashable, Array] = {}

    def keys(self, hypothesis: Hypothesis | None, batch: int) -> tuple[Hashable, ...]:
        """What each layer's computation depends on: equal keys are equal computations of a batch.

        Raises:
          UserError: the hypothesis describes what cannot be.
        """
        if (hypothesis, batch) not in self._keys:
            computation = self._computation(hypothesis, batch)
            self._keys[hypothesis, batch] = _keys(computation, self._schedule(computation))
        return self._keys[hypothesis, batch]

    def logits(self, hypothesis: Hypothesis | None, batch: int) -> Float[Array, "B P V"]:
        """Centred logits of the compared tokens of a batch under a hypothesis; None: as the config says."""
        keys, own = self.keys(hypothesis, batch), self.keys(None, batch)
        if (batch, keys) in self._kept:
            return self._kept[batch, keys]
        computation = self._computation(hypothesis, batch)
        schedule = self._schedule(computation)
        params = _reordered(self.params, self._layers, computation.orders)
        same = [one == other for one, other in zip(keys, own, strict=True)]
        start = same.index(False) if not all(same) else len(same)
        with jax.default_matmul_precision("highest"):
            stream = self._config_streams(batch)[start]
            if start == 0:  # what is added to the embeddings may differ, too
                stream = self._begin(schedule, computation, batch)
            x = self._advance(params, stream, schedule, computation, start, len(same)).x
            found = _head(self.model, params, x if (at := self.batches[batch].at) is None else x[:, at])
        self.passes += (len(same) - start) / len(same)
        if found.nbytes * (len(self._kept) + 1) <= KEPT_BYTES:
            self._kept[batch, keys] = found
        return found

    def _computation(self, hypothesis: Hypothesis | None, batch: int) -> Computation:
        of_batch = self.batches[batch]
        computation = Computation(self.at.layers, of_batch.positions, of_batch.length)
        return computation if hypothesis is None else hypothesis.edit(computation)

    def _schedule(self, computation: Computation) -> Schedule:
        config, length = self.model.config, len(computation.positions)
        # A window that all tokens fit in is none.
        layers = [
            dataclasses.replace(one, window=None) if one.window is not None and one.window >= length else one
            for one in computation.layers
        ]
        for n, own in enumerate(self.at.heads):
            source = n if own.keys_of is None else own.keys_of
            if (query := layers[n].encoding) != (key := computation.layers[source].encoding):
                apart = KeysOfAnother(query, key, computation.length)
                layers[n] = dataclasses.replace(layers[n], encoding=NoPE(), extras=(*layers[n].extras, apart))
        # Not `model_schedule`, which refuses layers with another encoding than the one whose keys they attend to.
        heads = layer_heads(config)
        schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim, computation.length, heads)
        return schedule.generalize()

    def _config_streams(self, batch: int) -> list[Stream]:
        if batch not in self._streams:
            computation = self._computation(None, batch)
            schedule = self._schedule(computation)
            streams = [self._begin(schedule, computation, batch)]
            for n in range(schedule.num_layers):
                streams.append(self._advance(self.params, streams[-1], schedule, computation, n, n + 1))
            self._streams[batch] = streams
            self.passes += 1
        return self._streams[batch]

    def _begin(self, schedule: Schedule, computation: Computation, batch: int) -> Stream:
        return begin(self.model, self.params, self.batches[batch].tokens, schedule, computation.positions[None])

    def _advance(
        self, params: Params, stream: Stream, schedule: Schedule, computation: Computation, start: int, stop: int
    ) -> Stream:
        return advance(self.model, params, stream, schedule, start, stop, positions=computation.positions[None])


def _keys(computation: Computation, schedule: Schedule) -> tuple[Hashable, ...]:
    arrays = (schedule.fixed_freq, schedule.gain, schedule.alibi_slope, schedule.logit_scale)
    positions = hashlib.sha256(computation.positions.tobytes()).digest()
    found = []
    for n, structure in enumerate(schedule.structure):
        numbers = hashlib.sha256(b"".join(np.asarray(array[n]).tobytes() for array in arrays)).digest()
        orders = tuple(order._replace(layers=()) for order in computation.orders if n in order.layers)
        embedded = schedule.embeddings if n == 0 else ()
        found.append((numbers, structure, orders, positions, embedded))
    return tuple(found)


def _reordered(params: Params, layers: Mapping[str, tuple[int, ...]], orders: Sequence[ChannelOrder]) -> Params:
    """Parameters with the channels of queries and keys in other orders; `layers`: those of each leaf."""
    if not orders:
        return params
    leaves = leaf_paths(params)
    for path, having in layers.items():
        for order in orders:
            if chosen := [having.index(n) for n in order.layers if n in having]:
                leaves[path] = order.reordered(block_leaf(path), leaves[path], np.array(chosen))
    return nested(leaves)


class Trial(NamedTuple):
    """A hypothesis, and how far its logits are from the runtime's.

    Attributes:
      hypothesis: None: what the config says.
      residual: at the first batch that refutes it, else at the last one.
      explains: no batch refutes it.
      ratio: of its error to that of the config, at that batch.
      same: other hypotheses that compute the same of these batches.
    """

    hypothesis: Hypothesis | None
    residual: Residual
    explains: bool
    ratio: float = 1.0
    same: tuple[Hypothesis, ...] = ()

    @property
    def names(self) -> set[tuple[str, ...]]:
        """The faults that it may be, each one, or several together."""
        return {one.faults for one in (self.hypothesis, *self.same) if one is not None}


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
      config: what the config says.
      ranked: the hypotheses, the best first; empty if the config explains the logits, or no hypothesis can.
      rounding: what it may make of an error.
      first: the error of the first tokens, which attend to themselves alone.
      elsewhere: that error is no rounding, and no fault of positions changes it in this model.
      passes: forward passes that it took.
    """

    config: Trial
    ranked: tuple[Trial, ...]
    rounding: Rounding
    first: float
    elsewhere: bool
    passes: float

    @property
    def sound(self) -> bool:
        return self.config.explains

    @property
    def found(self) -> Trial | None:
        """The best hypothesis that explains the logits; None: none does."""
        return self.ranked[0] if self.ranked and self.ranked[0].explains else None

    @property
    def equals(self) -> list[Trial]:
        """The other hypotheses that explain them as well."""
        return [one for one in self.ranked[1:] if one.explains]


Tell = Callable[[int, int, str], None]  # hypotheses tried, hypotheses to try, the one under way


class Search:
    """The search for the hypothesis that explains the logits of a runtime.

    Args:
      runner: has the weights and the batches, the one that hypotheses are tried on first.
      logits: what the runtime computed of each batch.
      tolerance: what rounding may be, as in `Rounding`. None: that of float32; or what the error of the first tokens
        shows, if the runtime is not `exact`.
      exact: the runtime computes in float32.
      tell: called with the progress.
    """

    def __init__(
        self,
        runner: HypothesisRunner,
        logits: Sequence[Float[Any, "B T V"]],
        tolerance: float | None = None,
        exact: bool = True,
        tell: Tell = lambda done, total, name: None,
    ):
        self.runner, self.tell = runner, tell
        vocabulary = runner.model.config.vocab_size
        for one in logits:
            if one.shape[-1] < vocabulary:
                raise CheckpointError(
                    f"The runtime has logits of {one.shape[-1]:,} tokens, and the model a vocabulary of {vocabulary:,}."
                )
        self.logits = [centred(one[..., :vocabulary]) for one in logits]  # some converters pad the vocabulary
        self.every = range(len(runner.batches))
        self.rounding = Rounding(RELATIVE if tolerance is None else tolerance)
        control = [batch for batch in self.every if runner.batches[batch].compared[0] == 0]
        self.first = max((float(self._residual(None, batch).by_position[0]) for batch in control), default=0.0)
        if tolerance is None and not exact and RELATIVE < self.first <= MOST_NOISE:
            self.rounding = Rounding(NOISE * self.first, STRAY)
        self.own = [self._residual(None, batch) for batch in self.every]
        self.elsewhere = self.first > self.rounding.tolerance and not runner.at.first_token_moves
        self.failing = next((batch for batch in self.every if not self.own[batch].explained), None)
        self.hypotheses = runner.hypotheses(max(residual.begins or 0 for residual in self.own))
        self.tried: dict[Hashable, Trial] = {}

    def run(self) -> Audit:
        """The verdict; hypotheses are only tried where the config does not explain the logits, and one of them may."""
        before = self.runner.passes
        worst = max(self.every, key=lambda batch: self.own[batch].largest)
        shown = worst if self.failing is None else self.failing
        if self.failing is not None and not self.elsewhere:
            for stage in (lambda: self._try(self.hypotheses), self._some_layers, self._pairs):
                stage()
                if any(one.explains for one in self.tried.values()):
                    break
        ranked = sorted(self.tried.values(), key=lambda one: (not one.explains, one.ratio))
        config = Trial(None, self.own[shown], self.failing is None)
        passes = self.runner.passes - before + len(self.every)
        return Audit(config, tuple(ranked), self.rounding, self.first, self.elsewhere, passes)

    def _residual(self, hypothesis: Hypothesis | None, batch: int) -> Residual:
        found = self.runner.logits(hypothesis, batch)
        return compare(found, self.logits[batch], self.runner.batches[batch], self.rounding)

    def _try(self, hypotheses: Iterable[Hypothesis]) -> None:
        different: dict[Hashable, list[Hypothesis]] = {}
        for hypothesis in hypotheses:
            if (key := self._key(hypothesis)) is not None and key not in self.tried:
                different.setdefault(key, []).append(hypothesis)
        for done, (key, (hypothesis, *same)) in enumerate(different.items()):
            self.tell(done, len(different), " and ".join(hypothesis.faults))
            self.tried[key] = self._trial(hypothesis)._replace(same=tuple(same))

    def _key(self, hypothesis: Hypothesis) -> Hashable:
        """What a hypothesis computes of all batches; None: what the config says, or what cannot be."""
        try:
            key = tuple(self.runner.keys(hypothesis, batch) for batch in self.every)
        except UserError:
            return None
        return None if key == tuple(self.runner.keys(None, batch) for batch in self.every) else key

    def _trial(self, hypothesis: Hypothesis) -> Trial:
        for batch in self.every:
            residual, own = self._residual(hypothesis, batch), self.own[batch]
            ratio = residual.rms / max(own.rms, 1e-30)
            explains = residual.explained if own.explained else ratio <= (RELATED if residual.explained else CLEAR)
            if not explains:
                break
        return Trial(hypothesis, residual, explains, ratio)

    def _error(self, hypothesis: Hypothesis) -> float:
        """At the first batch that the config does not explain."""
        return self._residual(hypothesis, self.failing).rms

    def _some_layers(self) -> None:
        """Faults of some layers: the layer that explains most, then the best one beside it, while the error falls."""
        faults, singles = [one for one in self.hypotheses if one.some], []
        for done, whole in enumerate(faults):
            self.tell(done, len(faults), f"{whole.faults[0]}, layer by layer")
            singles.append({n: self._error(whole.some([n])) for n in whole.layers})
        nearest = sorted(range(len(faults)), key=lambda i: min(singles[i].values()))[:NEAREST]
        for i in nearest:
            self._grow(faults[i], singles[i])
            if any(one.explains for one in self.tried.values()):
                return

    def _grow(self, whole: Hypothesis, errors: dict[int, float]) -> None:
        chosen, error = [], self.own[self.failing].rms
        while errors:
            best = min(errors, key=errors.__getitem__)
            if errors[best] > GAIN * error:
                return
            chosen, error = [*chosen, best], errors[best]
            hypothesis = whole.some(chosen)
            trial = self.tried[self._key(hypothesis)] = self._trial(hypothesis)
            if trial.explains and not self.rounding.stray:  # else one more may explain it better
                return
            self.tell(len(chosen), len(whole.layers), whole.faults[0])
            errors = {n: self._error(whole.some([*chosen, n])) for n in whole.layers if n not in chosen}

    def _pairs(self) -> None:
        """Each of the nearest hypotheses with each other one of another fault."""
        nearest = sorted(self.tried.values(), key=lambda one: one.ratio)[:NEAREST]
        near = [one.hypothesis for one in nearest if one.ratio < GAIN]
        self._try([one.then(other) for one in near for other in self.hypotheses if other.faults != one.faults])

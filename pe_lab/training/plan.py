"""A run before it is opened: its phases, models, mesh and memory. `plan_run` is arithmetic alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import is_external, open_source
from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import Config, ModelConfig, PhaseConfig, ProlongedConfig, StabilityConfig, check_bounds, check_name
from pe_lab.data.needles import NeedleOptions, place_symbols
from pe_lab.data.shards import METADATA_FILE, read_metadata
from pe_lab.data.tokenizers import load_tokenizer, training_size
from pe_lab.errors import ConfigError, UserError, within
from pe_lab.model import Flops, Model, Params, complete, least_parameters, model_schedule, train_flops_per_token
from pe_lab.model.distillation import learns
from pe_lab.model.encoding_check import require_causal
from pe_lab.model.learned import split_layers
from pe_lab.model.shape import layer_weights, stacked_blocks, stacks
from pe_lab.parallel import AxisRules, balanced_order, check_batch, check_memory, make_mesh, use_mesh
from pe_lab.parallel.topology import GIB, Chip, chip_of
from pe_lab.positional import Layer, Schedule, layers
from pe_lab.positional.codec import ranges_by
from pe_lab.storage import AnyPath, is_file
from pe_lab.training.muon import newton_schulz_bytes, newton_schulz_flops
from pe_lab.training.optimizer import OptimizerNumbers, last_at_peak, learning_rate, make_optimizer
from pe_lab.training.stability import skip_policy
from pe_lab.training.step import TrainState, init_state, make_shardings


class Given(NamedTuple):
    """What a plan needs of files."""

    vocab_size: int  # of the data
    layers: Mapping[int, Sequence[Layer]] = {}  # of checkpoints that can be read, by the index of the phase they start


@dataclass(frozen=True)
class PhasePlan:
    """A phase with its index in the run, its layers, and their schedule."""

    index: int
    config: PhaseConfig
    layers: tuple[Layer, ...]
    schedule: Schedule
    qk_norm: str  # the phase's own, or the previous one

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def where(self) -> str:
        """Its place in the config, for messages."""
        return f"config.phases[{self.index}] ('{self.name}')"

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length


@dataclass(frozen=True)
class RunPlan:
    """A run by arithmetic alone: nothing is read, written or computed on a device."""

    config: Config
    given: Given
    phases: tuple[PhasePlan, ...]
    models: tuple[Model, ...]  # one for each phase; they differ in their QK-norm at most
    mesh: Mesh  # its devices may be placeholders
    rules: AxisRules
    policy: StabilityConfig | None  # which updates a step does not apply; None: it applies all

    def optimizer(self, phase: PhasePlan, numbers: OptimizerNumbers | None = None) -> optax.GradientTransformation:
        """The optimizer of a phase; with `numbers`, of one step."""
        model, config = self.models[phase.index], phase.config
        own = (config.prolonged, model.encoding_settings, model.config, numbers)
        return make_optimizer(config.optimizer, config.steps, model.axes, *own)

    def learning_rate(self, phase: PhasePlan) -> optax.Schedule:
        """The learning rate of a phase by step, from 0."""
        return learning_rate(phase.config.optimizer, phase.config.steps, phase.config.prolonged)

    def attention(self, phase: PhasePlan) -> str:
        """The attention of a phase, such as `chunked on layers 0-23`; `UserError` if the config's cannot compute it."""
        model, structure, config = self.models[phase.index], phase.schedule.structure, phase.config
        with use_mesh(self.mesh, self.rules):
            chosen = model.attention_by_layer(
                structure, config.sequence_length, self.config.data.segments, config.batch_size // config.accumulate
            )
        return ", ".join(f"{name} on layers {where}" for name, where in ranges_by(chosen).items())

    def context(self, phase: PhasePlan) -> str:
        """How attention crosses the context axis, such as `ulysses on layers 0-23 (...)`; "" without such an axis."""
        model, structure = self.models[phase.index], phase.schedule.structure
        with use_mesh(self.mesh, self.rules):
            asked = [model.attention_request(one, phase.config.sequence_length) for one in structure]
        found = [one.context for one in asked if one.context is not None]
        where = ", ".join(f"{name} on layers {at}" for name, at in ranges_by([one.name for one in found]).items())
        return f"{where} ({'; '.join(dict.fromkeys(one.reason for one in found))})" if found else ""

    def flops(self, phase: PhasePlan) -> Flops:
        """FLOPs of a phase's model per token, without those of a teacher."""
        config, structure = self.models[phase.index].config, phase.schedule.structure
        return train_flops_per_token(config, phase.config.sequence_length, structure)

    def newton_schulz(self, phase: PhasePlan) -> float:
        """FLOPs a step of Muon's iteration; 0 of AdamW."""
        model, optimizer = self.models[phase.index], phase.config.optimizer
        return newton_schulz_flops(optimizer.muon, model.shapes, model.axes) if optimizer.name == "muon" else 0.0

    def memory(self, phase: PhasePlan) -> Estimate:
        """The memory of one chip during a train step of a phase."""
        model = self.models[phase.index]
        estimate = _estimator(model, phase.config, self.config.data.segments, self.mesh, self.rules)
        return estimate(model.config, phase.config)


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def plan_run(config: Config, mesh: Mesh, given: Given, chip: Chip, must_fit: bool = False) -> RunPlan:
    """The plan of a run on the devices of a mesh, which need not exist: a function of its arguments alone.

    Settings "auto" are chosen by the memory and the speed of the chip; `must_fit`: it is an error that nothing fits.

    Raises:
      UserError: the config would not train: its shapes, encodings, mesh or batch sizes do not fit each other.
    """
    _check_retention(config)
    rules, segments = AxisRules(context_attention=config.mesh.context_attention), config.data.segments
    vocab_size = vocabulary(config, given.vocab_size)
    known: dict[Any, Model] = {}  # phases with the same QK-norm, settings and learned encodings share a model
    phases, models = [], []
    for phase in plan_phases(config, given.layers):
        asked = phase.config
        check_batch(asked.batch_size, 1 if asked.accumulate == "auto" else asked.accumulate, mesh, phase.where)
        shape = dataclasses.replace(config.model, vocab_size=vocab_size, qk_norm=phase.qk_norm)
        shape, accumulate = _choose_settings(shape, phase, segments, mesh, rules, chip, must_fit)
        phase = dataclasses.replace(phase, config=dataclasses.replace(asked, accumulate=accumulate))
        phases.append(phase)
        hooks = phase.schedule.hooks
        if (shape, hooks) not in known:
            known[shape, hooks] = Model(shape, hooks=hooks)
        models.append(known[shape, hooks])
    plan = RunPlan(config, given, tuple(phases), tuple(models), mesh, rules, skip_policy(config.stability))
    for phase, model in zip(phases, models, strict=True):
        parameter_shardings(model, mesh, rules)
        with within(f"{phase.where}.sequence_length"):
            balanced_order(phase.config.sequence_length, mesh.shape["context"])
        require_causal(phase.layers)
    return plan


def plan_phases(config: Config, given: Mapping[int, Sequence[Layer]] | None = None) -> tuple[PhasePlan, ...]:
    """Resolves every phase; a `UserError` names one with a wrong key.

    Edits (`drop(...)`, `rescale(...)`) and an unset `qk_norm` refer to the phase or the checkpoint that a phase
    starts from, whose layers are in `given`.
    """
    names = [phase.name for phase in config.phases]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"config.phases: each phase needs a name of its own; they are {names}.")
    for what, name in [("config.name", config.name), *((f"config.phases[{i}].name", n) for i, n in enumerate(names))]:
        check_name(what, name)
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1))
    plans: list[PhasePlan] = []
    for i, phase in enumerate(config.phases):
        with within(f"config.phases[{i}] ('{phase.name}')"):
            if phase.random_positions and phase.random_positions < phase.sequence_length:
                raise ConfigError(
                    f"random_positions is {phase.random_positions}; {phase.sequence_length} different positions are "
                    "drawn below it, so it must be at least that (or 0: positions 0, 1, 2, ...)."
                )
            continues = plans[-1] if plans and not phase.init_from else None
            before = continues.layers if continues else (given or {}).get(i)
            described = layers(phase.positional, model.layers, before)
            schedule = model_schedule(model, described, phase.sequence_length)
            if not phase.epochs:  # whose steps the data tell
                learning_rate(phase.optimizer, phase.steps, phase.prolonged)
            qk_norm = phase.qk_norm or (continues.qk_norm if continues else model.qk_norm)
            complete(dataclasses.replace(model, qk_norm=qk_norm))
        plans.append(PhasePlan(i, phase, described, schedule, qk_norm))
    return tuple(plans)


def vocabulary(config: Config, needed: int) -> int:
    """The size of the model's vocabulary: the config's, or else `needed`, rounded up to a multiple of 128.

    Raises:
      ConfigError: the config's is smaller than `needed`, or neither is known (0).
    """
    given = config.model.vocab_size
    if given == needed == 0:
        raise ConfigError(
            "The size of the vocabulary is not known, since data.tokenizer is 'none': set config.model.vocab_size."
        )
    if given == 0:
        return -(-needed // 128) * 128
    if given < needed:
        raise ConfigError(
            f"config.model.vocab_size is {given}, but the data has {needed} tokens; set it to at least that, or 0."
        )
    return given


def least_memory(config: Config, phase: PhaseConfig) -> tuple[int, int]:
    """Parameters of a phase, and the bytes that it needs on all devices together; at least so many of both.

    These are the parameters and the two moments of AdamW, in float32, of which Muon has one for its matrices, and one
    hidden state of a micro-batch. The vocabulary is left out where the config has none.
    """
    model = complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1))
    tokens = phase.batch_size * phase.sequence_length
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    parameters = least_parameters(model)
    moments = parameters + (embeddings if phase.optimizer.name == "muon" else parameters)
    parts = phase.batch_size if phase.accumulate == "auto" else phase.accumulate
    hidden = 2 * model.d_model * tokens // parts
    return parameters, 4 * (parameters + moments) + hidden + 12 * tokens


def _check_retention(config: Config) -> None:
    """`ConfigError` for a metric that no checkpoint is chosen by."""
    saved = config.checkpoint
    if saved.best and saved.best not in ("loss", "grad_norm") and not saved.best.startswith("validation_loss"):
        raise ConfigError(
            f"config.checkpoint.best is '{saved.best}'; it must be loss, validation_loss or validation_loss/SOURCE."
        )
    if saved.best.startswith("validation_loss") and saved.every_steps % config.log.validate_every_steps:
        raise ConfigError(
            f"config.checkpoint.best is '{saved.best}', which is measured every {config.log.validate_every_steps} "
            f"steps, and checkpoints are saved every {saved.every_steps}: make checkpoint.every_steps a multiple of "
            "log.validate_every_steps."
        )


# ---------------------------------------------------------------------------------------------------------------------
# On this machine, and what is read of files


def plan_here(config: Config, devices: Sequence[Any] | None = None) -> RunPlan:
    """The plan of a run on all devices of all processes, or on `devices`; `UserError` also if they are too small."""
    check_bounds(config, "config")
    mesh = make_mesh(config.mesh, devices)
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    for i, phase in enumerate(config.phases):
        parameters, needed = least_memory(config, phase)
        tokens = phase.batch_size * phase.sequence_length
        what = f"config.phases[{i}] ('{phase.name}'): training {parameters:,} parameters on {tokens:,} tokens a step"
        check_memory(int(needed * len(here) / mesh.size), what, here)
    return plan_run(config, mesh, read_given(config), chip_of(mesh.devices.flat[0]), must_fit=True)


def read_given(config: Config) -> Given:
    """What a plan needs of files; `UserError` if one is damaged, or missing where it alone tells the vocabulary."""
    layers = given_layers(config)
    if config.model.vocab_size:
        return Given(config.model.vocab_size, layers)
    data = config.data
    needles = [NeedleOptions.from_mapping(s.options) for s in data.sources if s.source == "needles"]
    size = training_size(data.tokenizer)
    try:
        if prepared := prepared_directories(config):
            size = read_metadata(prepared[0]).vocab_size
        elif data.prepared:
            size = read_metadata(storage.path("data.prepared", data.prepared)).vocab_size
        elif size is None:
            size = load_tokenizer(data.tokenizer).vocab_size
    except UserError as error:
        raise type(error)(f"The tokenizer determines the vocabulary. {error} Or set model.vocab_size.") from None
    return Given(place_symbols(dict(enumerate(needles)), size)[1], layers)


def given_layers(config: Config) -> dict[int, tuple[Layer, ...]]:
    """The layers of the checkpoints that phases start from, by the index of the phase; those that are there."""
    found = {}
    for i, phase in enumerate(config.phases):
        with within(f"config.phases[{i}] ('{phase.name}')"):
            if phase.init_from not in ("", "random") and (
                is_external(phase.init_from) or start_path(phase).is_dir()
            ):  # else it is missing, which training says
                found[i] = open_source(phase.init_from).layers
    return found


def start_path(phase: PhaseConfig) -> AnyPath:
    """The path of the checkpoint of pe_lab that a phase starts from."""
    return storage.path(f"init_from of phase '{phase.name}'", phase.init_from)


def prepared_directories(config: Config) -> list[AnyPath]:
    """The prepared directories of a config's text; [] if some text is not prepared, or is not here."""
    data = config.data
    text = [source.source for source in data.sources if source.source != "needles"]
    text = [f"prepared:{data.prepared}"] if data.prepared else text
    found = [storage.path("data", name.removeprefix("prepared:")) for name in text if name.startswith("prepared:")]
    return found if len(found) == len(text) and all(is_file(path / METADATA_FILE) for path in found) else []


# ---------------------------------------------------------------------------------------------------------------------
# More steps


def prolong(config: Config, steps: int, kept: Sequence[int]) -> Config:
    """The config with `steps` steps in its last phase, whose checkpoints are of the steps `kept`, ascending.

    Raises:
      ConfigError: the schedule cannot go on that way; see `optimizer.on_prolong`.
    """
    phase = config.phases[-1]
    if steps == phase.steps:
        return config
    if steps < phase.steps:
        raise ConfigError(
            f"--until={steps}: phase '{phase.name}' has {phase.steps} steps, and --until is their new number in all. "
            f"Give more than {phase.steps}."
        )
    how = phase.optimizer.on_prolong
    if how == "auto":
        how = "rewarm" if phase.optimizer.schedule == "cosine" else "stretch"
    try:
        at = _last_useful(phase, kept) if how == "stretch" else phase.steps
        prolonged = (*phase.prolonged, ProlongedConfig(phase.steps, at, how))
        learning_rate(phase.optimizer, steps, prolonged)
    except ConfigError as error:
        raise ConfigError(f"--until={steps}: phase '{phase.name}': {error}") from None
    longer = dataclasses.replace(phase, steps=steps, prolonged=prolonged)
    return dataclasses.replace(config, phases=(*config.phases[:-1], longer))


def _last_useful(phase: PhaseConfig, kept: Sequence[int]) -> int:
    """The step of the last checkpoint that a stretched schedule can go on from; 0 if nothing was trained yet."""
    kept = [step for step in kept if step]
    if not kept or phase.optimizer.schedule != "wsd":
        return max(kept, default=0)
    limit = last_at_peak(phase.optimizer, phase.steps, phase.prolonged)
    before = [step for step in kept if step <= limit]
    if not before:
        raise ConfigError(
            f"optimizer.on_prolong is 'stretch', and the rate of wsd began to decay after step {limit}: the run would "
            f"go on from a checkpoint before that, and the kept ones are of steps {', '.join(map(str, kept))}. Choose "
            "optimizer.on_prolong=rewarm or hold; next time, checkpoint.milestones keeps such a step."
        )
    return before[-1]


# ---------------------------------------------------------------------------------------------------------------------
# The memory of one chip


@dataclass(frozen=True)
class Estimate:
    """Bytes per chip. State and batch are exact; the rest is approximate."""

    parameters: int
    optimizer: int
    batch: int
    activations: int  # kept from the forward pass for the backward pass
    working: int  # the larger of the loss, and of the gradients with one layer's backward pass or Muon's iteration

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def step_shapes(
    model: Model, optimizer: optax.GradientTransformation, phase: PhaseConfig, segments: bool
) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The state and the batch of a phase as shapes and dtypes, to trace a step without data."""
    state = jax.eval_shape(lambda params: init_state(model, optimizer, params), model.shapes)
    shape = (phase.batch_size, phase.sequence_length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if segments:
        dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
    return state, {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def _estimator(
    model: Model, phase: PhaseConfig, segments: bool, mesh: Mesh, rules: AxisRules
) -> Callable[[ModelConfig, PhaseConfig], Estimate]:
    """A function of configs that differ from the given ones at most in `remat`, `loss_chunks` and `accumulate`."""
    # The state has one shape, whatever the learning rate; steps that follow from epochs may not be known yet.
    constant = dataclasses.replace(phase.optimizer, schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(constant, phase.steps, model.axes, learned=model.encoding_settings)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state, batch = step_shapes(model, optimizer, phase, segments)

    def bytes_of(shapes: Any, shardings: Any) -> int:
        def of(x: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(of, shapes, shardings)))

    parameters = bytes_of(state.params, shardings.state.params)
    moments = bytes_of(state.optimizer, shardings.state.optimizer)
    inputs = bytes_of(batch, dict.fromkeys(batch, shardings.batch))
    of_teacher = 0  # of each token
    if learns(phase.distill):  # a teacher of the same shape, and what it computes
        kept = model.config.layers if phase.distill.hidden or phase.distill.attention else 1
        of_teacher = kept * 2 * model.config.d_model * np.dtype(model.config.dtype).itemsize
        inputs += parameters
    iteration = 0
    if phase.optimizer.name == "muon":
        iteration = newton_schulz_bytes(phase.optimizer.muon, model.shapes, model.axes, mesh.size)

    def estimate(config: ModelConfig, phase: PhaseConfig) -> Estimate:
        activations, layer, loss = _activations(config, model.shapes, phase, mesh)
        gradients = parameters * (2 if phase.accumulate > 1 else 1)
        # The update begins where the backward pass has ended, and what it kept is free.
        update = max(0, iteration - activations)
        working = max(gradients + max(layer, update), loss)
        return Estimate(parameters, moments, inputs + of_teacher * _tokens(phase, mesh), activations, working)

    return estimate


def _tokens(phase: PhaseConfig, mesh: Mesh) -> int:
    """The tokens of a micro-batch on one chip."""
    sequences = phase.batch_size // phase.accumulate // (mesh.shape["data"] * mesh.shape["fsdp"])
    return sequences * phase.sequence_length // mesh.shape["context"]


def _activations(config: ModelConfig, shapes: Params, phase: PhaseConfig, mesh: Mesh) -> tuple[int, int, int]:
    """Bytes per chip: kept for the backward pass, of the backward pass of one layer, and of the loss."""
    tensor, tokens = mesh.shape["tensor"], _tokens(phase, mesh)
    length, width = phase.sequence_length, np.dtype(config.dtype).itemsize

    whole = length <= config.attention_chunk if config.attention == "auto" else config.attention != "chunked"
    kept, layer = 0, 0
    of_stacks = stacks(config)
    for stack, leaves in zip(of_stacks, stacked_blocks(split_layers(shapes["layers"])[0], of_stacks), strict=True):
        # Bytes per token and layer. `qkv`: queries, keys and values after their projections.
        one = stack.config
        heads = one.heads // tensor
        kv_heads = one.kv_heads // tensor if one.kv_heads % tensor == 0 else one.kv_heads
        qkv = (heads + 2 * kv_heads) * one.head_dim
        mlp_in = (2 if one.gated_mlp else 1) * (one.d_ff // tensor)  # gate and up, or up alone
        everything = width * (4 * one.d_model + 2 * qkv + heads * one.head_dim + mlp_in + one.d_ff // tensor)
        if whole:
            weights, block = heads * length * width, heads * length * 4
        else:
            weights, block = 0, heads * min(one.attention_chunk, length) ** 2 // length * 4
        dots = width * (2 * one.d_model + qkv + mlp_in)  # the input, and the products whose results are needed
        of_layer = {
            "none": everything + weights,
            "dots_attention": dots + heads * (one.head_dim * width + 4),
            "dots": dots,
            "dots_offload": width * one.d_model,
            "full": width * one.d_model,
        }[one.remat]
        kept += len(stack.layers) * tokens * (of_layer + width * one.per_layer_input)
        # One layer: what the gradients of its two branches need at once, and its weights gathered over fsdp.
        gathered = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(leaves)) // tensor
        needed = tokens * (width * (6 * one.d_model + 2 * qkv + 2 * mlp_in) + 2 * (weights + block)) + gathered * width
        layer = max(layer, needed)
    # One chunk of logits and of their gradient; the gathered unembedding and its gradient; hidden states.
    vocabulary = config.vocab_size // tensor
    logits = -(-tokens // config.loss_chunks) * vocabulary * (4 + width)
    loss = logits + vocabulary * config.d_model * (width + 4) + 2 * tokens * config.d_model * width
    return kept, layer, loss


# ---------------------------------------------------------------------------------------------------------------------
# Settings "auto"

MARGIN = 0.92  # of a chip's memory that an estimate may need


def _choose_settings(
    config: ModelConfig, plan: PhasePlan, segments: bool, mesh: Mesh, rules: AxisRules, chip: Chip, must_fit: bool
) -> tuple[ModelConfig, int]:
    """The config and `accumulate` with values for "auto": those of the fastest step that fits by the estimate.

    If nothing fits, a `ConfigError` where it `must_fit`, else what needs the least memory.
    """
    phase = plan.config
    asked = {"remat": config.remat, "loss_chunks": config.loss_chunks, "accumulate": phase.accumulate}
    free = [name for name, value in asked.items() if value == "auto"]
    options = list(_options(complete(config), phase, mesh, chip))
    if free:
        estimate = _estimator(Model(options[0][0], hooks=plan.schedule.hooks), options[0][1], segments, mesh, rules)
        needed = [estimate(*option) for option in options]
        fitting = [i for i, one in enumerate(needed) if not chip.memory or one.total <= MARGIN * chip.memory]
        smallest = min(range(len(options)), key=lambda i: needed[i].total)
        if must_fit and not fitting:
            raise ConfigError(
                f"phase '{phase.name}': with any {' and '.join(free)}, a step needs at least about "
                f"{needed[smallest].total / GIB:.1f} GiB of {chip.memory / GIB:.4g} GiB a chip. "
                "pe_lab.plan names the settings with which it would fit."
            )
        weights = needed[0].parameters
        seconds = {i: _extra_seconds(*options[i], weights, mesh, chip) for i in fitting or [smallest]}
        options = [options[min(seconds, key=seconds.__getitem__)]]
    ((chosen, phase),) = options
    return chosen, phase.accumulate


# "none" is not among them: it also keeps every elementwise result, and reading those takes longer than computing them.
_REMATS = ("dots_attention", "dots", "full")


def _options(
    config: ModelConfig, phase: PhaseConfig, mesh: Mesh, chip: Chip
) -> Iterator[tuple[ModelConfig, PhaseConfig]]:
    """Every choice of what is "auto"; the layers are unrolled on GPUs, unless they are computed again."""
    sequences = phase.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    parts = [n for n in range(1, sequences + 1) if sequences % n == 0]
    for accumulate in parts if phase.accumulate == "auto" else [phase.accumulate]:
        divided = dataclasses.replace(phase, accumulate=accumulate)
        tokens = _tokens(divided, mesh)
        chunks = [2**n for n in range(8) if 2**n <= tokens] if config.loss_chunks == "auto" else [config.loss_chunks]
        for remat, count in itertools.product(_REMATS if config.remat == "auto" else (config.remat,), chunks):
            # XLA copies what a scan keeps into arrays of all layers, and initializes these.
            scanned = remat == "full" or not chip.name.startswith("NVIDIA")
            scan = scanned if config.scan == "auto" else config.scan
            yield dataclasses.replace(config, remat=remat, loss_chunks=count, scan=scan), divided


def _extra_seconds(config: ModelConfig, phase: PhaseConfig, weights: int, mesh: Mesh, chip: Chip) -> float:
    """The time of a step that a choice adds, at the chip's peaks: recomputed products, sums written to memory, and
    weights gathered and gradients reduced again. `weights`: bytes of a chip's part of the parameters, in float32."""
    peak, bandwidth = chip.peak or 1e12, chip.bandwidth or 1e11
    tokens, tensor, length = _tokens(phase, mesh), mesh.shape["tensor"], phase.sequence_length
    D, again = config.d_model, 0
    for stack in stacks(config):
        attention = 2 * stack.config.heads * stack.config.head_dim * length  # two products, each with half of the keys
        products = 2 * layer_weights(stack)
        of_layer = {"full": attention + products, "dots": attention, "dots_offload": attention}.get(config.remat, 0)
        again += len(stack.layers) * of_layer
    moved = 8 * D * config.vocab_size * config.loss_chunks  # the float32 sum of the gradient, read and written
    product = 2 * tokens * D * config.vocab_size / peak
    # Among choices that cost nothing, fewer chunks: a tenth of what they would cost if nothing else took time.
    adding = max(0.0, moved / bandwidth - product) + 0.1 * moved / bandwidth
    of_micro_batch = (tokens * again / peak + adding) / tensor
    # As if nothing was sent beside computation: fewer micro-batches where the others gain little.
    width, fsdp, data = np.dtype(config.dtype).itemsize / 4, mesh.shape["fsdp"], mesh.shape["data"]
    sent = width * weights * (3 * (fsdp - 1) + 2 * (data - 1) / data)
    repeated = sent / (chip.ici or 1e10) + 3 * weights / bandwidth
    return phase.accumulate * of_micro_batch + (phase.accumulate - 1) * repeated

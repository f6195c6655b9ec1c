"""Surgery: child checkpoints with other encodings, and another QK-norm with constants that keep the logits closest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab import storage
from pe_lab.attention import LayerEncoding
from pe_lab.attention.hooks import encode, hook_inputs
from pe_lab.attention.key_block import AttentionInputs
from pe_lab.attention.reference import visible
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.locating import DIRECTORY, lineage_entry
from pe_lab.checkpoints.store import Store, metadata_of
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model, Params
from pe_lab.model.decoder import layer_arrays
from pe_lab.model.layer_pass import embed
from pe_lab.model.learned import init_encoding, learned_encodings, learned_of_layer, split_layers
from pe_lab.model.shape import require_one_shape, sizes_for
from pe_lab.positional import Layer, LayerHooks, LayerStructure, Schedule, label, layer_hooks, rotate
from pe_lab.positional.codec import ranges
from pe_lab.positional.hooks import acts_in_layers, parameter_settings
from pe_lab.positional.registry import registered_name
from pe_lab.storage import AnyPath, new_directory

NOTHING = "nothing changed"

# Fields of a model that change neither the shapes nor the meaning of its weights.
FREE_FIELDS = (
    *("init_std", "mup_base_width", "mup_base_head_dim"),
    *("dtype", "remat", "scan", "attention", "attention_chunk", "loss_chunks"),
)


def check_same_shape(parent: ModelConfig, child: ModelConfig, where: str, change_qk_norm: bool = False) -> None:
    """`ConfigError` with each field that must be equal to take over weights; surgery may change the QK-norm."""
    free = (*FREE_FIELDS, *(["qk_norm"] if change_qk_norm else []))
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in free]
    differ = [name for name in names if getattr(parent, name) != getattr(child, name)]
    if differ:
        advice = " To add or remove a QK-norm, set the phase's own qk_norm." if "qk_norm" in differ else ""
        listed = ", ".join(f"{name} {getattr(parent, name)} -> {getattr(child, name)}" for name in differ)
        raise ConfigError(
            f"{where} is a model of another shape: {listed}. Leave these fields of config.model out, and they are "
            f"the checkpoint's; or start from another checkpoint.{advice}"
        )


def change(before: Sequence[Layer], after: Sequence[Layer]) -> str:
    """A description of an edit of the encodings, such as `rope(base=10000) -> nope on layers 0-23`."""
    runs: list[tuple[str, list[int]]] = []
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        text = f"{label(old)} -> {label(new)}"
        if runs and runs[-1][0] == text and runs[-1][1][-1] == n - 1:
            runs[-1][1].append(n)
        else:
            runs.append((text, [n]))
    return "; ".join(f"{text} on layer{'s' * (len(at) > 1)} {ranges(at)}" for text, at in runs) or NOTHING


def carried(
    params: Params,
    before: Sequence[tuple[LayerHooks, ...]],
    after: Sequence[tuple[LayerHooks, ...]],
    config: ModelConfig,
    seed: int = 0,
    shardings: Any = None,
) -> tuple[Params, str]:
    """The parameters of a child whose layers have other encodings than its parent's.

    A layer keeps the parameters of an encoding that it had, by its registered name, if they have the same shapes; those
    of an encoding that is new to it are initialized, and those that no layer has any more are left out.

    Args:
      params: of the parent.
      before, after: the hooks of every layer of both.
      config: of both, completed.
      seed: of the initial parameters.
      shardings: of the child's parameters; None: where the compiler puts them.

    Returns:
      the child's parameters, and what was done in words; "" for nothing.
    """
    learns = learned_encodings(after)
    if learned_encodings(before) == learns:
        return params, ""
    settings = {name: parameter_settings(one, sizes_for(config, one, layers)) for name, (one, layers) in learns.items()}
    old = split_layers(params["layers"])[1]
    places = {key: layers for key, (_, layers) in learned_encodings(before).items()}

    def former(n: int, name: str) -> tuple[str, int] | None:
        """The key and the place of the parent's parameters of layer n of an encoding with the same name and shapes.

        What is added to the embeddings has them on any layer.
        """
        encoding, _ = learns[name]
        wanted = {field: one.value.shape for field, one in settings[name].items()}
        for m in [n] if acts_in_layers(encoding) else range(len(before)):
            for one, key, _ in before[m]:
                same = key is not None and registered_name(one) == registered_name(encoding)
                if same and {field: leaf.shape[1:] for field, leaf in old[key].items()} == wanted:
                    return key, places[key].index(m)
        return None

    kept = {name: [former(n, name) for n in layers] for name, (_, layers) in learns.items()}

    def child(params: Params) -> Params:
        blocks, old = split_layers(params["layers"])
        learned = {}
        for name, (encoding, layers) in learns.items():
            new = init_encoding(
                name, encoding, layers, jax.random.key(seed), sizes_for(config, encoding, layers), len(after)
            )
            for i, source in enumerate(kept[name]):
                if source is not None:
                    key, at = source
                    new = jax.tree.map(lambda a, b, i=i, at=at: a.at[i].set(b[at]), new, old[key])
            learned[name] = new
        return {**params, "layers": {**blocks, **({"positional": learned} if learned else {})}}

    found = jax.jit(child, out_shardings=shardings)(params)
    words = []
    for name, (_, layers) in learns.items():
        if fresh := [n for n, source in zip(layers, kept[name], strict=True) if source is None]:
            words.append(f"parameters of {name} initialized on layers {ranges(fresh)}")
    dropped = set(places) - {source[0] for sources in kept.values() for source in sources if source is not None}
    words += [f"those of {name} left out" for name in sorted(dropped)]
    return found, "; ".join(words)


def carried_parameters(parent: Checkpoint, layers: Sequence[Layer]) -> tuple[Params, str]:
    """The parent's parameters for these layers (see `carried`), and what was done in words."""
    config = parent.model
    before, after = (layer_hooks(one, config.heads) for one in (parent.layers, layers))
    return carried(parent.params, before, after, Model(config).config)


def with_layers(checkpoint: Checkpoint, layers: tuple[Layer, ...]) -> Checkpoint:
    """The checkpoint with the parameters that these layers need; itself if it has them."""
    params, _ = carried_parameters(checkpoint, layers)
    return checkpoint if params is checkpoint.params else dataclasses.replace(checkpoint, params=params, layers=layers)


def write_child(
    parent: Checkpoint,
    layers: tuple[Layer, ...],
    directory: str | AnyPath,
    what: str,
    save_tokenizer: Callable[[Path], None] | None = None,
) -> AnyPath:
    """Writes a child of `parent` with other encodings, and returns its path.

    The path is `directory/checkpoints/0`, a phase's first checkpoint. The directory appears whole, or not at all. Of
    two processes that write one the first to finish wins. `save_tokenizer` writes the tokenizer to a directory.

    Raises:
      ConfigError: the directory exists and is not empty, or it cannot be written.
    """
    directory = storage.path("--to", directory)
    metadata = {
        k: parent.metadata[k]
        for k in ("run", "config", "config_hash", "mixture", "tokenizer", "vocab_size", "training_length", "versions")
        if k in parent.metadata
    }
    where = directory / DIRECTORY / "0"
    entry = lineage_entry(what, str(where), 0)
    metadata |= {
        "id": entry["id"],
        "phase": directory.name,
        "phase_index": 0,
        "step": 0,
        "tokens": parent.metadata.get("tokens", 0),
        "lineage": [*parent.metadata["lineage"], entry],
    }
    params, learned = carried_parameters(parent, layers)
    entry["what"] = "; ".join(filter(None, [what, learned]))
    with new_directory(directory) as building:
        store = Store(building / DIRECTORY)
        try:
            store.save(0, params, None, metadata_of(parent.model, layers, **metadata))
            store.wait()
        finally:
            store.close()
        if save_tokenizer is not None:
            save_tokenizer(building / "tokenizer")
    return where


# ---------------------------------------------------------------------------------------------------------------------
# QK-norm

Batch = Mapping[str, Any]  # tokens, targets, weights [B, T]; segments and positions where documents are masked


@dataclass(frozen=True)
class QKNormChange:
    """The effect of a change of QK-norm: losses in nats per token, before and after, on the same tokens."""

    before: str
    after: str
    loss_before: float
    loss_after: float
    tokens: int
    error: float  # root of the summed squared differences of the logits over their summed squares, all layers

    def __str__(self) -> str:
        return (
            f"QK-norm {self.before} -> {self.after}: loss {self.loss_before:.4f} -> {self.loss_after:.4f} on "
            f"{self.tokens:,} tokens, logits off by {100 * self.error:.0f}%"
        )


def change_qk_norm(
    config: ModelConfig,
    params: Params,
    kind: str,
    schedule: Schedule,
    batch: Batch,
    shardings: tuple[Any, Any] = (None, None),
    init: Literal["matched", "ones"] = "matched",
) -> tuple[ModelConfig, Params, QKNormChange]:
    """The model with another `qk_norm`.

    A norm divides queries and keys by their size, which differs between tokens; a constant cannot restore it. With
    `init` "matched" the constant is the least-squares fit over the visible logits of `batch`, with each layer's input
    as before: one constant per layer where heads share a scale (head, query_head), otherwise one per query head. Its
    square root multiplies the scales of queries and of keys. Without a new norm, the old scale and the constant
    multiply the projections. With "ones" all scales of the new norm are 1, as in DroPE's code.

    Args:
      kind: the new `qk_norm`.
      schedule: the encodings of the child.
      batch: held-out tokens for the fit and for the losses.
      shardings: for a mesh: of the new model's parameters, and of replicated arrays.

    Raises:
      ConfigError: the model has this QK-norm already, or `init` is "ones" without a norm.
      UnsupportedError: its layers differ in shape.
    """
    if kind == config.qk_norm:
        raise ConfigError(f"The model's qk_norm is '{kind}' already; there is nothing to change.")
    if init == "ones" and kind == "none":
        raise ConfigError("qk_norm_init is ones, and no QK-norm is added. Leave it out, or add a QK-norm.")
    require_one_shape(config, "A change of the QK-norm")
    hooks = schedule.hooks
    before, after = Model(config, hooks=hooks), Model(dataclasses.replace(config, qk_norm=kind), hooks=hooks)
    placed, replicated = shardings
    bare = jax.jit(functools.partial(_with_norms_of, before, after, init), out_shardings=placed)(params)
    sums = np.stack(_logit_sums(before, params, after, bare, schedule, batch, replicated))  # [N, H, 3]
    shared = kind in ("head", "query_head")
    per_head = np.broadcast_to(sums.sum(1, keepdims=True), sums.shape) if shared else sums
    constants = np.ones(sums.shape[:2])
    fitted = (per_head[..., 1] > 0) & (init == "matched")  # a head whose logits are all zero keeps constant 1
    np.divide(per_head[..., 1], per_head[..., 2], out=constants, where=fitted)  # <old, new> / <new, new>
    scaled = jax.jit(functools.partial(_scaled, after), out_shardings=placed)(bare, jnp.asarray(constants))
    squared = sums[..., 0] - 2 * constants * sums[..., 1] + constants**2 * sums[..., 2]
    change = QKNormChange(
        before=config.qk_norm,
        after=kind,
        loss_before=_mean_loss(before, params, schedule, batch, replicated),
        loss_after=_mean_loss(after, scaled, schedule, batch, replicated),
        tokens=int(np.prod(batch["tokens"].shape)),
        error=float(np.sqrt(max(squared.sum(), 0) / sums[..., 0].sum())),
    )
    return after.config, scaled, change


def _with_norms_of(before: Model, after: Model, init: str, params: Params) -> Params:
    """`params` with the norms of `after`. "matched" keeps a learned scale, in the new norm or in the projections."""
    attention = dict(params["layers"]["attention"])
    for side, axis in (("query", before.config.heads), ("key", before.config.kv_heads)):
        norm = attention.pop(f"{side}_norm", None)
        shape = after.shapes["layers"]["attention"].get(f"{side}_norm")
        if norm is not None:
            scale = norm["scale"] + _offset(before.config)
            scale = scale if scale.ndim == 3 else scale[:, None]  # [N, heads or 1, K]
            scale = jnp.broadcast_to(scale, (scale.shape[0], axis, scale.shape[2]))
        if shape is None:
            if norm is not None:
                attention = _multiplied(attention, side, scale)
        elif norm is None or init == "ones":
            ones = jnp.ones(shape["scale"].shape, jnp.float32)
            attention[f"{side}_norm"] = {"scale": ones - _offset(after.config)}
        else:
            flat = len(shape["scale"].shape) == 3
            attention[f"{side}_norm"] = {"scale": (scale if flat else scale.mean(1)) - _offset(after.config)}
    return {**params, "layers": {**params["layers"], "attention": attention}}


def _offset(config: ModelConfig) -> float:
    """What a QK-norm adds to its stored scale (Gemma 3)."""
    return 1.0 if config.norm == "rms_plus_one" and config.qk_norm != "layer_heads" else 0.0


def _multiplied(attention: Params, side: str, scale: Float[Array, "N heads K"]) -> Params:
    """Projection weights and bias of queries or keys, times a scale per head and channel."""
    attention = {**attention, side: attention[side] * scale[:, None]}
    if f"{side}_bias" in attention:
        attention[f"{side}_bias"] = attention[f"{side}_bias"] * scale
    return attention


def _scaled(after: Model, params: Params, constants: Float[Array, "N H"]) -> Params:
    """Parameters whose logits are multiplied by a constant per layer and query head."""
    attention, config = dict(params["layers"]["attention"]), after.config
    groups = constants.reshape(constants.shape[0], config.kv_heads, -1)
    both = config.qk_norm in ("none", "head", "flat", "layer_heads")
    keys = jnp.sqrt(groups.mean(-1)) if both else jnp.ones(groups.shape[:2])
    queries = (groups / keys[..., None]).reshape(constants.shape)
    for side, factor in (("query", queries), ("key", keys))[: 1 + both]:
        norm = attention.get(f"{side}_norm")
        if norm is None:
            attention = _multiplied(attention, side, factor[..., None].astype(jnp.float32))
        else:
            # Heads that share a scale have the same constant.
            per = factor[..., None] if norm["scale"].ndim == 3 else factor[:, :1]
            one = _offset(config)
            attention[f"{side}_norm"] = {"scale": ((norm["scale"] + one) * per - one).astype(jnp.float32)}
    return {**params, "layers": {**params["layers"], "attention": attention}}


def _logit_sums(
    before: Model, params: Params, after: Model, changed: Params, schedule: Schedule, batch: Batch, replicated: Any
) -> list[np.ndarray]:
    """Per layer, [H, 3]: sums over visible logits of old * old, old * new and new * new."""
    positions = batch.get("positions")
    if positions is None:
        positions = jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)[None]
    segments = batch.get("segments")

    @functools.partial(jax.jit, static_argnums=0, out_shardings=(None, replicated))
    def layer(
        structure: LayerStructure,
        x: jax.Array,
        old: Params,
        new: Params,
        arrays: tuple[jax.Array, ...],
        learned: dict[str, Params],
    ) -> tuple[jax.Array, jax.Array]:
        encoding = before.layer_encoding(arrays, structure, positions, learned=learned)
        block = before.block(old)
        read = block.attention_input(x)
        inputs, _ = hook_inputs(encoding.hooks, read, segments=segments)
        pairs = [
            encode(encoding.hooks, *b.attention.queries_keys_values(read)[:2], positions, inputs)
            for b in (block, after.block(new))
        ]
        sums = _compare_logits(*pairs, encoding, segments, structure.window)
        return block(x, encoding, positions, segments, structure.window)[0], sums

    schedule = jax.tree.map(jnp.asarray, schedule)
    x, found = embed(before, params, batch["tokens"], schedule, positions), []
    for n, structure in enumerate(schedule.structure):
        old, new = (split_layers(one["layers"])[0] for one in (params, changed))
        at = jax.tree.map(lambda a, n=n: a[n], (old, new, layer_arrays(schedule)))
        x, sums = layer(structure, x, *at, learned_of_layer(params["layers"], schedule.structure, n))
        found.append(np.asarray(sums, np.float64))
    return found


def _compare_logits(
    old: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    encoding: LayerEncoding,
    segments: jax.Array | None,
    window: int | None,
) -> Float[Array, "H 3"]:
    """See `_logit_sums`; one head at a time, so that the largest array is [B, T, T]."""
    T, H = old[0].shape[1:3]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    seen = visible(distance, AttentionInputs(query_segments=segments, key_segments=segments, window=window))

    def encoded(x: jax.Array) -> jax.Array:
        """Queries or keys, rotated, float32, [H, B, T, K]."""
        x = jnp.repeat(x.astype(jnp.float32), H // x.shape[2], axis=2)
        if encoding.cos is not None and encoding.sin is not None:
            cos, sin = (jnp.repeat(table, H // table.shape[2], axis=2) for table in (encoding.cos, encoding.sin))
            x = rotate(x, cos, sin)
        return jnp.moveaxis(x, 2, 0)

    def head(qk: tuple[jax.Array, ...]) -> jax.Array:
        a, b = (jnp.where(seen, jnp.einsum("btk,bsk->bts", q, k), 0.0) for q, k in (qk[:2], qk[2:]))
        return jnp.stack([(a * a).sum(), (a * b).sum(), (b * b).sum()])

    return jax.lax.map(head, tuple(encoded(x) for x in (*old, *new)))


def _mean_loss(model: Model, params: Params, schedule: Schedule, batch: Batch, replicated: Any) -> float:
    """The weighted mean loss in nats per token."""

    @functools.partial(jax.jit, out_shardings=replicated)
    def loss(params: Params, batch: Batch, schedule: Schedule) -> jax.Array:
        weights = batch["weights"]
        return (model.token_loss(params, batch, schedule) * weights).sum() / weights.sum()

    return float(loss(params, dict(batch), schedule))

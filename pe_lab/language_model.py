"""The loaded model: weights with a positional encoding, which can be replaced without copying the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from pe_lab.attention.dispatch import choose
from pe_lab.attention.layer_encoding import encode_keys, encode_queries
from pe_lab.attention.statistics import ArrayLike, attention_rows, checked_indices
from pe_lab.checkpoints.checkpoint import Checkpoint, how_to_fit, open_checkpoint, read_logit_scale
from pe_lab.checkpoints.surgery import change, with_layers, write_child
from pe_lab.config import ModelConfig
from pe_lab.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, save_tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.model import (
    Decoder,
    DecodingWeights,
    ForwardPasses,
    GenerationRequest,
    GenerationStatistics,
    Model,
    Sampling,
    Schedules,
    complete,
    model_schedule,
)
from pe_lab.model.layer_pass import LayerView, Measure, checked_layers, forward_model, hook_encoded, layer_pass
from pe_lab.model.learned import split_layers
from pe_lab.model.shape import require_equal_heads
from pe_lab.parallel import AxisRules, hide_absent_tpu, use_mesh
from pe_lab.positional import (
    Beta,
    HeadEdit,
    Layer,
    LayerStructure,
    Schedule,
    Uniform,
    describe,
    drop,
    import_encodings,
    label_layers,
    read_with,
)
from pe_lab.positional.codec import parse
from pe_lab.storage import AnyPath

Tokens = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array
Prompt = Any  # a string, token ids [n], or several of either with any lengths


_compiled = functools.cache(ForwardPasses)
_decoder = functools.cache(Decoder)
_weights: dict[int, DecodingWeights] = {}  # in the form that decoding reads, by the id of a checkpoint that is alive


def _weights_of(checkpoint: Checkpoint, decoder: Decoder) -> DecodingWeights:
    if id(checkpoint) not in _weights:
        _weights[id(checkpoint)] = decoder.prepare(checkpoint.params)
        weakref.finalize(checkpoint, _weights.pop, id(checkpoint), None)
    return _weights[id(checkpoint)]


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


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """Weights with the positional encoding of every layer. Immutable: `with_positional` returns another model on the
    same weights.

    Attributes:
      checkpoint: the weights and their metadata.
      layers: the encoding of each layer; the schedule is built from it.
      tokenizer: None if the checkpoint came without one.
      schedule_length: tokens; see `at_length`.
    """

    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    tokenizer: Tokenizer | None = None
    schedule_length: int | None = None

    def __repr__(self) -> str:
        config = self.config
        count = Model(config, hooks=self.schedule.hooks).num_parameters
        return (
            f"LanguageModel('{self.checkpoint.path}', step {self.checkpoint.step}, "
            f"{count:,} parameters, {config.layers} layers, {config.heads} heads on "
            f"{config.kv_heads} of {config.head_dim} channels, {label_layers(self.layers)}, "
            f"trained on {self.training_length:,} tokens)"
        )

    def _repr_html_(self) -> str:
        return f"<b>{html.escape(repr(self))}</b><pre>{html.escape(self.describe())}</pre>"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The arrays of `layers`, generalized: encodings that fit one structure share one compilation."""
        return self.build(self.layers, self.schedule_length)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the weights are sharded over; None if one device holds them all."""
        sharding = getattr(self.checkpoint.params["token_embedder"]["embedding"], "sharding", None)
        return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None

    @property
    def devices(self) -> int:
        """How many devices hold the weights."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def training_length(self) -> int:
        """Tokens of a training sequence."""
        return int(self.checkpoint.metadata["training_length"])

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        """Token ids of a string, with the special tokens in it recognized and the tokenizer's prefix (BOS) added.

        Raises:
          DataError: the checkpoint came without a tokenizer.
        """
        if self.tokenizer is None:
            raise DataError(f"'{self.checkpoint.path}' came without a tokenizer; pass token ids instead of text.")
        return np.asarray(self.tokenizer.encode_prompt(text), np.int32)

    def sequences(self, tokens: Tokens) -> Int[np.ndarray, "B T"]:
        try:
            ids = self.encode(tokens) if isinstance(tokens, str) else np.asarray(tokens)
        except ValueError as error:  # sequences of different lengths
            raise DataError(f"tokens are no array of ids: {error}") from None
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"tokens are of type {ids.dtype}; ids are whole numbers.")
        if ids.ndim not in (1, 2) or ids.size == 0:
            raise DataError(f"tokens have shape {ids.shape}; give a string, [T] or [B, T] ids, at least one.")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise DataError(
                f"tokens range from {ids.min()} to {ids.max()}; the vocabulary has {self.config.vocab_size}."
            )
        return np.atleast_2d(ids).astype(np.int32)

    def logits(self, tokens: Tokens) -> Float[Array, "B T V"]:
        """Next-token logits, float32, of a string, of ids [T] (a batch of one) or of ids [B, T]."""
        ids = self.sequences(tokens)
        schedule = self.schedule_for(ids.shape[1])
        return _compiled(self.whole_pass_config()).apply(self.checkpoint.params, ids, None, None, schedule)

    def loss_by_position(self, tokens: Tokens) -> Float[np.ndarray, "B targets"]:
        """The negative log-likelihood of each token after the first, given the tokens before it; nats."""
        ids = self.sequences(tokens)
        if ids.shape[1] < 2:
            raise DataError("loss_by_position needs at least two tokens: the first one is not predicted.")
        batch = {"tokens": jnp.asarray(ids[:, :-1]), "targets": jnp.asarray(ids[:, 1:])}
        schedule = self.schedule_for(ids.shape[1] - 1)
        return np.asarray(_compiled(self.whole_pass_config()).token_loss(self.checkpoint.params, batch, schedule))

    def whole_pass_config(self) -> ModelConfig:
        """The config for a pass over whole sequences: XLA shards it, and cannot shard a kernel."""
        named = self.config.attention != "auto" or self.mesh is None
        return self.config if named else dataclasses.replace(self.config, attention="chunked")

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        eos_ids: Collection[int] | None = None,
        cache_length: int | None = None,
        refresh: int = 1,
        text: bool | None = None,
        statistics: GenerationStatistics | None = None,
    ) -> Any:
        """Continues one prompt or several. Each token is the one that `logits` of the whole sequence would give.

        Args:
          prompt: a string, several strings, token ids, or several sequences of ids, of any lengths.
          max_new_tokens: per prompt; generation ends earlier at an end-of-text token or a stop string.
          temperature, top_k, top_p, seed: as in `model.Sampling`. The default takes the likeliest token.
          stop: strings that end a continuation, and are not part of it.
          eos_ids: tokens that end a continuation; by default the tokenizer's.
          cache_length: the largest number of tokens of a prompt and its continuation; by default as many as needed.
          refresh: for encodings that depend on the length, see `model.GenerationRequest`; 1 is exact, 0 is fast.
          text: whether strings or ids are returned. None: what was given.
          statistics: counts and seconds are added to it.

        Returns:
          The continuation: a string for a string, an array of ids for ids, a list of them for several prompts.

        Raises:
          UserError: an empty prompt, ids outside the vocabulary, a setting out of range, a prompt longer than
            `cache_length`, or strings without a tokenizer.
        """
        prompts, several, as_text = self._prompts(prompt)
        as_text = as_text if text is None else text
        if as_text and self.tokenizer is None:
            raise DataError(f"'{self.checkpoint.path}' came without a tokenizer; ids cannot be decoded.")
        request = self._request(max_new_tokens, temperature, top_k, top_p, seed, stop, eos_ids, cache_length, refresh)
        decode = self.tokenizer.decode if self.tokenizer is not None and (as_text or request.stop) else None
        decoder = _decoder(self.config, self.mesh)
        weights = _weights_of(self.checkpoint, decoder)
        ended = decoder.generate(weights, prompts, self._schedules(), request, decode, statistics)
        results = [ending.text if as_text else ending.result() for ending in ended]
        return results if several else results[0]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        statistics: GenerationStatistics | None = None,
        **settings: Any,
    ) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces; arguments, `settings` too, and errors as in `generate`.

        A piece is yielded as soon as it is final: it ends with a whole character and cannot become a stop string.
        """
        prompts, several, _ = self._prompts(prompt)
        if several:
            raise ConfigError("stream continues one prompt; use generate for several.")
        if self.tokenizer is None:
            raise DataError(f"'{self.checkpoint.path}' came without a tokenizer; use generate with token ids.")
        request = self._request(max_new_tokens, **settings)
        decoder = _decoder(self.config, self.mesh)
        decoder.check(prompts, request, self.tokenizer.decode)
        weights = _weights_of(self.checkpoint, decoder)
        return decoder.stream(weights, prompts[0], self._schedules(), request, self.tokenizer.decode, statistics)

    def _prompts(self, prompt: Prompt) -> tuple[list[Int[np.ndarray, " n"]], bool, bool]:
        """The prompts as ids, whether there are several, and whether they were strings."""
        if isinstance(prompt, str):
            return [self.encode(prompt)], False, True
        if not isinstance(prompt, np.ndarray | jax.Array) and not (isinstance(prompt, Sequence) and len(prompt)):
            raise DataError(f"The prompt is {prompt!r}; give a string, token ids, or several of either.")
        if isinstance(prompt[0], str):
            if not all(isinstance(one, str) for one in prompt):
                raise DataError("Some prompts are strings and some are not; give all as strings, or all as token ids.")
            return [self.encode(one) for one in prompt], True, True
        several = np.ndim(prompt[0]) == 1
        sequences = [np.asarray(one) for one in (prompt if several else [prompt])]
        for ids in sequences:
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise DataError(f"Token ids are sequences of whole numbers, not {ids.dtype} of shape {ids.shape}.")
        # Ids beyond int32 are outside any vocabulary, and remain so when they are clipped.
        return [np.clip(ids, -1, 2**31 - 1).astype(np.int32) for ids in sequences], several, False

    def _request(
        self,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        eos_ids: Collection[int] | None = None,
        cache_length: int | None = None,
        refresh: int = 1,
    ) -> GenerationRequest:
        eos_ids = self.eos_ids if eos_ids is None else eos_ids
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        return GenerationRequest(max_new_tokens, sampling, eos_ids, stop, cache_length, refresh)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a continuation: the tokenizer's."""
        known = self.tokenizer
        return frozenset() if known is None else frozenset((known.eos_id, *getattr(known, "stop_ids", ())))

    def _schedules(self) -> Schedules:
        if self.schedule_length is not None:
            return Schedules.fixed(self.schedule)
        return Schedules(self.schedule_for, tuple(layer.follows_length for layer in self.layers))

    @property
    def compilations(self) -> int:
        """How often forward passes of this model shape were compiled in this process."""
        return _compiled(self.whole_pass_config()).traces

    def schedule_for(self, length: int) -> Schedule:
        """The schedule for sequences of `length` tokens."""
        if self.schedule_length is not None or not any(layer.follows_length for layer in self.layers):
            return self.schedule
        return self.build(self.layers, length)

    def build(self, described: Sequence[Layer], length: int | None = None) -> Schedule:
        """The schedule of `described` for sequences of `length` tokens, in the structure this model is compiled for."""
        config = self.config
        schedule = model_schedule(config, described, length)
        return schedule.generalize()

    def with_attention(self, name: str) -> LanguageModel:
        """The same model with an attention implementation that `python -m pe_lab.attention` lists.

        Raises:
          UserError: no such implementation, or one that does not run here or cannot attend to a KV cache.
        """
        config = self.config
        choose(name, Model(config).attention_request(LayerStructure(), length=1, partial=True))
        checkpoint = dataclasses.replace(self.checkpoint, model=dataclasses.replace(config, attention=name))
        return dataclasses.replace(self, checkpoint=checkpoint)

    def with_positional(self, description: Any, logit_scale: float | Beta | None = None) -> LanguageModel:
        """The same weights under another encoding.

        Args:
          description: as in `positional.read_with`: an encoding, a layer, a string, one per layer, or an edit. An
            encoding with parameters that the weights do not have begins with its initial ones.
          logit_scale: DroPE's beta on every layer: a number, or `Beta(...)`, which depends on the length.
        """
        described = read_with(description, self.layers, self.training_length)
        if logit_scale is not None:
            described = tuple(dataclasses.replace(layer, logit_scale=logit_scale) for layer in described)
        return dataclasses.replace(self, checkpoint=with_layers(self.checkpoint, described), layers=described)

    def with_fitted_scale(self) -> LanguageModel:
        """The same weights with the logit scale that `pe_lab.evaluate --suite=beta` fitted and stored beside them."""
        scale = read_logit_scale(self.checkpoint)
        if scale is None:
            raise CheckpointError(f"with_fitted_scale(): {how_to_fit(self.checkpoint)}")
        return self.with_positional(self.layers, logit_scale=scale)

    def at_length(self, length: int) -> LanguageModel:
        """The same model with the schedule of sequences of `length` tokens, whatever the length of its input.

        Dynamic NTK, dynamic YaRN, LongRoPE and `Beta` then have the factor of that length from the first token on, and
        generation never recomputes the KV cache. Other encodings do not change.
        """
        return dataclasses.replace(self, schedule_length=length)

    def drop_positional(self, chosen: Sequence[int] | None = None, extras: bool = False) -> LanguageModel:
        """The same weights without positional encoding on all or the chosen layers (DroPE's drop, not recalibrated).

        What a layer has beside its encoding (`rope/with=t5`) stays, unless `extras` drops it too.
        """
        return self.with_positional(drop(chosen, extras))

    def describe(self) -> str:
        """The schedule as a table, and the learned values of its encodings as another."""
        return describe(self.schedule, self.layers, split_layers(self.checkpoint.params["layers"])[1])

    def save(self, directory: str | AnyPath) -> AnyPath:
        """Writes a child checkpoint into a new directory and returns its path; `init_from` can name it."""
        tokenizer = self.tokenizer
        if tokenizer is None and self.checkpoint.tokenizer:
            tokenizer = load_tokenizer(self.checkpoint.tokenizer)
        saved = None if tokenizer is None else functools.partial(save_tokenizer, tokenizer)
        return write_child(self.checkpoint, self.layers, directory, change(self.checkpoint.layers, self.layers), saved)

    # What happens inside. Tokens are a string, ids [T] (a batch of one) or ids [B, T].

    def attention_weights(
        self,
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

    def hidden_states(self, tokens: Tokens, layers: Sequence[int] | None = None) -> Float[np.ndarray, "L B T D"]:
        """The residual stream at the input of each chosen layer, in the compute dtype. Layer 0 reads the embeddings.

        Raises:
          UserError: a layer that does not exist.
        """
        return np.stack(self.layer_pass(self.sequences(tokens), _input, layers))

    def queries_keys_values(
        self, tokens: Tokens, layers: Sequence[int] | None = None, rotated: bool = False
    ) -> QueriesKeysValues:
        """Queries, keys and values of each chosen layer, after projection and QK-norm.

        Args:
          rotated: whether queries and keys have their positional encoding (rotation, or DoPE's noise) already.

        Raises:
          UserError: a layer that does not exist.
        """
        chosen = checked_layers(self.config.layers, layers)
        require_equal_heads(self.config, chosen, "An array of queries and keys")
        found = self.layer_pass(self.sequences(tokens), _rotated if rotated else _unrotated, layers)
        query, key, value = zip(*found, strict=True)
        heads = max(k.shape[2] for k in key)
        same = [np.repeat(k, heads // k.shape[2], axis=2) for k in key]
        return QueriesKeysValues(np.stack(query), np.stack(same), np.stack(value))

    def with_heads(self, layer: int, heads: Sequence[int], to: Any) -> LanguageModel:
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

    def initialized(self, seed: int) -> LanguageModel:
        """The same shape and encodings with random weights, those that training starts from with this seed."""
        checkpoint = self.checkpoint
        params = jax.jit(Model(checkpoint.model, hooks=self.schedule.hooks).init)(jax.random.key(seed))
        metadata = {**checkpoint.metadata, "id": f"init-{seed}-{checkpoint.metadata['id']}", "lineage": []}
        return dataclasses.replace(
            self, checkpoint=dataclasses.replace(checkpoint, params=params, metadata=metadata, step=0)
        )

    def layer_pass(
        self,
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


def load(
    path: str | AnyPath, *, dtype: str | None = None, mesh: Mesh | None = None, encodings: Any = None
) -> LanguageModel:
    """Opens a checkpoint: a run (its last phase), a phase or one step; a Hugging Face directory; a GGUF file.

    Args:
      path: the path; `hf:ORG/NAME` is fetched from the hub.
      dtype: the compute dtype, float32 or bfloat16. None: float32 on a CPU, few of which have 16-bit arithmetic;
        elsewhere the config's, and bfloat16 for external checkpoints.
      mesh: the devices that hold the weights; None is the first device.
      encodings: a module, or its path or name, that registers encodings of the checkpoint.

    Raises:
      CheckpointError: no checkpoint there, a damaged one, or one that pe_lab cannot read.
    """
    hide_absent_tpu()
    import_encodings(encodings)
    checkpoint = open_checkpoint(path, mesh=mesh)
    if dtype is None:
        accelerated = "bfloat16" if checkpoint.converted else checkpoint.model.dtype
        dtype = "float32" if jax.default_backend() == "cpu" else accelerated
    checkpoint = dataclasses.replace(checkpoint, model=complete(dataclasses.replace(checkpoint.model, dtype=dtype)))
    tokenizer = load_tokenizer(checkpoint.tokenizer) if checkpoint.tokenizer else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, checkpoint.model.vocab_size, str(path))
    return LanguageModel(checkpoint, checkpoint.layers, tokenizer)

"""A language model in the hand: weights and the positional encoding they are read with, which may be changed."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from pe_lab.attention.capabilities import Request as AttentionRequest
from pe_lab.attention.dispatch import choose
from pe_lab.checkpoints import Checkpoint, open_checkpoint
from pe_lab.checkpoints.logit_scale import how_to_fit, read_logit_scale
from pe_lab.checkpoints.surgery import change, write_child
from pe_lab.config import ModelConfig
from pe_lab.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, save_tokenizer
from pe_lab.errors import UserError
from pe_lab.model import Decoder, Model, Request, Sampling, Schedules, Statistics, Weights, complete
from pe_lab.parallel import hide_absent_tpu, platform
from pe_lab.positional import Beta, Layer, Schedule, build_schedule, describe, drop, read_with

Tokens = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array
Prompt = Any  # a text, token ids [n], or several of either, of any lengths


class _Compiled:
    """The forward passes of one model shape: one compilation serves every schedule of one structure."""

    def __init__(self, config: ModelConfig):
        self.traces = 0
        model = Model(config, backward=False)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*args: Any) -> Any:
                self.traces += 1
                return function(*args)

            return jax.jit(traced)

        self.apply, self.token_loss = counted(model.apply), counted(model.token_loss)


_compiled = functools.cache(_Compiled)
_decoder = functools.cache(Decoder)
_weights: dict[int, Weights] = {}  # by checkpoint, as decoding wants them: made once, gone with the checkpoint


def _weights_of(checkpoint: Checkpoint, decoder: Decoder) -> Weights:
    if id(checkpoint) not in _weights:
        _weights[id(checkpoint)] = decoder.prepare(checkpoint.params)
        weakref.finalize(checkpoint, _weights.pop, id(checkpoint), None)
    return _weights[id(checkpoint)]


def _mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None where one device has them all."""
    sharding = getattr(params["token_embedder"]["embedding"], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


@dataclass(frozen=True)
class LanguageModel:
    """Weights with a schedule. Nothing changes in place: `with_positional` gives another one on the same weights."""

    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    schedule: Schedule
    tokenizer: Tokenizer | None = None
    general: Mapping[str, Any] = field(default_factory=dict)  # what `Schedule.generalize` is told, see `for_any_scheme`
    schedule_length: int | None = None  # tokens; see `at_length`

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model

    @property
    def devices(self) -> int:
        """How many the weights lie on."""
        mesh = _mesh_of(self.checkpoint.params)
        return 1 if mesh is None else mesh.size

    @property
    def training_length(self) -> int:
        """Tokens per window in training."""
        return int(self.checkpoint.metadata["training_length"])

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        """Token ids of a text as the model expects to read it: special tokens in it are recognized, and what the
        tokenizer puts at the beginning is put there. `UserError` where the checkpoint came without its tokenizer."""
        if self.tokenizer is None:
            raise UserError(f"'{self.checkpoint.path}' came without a tokenizer; pass token ids instead of text.")
        return np.asarray(self.tokenizer.encode_prompt(text), np.int32)

    def _rows(self, tokens: Tokens) -> Int[np.ndarray, "B T"]:
        try:
            ids = self.encode(tokens) if isinstance(tokens, str) else np.asarray(tokens)
        except ValueError as error:  # rows of different lengths
            raise UserError(f"tokens are no array of ids: {error}") from None
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"tokens are of type {ids.dtype}; ids are whole numbers.")
        if ids.ndim not in (1, 2) or ids.size == 0:
            raise UserError(f"tokens have shape {ids.shape}; give a text, [T] or [B, T] ids, at least one.")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise UserError(
                f"tokens range from {ids.min()} to {ids.max()}; the vocabulary has {self.config.vocab_size}."
            )
        return np.atleast_2d(ids).astype(np.int32)

    def logits(self, tokens: Tokens) -> Float[Array, "B T V"]:
        """Next-token logits, float32, of a text, of ids [T] (a batch of one), or of [B, T]."""
        rows = self._rows(tokens)
        schedule = self._schedule_for(rows.shape[1])
        return _compiled(self._at_once()).apply(self.checkpoint.params, rows, None, None, schedule)

    def loss_by_position(self, tokens: Tokens) -> Float[np.ndarray, "B targets"]:
        """Nats paid for each token but the first, given those before it."""
        rows = self._rows(tokens)
        if rows.shape[1] < 2:
            raise UserError("loss_by_position needs at least two tokens: the first one is given.")
        batch = {"tokens": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])}
        schedule = self._schedule_for(rows.shape[1] - 1)
        return np.asarray(_compiled(self._at_once()).token_loss(self.checkpoint.params, batch, schedule))

    def _at_once(self) -> ModelConfig:
        """The shape for a whole pass. Over several devices XLA cuts it as it likes, which kernels do not bear."""
        named = self.config.attention != "auto" or _mesh_of(self.checkpoint.params) is None
        return self.config if named else dataclasses.replace(self.config, attention="chunked")

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        eos_ids: Collection[int] | None = None,
        cache_length: int | None = None,
        refresh: int = 1,
        text: bool | None = None,
        statistics: Statistics | None = None,
    ) -> Any:
        """Continues a prompt, or several at once. Cached decoding: each token is what `logits` of the text would give.

        Args:
          prompt: a text, several texts, token ids, or several rows of ids, of any lengths.
          max_new_tokens: per prompt; a text ends earlier at its end-of-text token or at a stop string.
          temperature, top_k, top_p, seed: as in `model.Sampling`. By default the likeliest token is taken.
          stop: strings that end a text. They are not part of what is returned.
          eos_ids: tokens that end a text; by default the tokenizer's.
          cache_length: most tokens of prompt and continuation; by default as many as are needed.
          refresh: for encodings that follow the length, see `model.Request`; 1 is exact, 0 is fast.
          text: whether texts are returned, or ids. None: what was given.
          statistics: counts and seconds are added to it.

        Returns:
          The continuation: a text for a text, an array of ids for ids, a list of them for several.

        Raises:
          UserError: an empty prompt, ids outside the vocabulary, a setting out of its range, a prompt longer than
            `cache_length`, text without a tokenizer.
        """
        prompts, several, as_text = self._prompts(prompt)
        as_text = as_text if text is None else text
        if as_text and self.tokenizer is None:
            raise UserError(f"'{self.checkpoint.path}' came without a tokenizer; ids cannot be read as text.")
        request = self._request(
            max_new_tokens, temperature, top_k, top_p, stop, seed, eos_ids, cache_length, refresh
        )  # fmt: skip
        decode = self.tokenizer.decode if self.tokenizer is not None and (as_text or request.stop) else None
        decoder = _decoder(self.config, _mesh_of(self.checkpoint.params))
        weights = _weights_of(self.checkpoint, decoder)
        ended = decoder.generate(weights, prompts, self._schedules(), request, decode, statistics)
        results = [ending.text if as_text else ending.result() for ending in ended]
        return results if several else results[0]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        eos_ids: Collection[int] | None = None,
        cache_length: int | None = None,
        refresh: int = 1,
        statistics: Statistics | None = None,
    ) -> Iterator[str]:
        """The text of `generate` in pieces, each as soon as it is final: whole characters, and nothing that could
        still become a stop string. One prompt; arguments and errors as in `generate`."""
        prompts, several, _ = self._prompts(prompt)
        if several:
            raise UserError("stream continues one prompt; use generate for several.")
        if self.tokenizer is None:
            raise UserError(f"'{self.checkpoint.path}' came without a tokenizer; use generate with token ids.")
        request = self._request(
            max_new_tokens, temperature, top_k, top_p, stop, seed, eos_ids, cache_length, refresh
        )  # fmt: skip
        decoder = _decoder(self.config, _mesh_of(self.checkpoint.params))
        decoder.check(prompts, request, self.tokenizer.decode)
        weights = _weights_of(self.checkpoint, decoder)
        return decoder.stream(weights, prompts[0], self._schedules(), request, self.tokenizer.decode, statistics)

    def _prompts(self, prompt: Prompt) -> tuple[list[Int[np.ndarray, " n"]], bool, bool]:
        """Prompts as ids; whether there are several; whether they were texts."""
        if isinstance(prompt, str):
            return [self.encode(prompt)], False, True
        if not isinstance(prompt, np.ndarray | jax.Array) and not (isinstance(prompt, Sequence) and len(prompt)):
            raise UserError(f"The prompt is {prompt!r}; give a text, token ids, or several of either.")
        if isinstance(prompt[0], str):
            if not all(isinstance(one, str) for one in prompt):
                raise UserError("The prompts are texts and others; give all as texts, or all as token ids.")
            return [self.encode(one) for one in prompt], True, True
        several = np.ndim(prompt[0]) == 1
        rows = [np.asarray(one) for one in (prompt if several else [prompt])]
        for row in rows:
            if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
                raise UserError(f"Token ids are rows of whole numbers, not {row.dtype} of shape {row.shape}.")
        # What no int32 can hold is outside any vocabulary, and stays so.
        return [np.clip(row, -1, 2**31 - 1).astype(np.int32) for row in rows], several, False

    def _request(
        self,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        stop: str | Sequence[str],
        seed: int,
        eos_ids: Collection[int] | None,
        cache_length: int | None,
        refresh: int,
    ) -> Request:
        if eos_ids is None:
            known = self.tokenizer
            eos_ids = () if known is None else {known.eos_id, *getattr(known, "stop_ids", ())}
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        return Request(max_new_tokens, sampling, eos_ids, stop, cache_length, refresh)

    def _schedules(self) -> Schedules:
        if self.schedule_length is not None:
            return Schedules.fixed(self._schedule_for(self.schedule_length))
        return Schedules(self._schedule_for, tuple(layer.follows_length for layer in self.layers))

    @property
    def compilations(self) -> int:
        """How often forward passes of this shape of model have been compiled in this process."""
        return _compiled(self._at_once()).traces

    def _schedule_for(self, length: int) -> Schedule:
        """The schedule for texts of so many tokens: another one only where a layer follows the length."""
        if not any(layer.follows_length for layer in self.layers):
            return self.schedule
        return self.build(self.layers, length if self.schedule_length is None else self.schedule_length)

    def build(self, described: Sequence[Layer], length: int | None = None) -> Schedule:
        """The schedule of layers for texts of `length` tokens, in the structure that this model is compiled for."""
        config = self.config
        schedule = build_schedule(described, config.heads, config.kv_heads, config.head_dim, length)
        return schedule.generalize(**self.general)

    def for_any_scheme(self) -> LanguageModel:
        """The same model, compiled so that ALiBi and heads that differ need no compilation of their own either.

        Every layer then takes slopes and rotates keys once per query head, which costs memory where heads share keys.
        Windows, heads of noise and the notebook's encodings are still programs of their own.
        """
        general = {"heads": "split", "slopes": True}
        return dataclasses.replace(self, general=general, schedule=self.schedule.generalize(**general))

    def with_attention(self, name: str) -> LanguageModel:
        """The same weights, attending by an implementation that `python -m pe_lab.attention` lists.

        Raises:
          UserError: no such implementation, or one that does not run here or cannot read a cache.
        """
        config = self.config
        asked = AttentionRequest(head_dim=config.head_dim, dtype=config.dtype, platform=platform(), spans=True)
        choose(name, asked)
        checkpoint = dataclasses.replace(self.checkpoint, model=dataclasses.replace(config, attention=name))
        return dataclasses.replace(self, checkpoint=checkpoint)

    def with_positional(self, description: Any, logit_scale: float | Beta | None = None) -> LanguageModel:
        """The same weights under another encoding: whatever `positional.read_with` reads, edits included.

        `logit_scale` is DroPE's beta, on every layer: a number, or `Beta(...)`, which follows the length.
        """
        described = read_with(description, self.layers, self.training_length)
        if logit_scale is not None:
            described = tuple(dataclasses.replace(layer, logit_scale=logit_scale) for layer in described)
        return dataclasses.replace(self, layers=described, schedule=self.build(described))

    def with_fitted_scale(self) -> LanguageModel:
        """The same weights with the logit scale that `pe_lab.evaluate --suite=beta` fitted and kept with them."""
        scale = read_logit_scale(self.checkpoint)
        if scale is None:
            raise UserError(f"with_fitted_scale(): {how_to_fit(self.checkpoint)}")
        return self.with_positional(self.layers, logit_scale=scale)

    def at_length(self, length: int) -> LanguageModel:
        """The same model reading every text as if it had `length` tokens: what follows the length stands still.

        Dynamic NTK, dynamic YaRN, LongRoPE and `Beta` then have the factor of that length from the first token on,
        and a text is continued without being read again. Other encodings are what they were.
        """
        return dataclasses.replace(self, schedule_length=length)

    def drop_positional(self, chosen: Sequence[int] | None = None) -> LanguageModel:
        """No positional encoding on all layers, or on the chosen ones (DroPE's drop, before any recalibration)."""
        return self.with_positional(drop(chosen))

    def describe(self) -> str:
        """The schedule as a table."""
        return describe(self.schedule, self.layers)

    def save(self, directory: str | Path) -> Path:
        """Writes a child checkpoint into a new directory; training can start from it (`init_from`)."""
        what = change(self.checkpoint.layers, self.layers)
        save = None if self.tokenizer is None else functools.partial(save_tokenizer, self.tokenizer)
        return write_child(self.checkpoint, self.layers, directory, what, save_tokenizer=save)


def load(path: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> LanguageModel:
    """Opens a checkpoint: a run of ours (its last phase), a phase or one step; a Hugging Face directory; a GGUF file.

    Args:
      path: the path; `hf:ORG/NAME` comes from the hub, where it can be reached.
      dtype: to compute in, float32 or bfloat16. None is what the checkpoint's config says; on a CPU, which has no
        arithmetic of 16 bits, and for other people's checkpoints there, float32.
      mesh: where the weights go; None is the first device.

    Raises:
      UserError: no checkpoint there, a damaged one, or one that pe_lab cannot read.
    """
    hide_absent_tpu()
    checkpoint = open_checkpoint(path, mesh=mesh)
    if dtype is None:
        foreign = "bfloat16" if checkpoint.converted else checkpoint.model.dtype
        dtype = "float32" if jax.default_backend() == "cpu" else foreign
    checkpoint = dataclasses.replace(checkpoint, model=complete(dataclasses.replace(checkpoint.model, dtype=dtype)))
    tokenizer = load_tokenizer(checkpoint.tokenizer) if checkpoint.tokenizer else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, checkpoint.model.vocab_size, str(path))
    # Generalized, as `with_positional` gives it: switching encodings then compiles nothing.
    return LanguageModel(checkpoint, checkpoint.layers, checkpoint.schedule.generalize(), tokenizer)

"""The model interface of lm-evaluation-harness on a `LanguageModel`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError, UnsupportedError, UserError, did_you_mean
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.lm_eval.requests import (
    HarnessGeneration,
    Journal,
    RequestAnswers,
    Used,
    cut_context,
    generate,
    generation_batches,
    seed_of,
)
from pe_lab.evaluation.scoring.likelihood import LikelihoodBatch, Likelihoods
from pe_lab.language_model import LanguageModel, load
from pe_lab.parallel import computes_together, is_first
from pe_lab.positional import label

MAX_NEW_TOKENS = 256  # where a task names none; the same as of the harness's own models
# Settings that the harness passes to every model, and that have no effect here.
IGNORED = ("device", "max_batch_size", "trust_remote_code")
# Settings of generation that are not supported, with the values at which they change nothing.
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "use_cache": True}

log = logging.getLogger(__name__)


class Adapter:
    """The harness's requests, answered by a model. `PeLabLM` is this and the harness's `TemplateLM`.

    It answers as the harness's `HFLM` does with the same weights: it adds the tokenizer's own beginning of a text, puts
    a first token before a text without context, scores whole texts in windows, and cuts a context that is too long.
    The number of cut contexts is in the log and in the results' config.

    Args:
      pretrained: a model, or what `pe_lab.load` takes.
      batch_size: sequences at once on each device; None or "auto": as many as its memory allows.
      max_length: tokens of a context and its continuation, as a number, 8k, or 2x the training length. By default the
        training length, as HFLM takes the config's.
      max_gen_toks: new tokens where a task names none.
      positional, drop, logit_scale: another encoding, as in `LanguageModel.with_positional`.
      attention, dtype: as in `LanguageModel.with_attention` and `pe_lab.load`.
      add_bos_token: whether contexts begin with BOS, once; None: the tokenizer's own habit.
      prefix_token_id: the token before a text without context; by default BOS, or else the end of text.
      seed: of drawn tokens, where a task asks for temperature. The draws of a request depend on the seed and on its
        place among the requests: such requests are answered one by one.
      truncation: of a context that is too long: `left`, as the harness cuts it, or `middle`, which keeps its first and
        last halves.
      devices: to score on; by default `compute_devices()`.

    Attributes:
      truncated: the number of contexts that were cut so far.
      tokens: read and written so far, with those of answers that an earlier process gave.
      journal: keeps the answers; by default nowhere. A batch that was begun is answered whole.
      used: the cost by (task, document), since it was last emptied.

    Raises:
      UserError: an unknown setting, or one out of its range; a model without its tokenizer.
    """

    # `TemplateLM` has properties of these names, which these replace; values are set for each model.
    eot_token_id = prefix_token_id = max_length = max_gen_toks = 0
    tokenizer_name = ""

    def __init__(
        self,
        pretrained: Any = None,
        *,
        batch_size: Any = None,
        max_length: Any = None,
        max_gen_toks: Any = MAX_NEW_TOKENS,
        positional: Any = None,
        drop: Any = False,
        logit_scale: Any = None,
        attention: str | None = None,
        dtype: str | None = None,
        add_bos_token: Any = None,
        prefix_token_id: Any = None,
        seed: Any = 0,
        truncation: Any = "left",
        devices: Sequence[Any] | None = None,
        **others: Any,
    ):
        super().__init__()
        for name in sorted(others.keys() - IGNORED):
            known = list(inspect.signature(Adapter.__init__).parameters)[1:-1]
            raise ConfigError(
                f"--model_args: pe_lab has no setting '{name}'. {did_you_mean(name, known)} Put a value with a "
                "comma in quotes."
            )
        if pretrained is None:
            raise ConfigError("--model_args: name a model, such as pretrained=runs/NAME.")
        lm = pretrained if isinstance(pretrained, LanguageModel) else load(str(pretrained), dtype=dtype)
        if lm.tokenizer is None:
            raise CheckpointError(f"'{lm.checkpoint.path}' came without a tokenizer; the harness gives texts.")
        lm = with_encoding(lm, positional, drop, logit_scale, attention)
        self.batch_size = sequences_at_once(batch_size)
        self.max_length = lm.training_length
        if max_length is not None:
            self.max_length = parse_length("max_length", str(max_length), lm.training_length)
        self.max_gen_toks = whole_number("max_gen_toks", max_gen_toks, 1, 2**31 - 1)
        self._seed = whole_number("seed", seed, -(2**31), 2**32 - 1)
        self.truncation = truncation_of(truncation)
        self._text, self._add_bos = lm.tokenizer, add_bos(add_bos_token, lm.tokenizer)
        self.tokenizer_name = f"pe_lab__{lm.tokenizer.fingerprint}"
        self.eot_token_id = lm.tokenizer.eos_id
        self.prefix_token_id = self.eot_token_id if lm.tokenizer.bos_id is None else lm.tokenizer.bos_id
        if prefix_token_id is not None:
            self.prefix_token_id = whole_number("prefix_token_id", prefix_token_id, 0, lm.config.vocab_size - 1)
        self._likelihoods = Likelihoods(lm, self.batch_size, devices)
        # Generation uses all devices that the weights are on. Where processes compute together, the mesh shards caches.
        checkpoint = dataclasses.replace(lm.checkpoint, params=self._likelihoods.params)
        moved = not computes_together() and any(
            map(operator.is_not, *map(jax.tree.leaves, (checkpoint.params, lm.checkpoint.params)))
        )
        self.lm = dataclasses.replace(lm, checkpoint=checkpoint) if moved else lm
        self._begins = self.tok_decode([self.prefix_token_id], skip_special_tokens=False)
        self.truncated = self.tokens = 0
        self.journal = Journal()
        self.used: dict[tuple[Any, Any], Used] = {}
        self._pairs: list[Used] = []  # of the last call

    # --------------------------------------------------------------------------------------------------------
    # The model

    def get_model_info(self) -> dict[str, Any]:
        """The description of the model in the results' config."""
        metadata = self.lm.checkpoint.metadata
        return {
            "model_dtype": self.lm.config.dtype,
            "pretrained": str(self.lm.checkpoint.path),
            "checkpoint_id": metadata.get("id"),
            "positional": list(dict.fromkeys(label(layer) for layer in self.lm.layers)),
            "training_length": self.lm.training_length,
            "max_length": self.max_length,
            "truncated": self.truncated,
            "truncation": self.truncation,
        }

    # --------------------------------------------------------------------------------------------------------
    # Text and tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text, special tokens included; BOS is not added to a text that begins with it."""
        bos = self._text.bos_id if self._add_bos and add_special_tokens is not False else None
        if add_special_tokens is None:
            add_special_tokens = not (self._begins and string.startswith(self._begins))
        add_special_tokens &= self._add_bos is not False
        ids = self._text.encode_prompt(string, add_special_tokens=add_special_tokens).tolist()
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._text.decode(tokens, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as one text; without a generation prompt the last message is not closed, to be continued."""
        try:
            text = self._text.chat(chat_history, add_generation_prompt)
        except UserError:
            without = [message for message in chat_history if message.get("role") != "system"]
            if len(without) == len(chat_history):
                raise
            log.warning("The chat template refuses these messages; the system message is left out.")
            return self.apply_chat_template(without, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"])
        start = text.rfind(last.strip())
        if start < 0:
            raise UnsupportedError("The chat template changes the last message: it cannot be continued.")
        whole = last.lstrip()
        return text[: start + len(whole if text.startswith(whole, start) else last.strip())]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template in the results: its text of one message. `ConfigError` for a template's name."""
        if isinstance(chat_template, str):
            raise ConfigError(f"--apply_chat_template={chat_template}: there is one template, which has no name.")
        return self.apply_chat_template([{"role": "user", "content": "..."}]) if chat_template else None

    # --------------------------------------------------------------------------------------------------------
    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        pairs, cut = [], 0
        for key, context, continuation in requests:
            if not context or not continuation or len(continuation) > self.max_length:
                raise DataError(
                    f"A request has {len(context)} tokens of context and {len(continuation)} to score, and max_length "
                    f"is {self.max_length}: {_shortened(key)}. Both need at least one token, and those to score must "
                    "fit."
                )
            # The last token is not read: one more than max_length fits.
            limit = self.max_length + 1 - len(continuation)
            cut += len(context) > limit
            pairs.append((cut_context(context, limit, self.truncation), continuation))
        self._count(cut, len(pairs))
        rolling = bool(requests) and requests[0][0] is None
        answers = RequestAnswers(self.journal, "loglikelihood_rolling" if rolling else "loglikelihood", pairs)
        with tqdm(
            total=len(pairs), disable=disable_tqdm or not is_first(), desc="Running loglikelihood requests"
        ) as bar:
            batches = self._likelihoods.batches(pairs)
            for batch in answers.complete(batches, lambda batch: batch.pairs, self._score, lambda batch: batch.cost):
                for index in batch.pairs:
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], tuple(answers[index]))
                bar.update(len(batch.pairs))
        sizes = [len(context) + len(continuation) for context, continuation in pairs]
        self.tokens += sum(sizes)
        self._pairs = [
            Used(size, len(context) + len(continuation), answers.seconds[index])
            for index, (size, (_, context, continuation)) in enumerate(zip(sizes, requests, strict=True))
        ]
        return [tuple(answers[index]) for index in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Any] = []
        counts, sizes = [], []
        for request in requests:
            (string,) = request.args
            ids = self.tok_encode(string)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs = [make_disjoint_window(window) for window in rolling]
            windows += [(None, *pair) for pair in pairs]
            counts.append(len(pairs))
            sizes.append(len(ids))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm) if windows else ())
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        used = iter(self._pairs if windows else ())
        for request, total, count, size in zip(requests, totals, counts, sizes, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            self._note(request, Used(size, size, sum(next(used).seconds for _ in range(count))))
        return totals

    # --------------------------------------------------------------------------------------------------------
    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        from tqdm import tqdm

        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        asked: dict[int, HarnessGeneration] = {}
        for indices in groups.values():
            until, new_tokens, sampling = self._settings(requests[indices[0]].args[1])
            if (limit := self.max_length - new_tokens) < 1:
                raise ConfigError(
                    f"{new_tokens} new tokens are asked for, and max_length is {self.max_length}: nothing is left for "
                    "a prompt. Give another max_length, or fewer max_gen_toks."
                )
            for index in indices:
                prompt = self.tok_encode(requests[index].args[0]) or [self.prefix_token_id]
                seed = seed_of(self._seed, index) if sampling.get("temperature") else self._seed
                asked[index] = HarnessGeneration(prompt, limit, until, new_tokens, sampling, seed, self.truncation)
            self._count(sum(len(asked[index].prompt) > limit for index in indices), len(indices))
        answers = RequestAnswers(self.journal, "generate_until", [asked[index] for index in range(len(requests))])
        texts = [""] * len(requests)
        with tqdm(
            total=len(requests), disable=disable_tqdm or not is_first(), desc="Running generate_until requests"
        ) as bar:

            def write(batch: tuple[list[int], list[int]]) -> dict[int, str]:
                written = generate(self.lm, [asked[index] for index in batch[1]])
                return dict(zip(batch[0], written, strict=False))

            def cost(batch: tuple[list[int], list[int]]) -> int:
                first = asked[batch[1][0]]
                return len(batch[1]) * (len(first.prompt) + first.new_tokens)

            batches = [
                batch
                for indices in groups.values()
                for batch in generation_batches(self.lm, self.batch_size, asked, indices)
            ]
            for batch, _ in answers.complete(batches, lambda batch: batch[0], write, cost):
                for index in batch:
                    request, text, whole = requests[index], answers[index], len(asked[index].prompt)
                    texts[index] = text.removeprefix(" ") if self._drops_a_space else text
                    read = min(whole, asked[index].prompt_limit)
                    self.tokens += read + len(self._text.encode(text))
                    self._note(request, Used(read, whole, answers.seconds[index]))
                    self.cache_hook.add_partial("generate_until", request.args, texts[index])
                bar.update(len(batch))
        return texts

    def _score(self, batch: LikelihoodBatch) -> dict[int, list[Any]]:
        """The total and the greedy flag of each pair of a batch."""
        return {index: [found.total, found.greedy] for index, found in self._likelihoods.read(batch)}

    def _settings(self, settings: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
        """Stop strings, new tokens and sampling from a request's settings; `UnsupportedError` for other settings."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(list(given.pop("until")), eos=eos)
        new_tokens, drawn = int(given.pop("max_gen_toks")), given.pop("do_sample")
        sampling = {name: given.pop(name) for name in ("temperature", "top_k", "top_p") if name in given}
        for name, value in given.items():
            if value is not None and not (name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]):
                raise UnsupportedError(f"A task generates with {name}={value}, which pe_lab cannot do.")
        kinds = {"temperature": float, "top_k": int, "top_p": float}
        sampling = {name: kinds[name](value) for name, value in sampling.items() if value is not None}
        return [stop for stop in until if stop], new_tokens, sampling if drawn else {}

    @functools.cached_property
    def _drops_a_space(self) -> bool:
        """Whether decoding drops the space at a text's beginning, as SentencePiece does.

        HFLM decodes the generated tokens alone; `LanguageModel.generate` decodes them as a continuation of the prompt.
        """
        ids, begun = self._text.encode("a b").tolist(), len(self._text.encode("a"))
        return self.tok_decode(ids) == "a b" and self.tok_decode(ids[begun:]) == "b"

    def _note(self, request: Any, used: Used) -> None:
        """Adds the cost of a request to its document's."""
        document = (getattr(request, "task_name", None), getattr(request, "doc_id", None))
        self.used.setdefault(document, Used()).add(used)

    def _count(self, cut: int, of: int) -> None:
        self.truncated += cut
        if cut:
            log.warning(
                "%d of %d requests are longer than max_length=%d: their contexts were cut (%s).",
                cut,
                of,
                self.max_length,
                self.truncation,
            )


def _shortened(key: Any) -> str:
    """The texts of a request, for a message."""
    return " / ".join(repr(f"{text[:60]}..." if len(text) > 60 else text) for text in key or ("a window of a text",))


@functools.cache
def adapter() -> type:
    """`PeLabLM`, registered with the harness as `pe_lab`. `UnsupportedError` where the harness is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise UnsupportedError(
            f"lm-evaluation-harness is needed ({error}). Install it: pip install 'pe-lab[eval]', or lm-eval alone."
        ) from None

    @register_model("pe_lab")
    class PeLabLM(Adapter, TemplateLM):
        """A model of pe_lab for lm-evaluation-harness; see `Adapter`."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = super().loglikelihood(requests, disable_tqdm)
            for request, used in zip(requests, self._pairs, strict=True):
                self._note(request, used)
            return found

    return PeLabLM


# --------------------------------------------------------------------------------------------------------------------
# The values of `--model_args`; a bad value is a `ConfigError` that names its setting.


def whole_number(name: str, given: Any, low: int, high: int) -> int:
    """A whole number of low to high, also from a text."""
    try:
        number = int(str(given))
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"--model_args: {name} is {given!r}; give a whole number from {low:,} to {high:,}.")
    return number


def yes_or_no(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"--model_args: {name} is {given!r}; give True or False.")
    return given


def positive(name: str, given: Any) -> float:
    """A number above 0, also from a text."""
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(
            f"--model_args: {name} is {given!r}; give a number above 0, such as the one that "
            "`python -m pe_lab.evaluate --suite=beta` fitted."
        )
    return number


def sequences_at_once(given: Any) -> int | None:
    """A number of sequences; None for as many as memory allows."""
    if given is None or str(given).startswith("auto"):
        return None
    if not re.fullmatch("[0-9]{1,9}", str(given)) or int(given) < 1:
        raise ConfigError(f"batch_size is {given}; give a whole number of at least 1, or auto.")
    return int(given)


def truncation_of(given: Any) -> str:
    if given not in ("left", "middle"):
        raise ConfigError(f"--model_args: truncation is {given!r}; give left or middle.")
    return given


def add_bos(given: Any, tokenizer: Tokenizer) -> bool | None:
    """Whether BOS is put before texts; None: the tokenizer's own habit."""
    if given is None or not yes_or_no("add_bos_token", given):
        return given
    if tokenizer.bos_id is None:
        raise ConfigError(
            "--model_args: add_bos_token=True, and the tokenizer has no beginning-of-text token. Leave it out; "
            "prefix_token_id names the token before texts without a context."
        )
    return True


def with_encoding(
    lm: LanguageModel, positional: Any, drop: Any, logit_scale: Any, attention: str | None
) -> LanguageModel:
    """The model under another encoding, or with another implementation of attention."""
    if yes_or_no("drop", drop):
        lm = lm.drop_positional()
    if positional is not None or logit_scale is not None:
        scale = None if logit_scale is None else positive("logit_scale", logit_scale)
        lm = lm.with_positional(lm.layers if positional is None else positional, scale)
    return lm if attention is None else lm.with_attention(attention)

"""The sequences that a model is measured on: windows of text, or prompts with needles and questions about them."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Int32

from pe_lab.attention.statistics import ArrayLike
from pe_lab.config import Config, DataConfig, from_dict
from pe_lab.data.held_out import held_out_batch, held_out_tokens
from pe_lab.data.mixture import open_mixture
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.generation.prompted import SEED
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.session import text_source
from pe_lab.evaluation.suites import needles, open_tasks, parse_suites
from pe_lab.evaluation.suites.perplexity import POOL
from pe_lab.evaluation.variants import Subject
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.results.records import digest
from pe_lab.terminal import any_seed, positive

NEEDLES = needles.SUITE.name  # the suite of symbols, which the model was trained with


class SequenceQuestions(NamedTuple):
    """Tokens that repeat a needle: Q for each of S sequences, which hold the right answers already.

    Attributes:
      at: the index of the token before the answer, whose query finds the needle.
      answers: the right next token.
      source: the index of the same token in the needle.
      needle: first and last + 1 index of the needle.
    """

    at: Int[ArrayLike, "S Q"]
    answers: Int[ArrayLike, "S Q"]
    source: Int[ArrayLike, "S Q"]
    needle: Int[ArrayLike, "S Q 2"]


@dataclass(frozen=True)
class Sequences:
    """S sequences of T tokens.

    Attributes:
      name: for people, such as `4 windows of essays, 8,192 tokens`.
      tokens: ids. A shorter sequence is padded at its end, where causality hides the padding.
      lengths: tokens of each sequence without padding.
      targets: the next tokens; None for prompts.
      segments, positions: document of each token, and its position there; None: one document, counted from 0.
      questions: about the needles in the sequences; None: text.
    """

    name: str
    tokens: Int32[np.ndarray, "S T"]
    lengths: Int[np.ndarray, " S"]
    targets: Int32[np.ndarray, "S T"] | None = None
    segments: Int32[np.ndarray, "S T"] | None = None
    positions: Int32[np.ndarray, "S T"] | None = None
    questions: SequenceQuestions | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.shape[1]

    @property
    def places(self) -> dict[str, Any]:
        """Segments and positions, as functions of tokens take them."""
        return {"segments": self.segments, "positions": self.positions}

    def batch(self, indices: Sequence[int]) -> Sequences:
        """The sequences of these indices."""
        arrays = (self.tokens, self.lengths, self.targets, self.segments, self.positions, self.questions)
        return Sequences(self.name, *jax.tree.map(lambda x: np.asarray(x)[list(indices)], arrays))

    @functools.cached_property
    def digests(self) -> tuple[str, ...]:
        """A digest of each sequence, with its documents and questions."""
        parts: list[Any] = [self.tokens, self.lengths]
        parts += [x for x in (self.targets, self.segments) if x is not None]
        parts += self.questions or []
        return tuple(digest([np.asarray(part[i]).tolist() for part in parts], 24) for i in range(len(self)))


def add_arguments(parser: argparse.ArgumentParser, count: int, suites: str = "") -> None:
    """Adds the flags that choose sequences.

    Args:
      count: how many sequences there are by default.
      suites: what `--suite` may name; "" where the analysis needs text.
    """
    add = parser.add_argument
    add("--length", help="tokens of a sequence, such as 2048, 8k or 2x the training length (default: 1x)")
    add("--sequences", type=positive, default=count, metavar="N", help="how many sequences (default: %(default)s)")
    text = "a glob, or jsonl:, parquet:, arrow:, hf:, tfds:, stdlib (default: the text that the run's data holds out)"
    add("--text", metavar="SOURCE", help=f"the text of the sequences: {text}")
    if suites:
        add("--suite", metavar="SUITE[:TASK]", help=f"prompts instead of text: {suites}")
        add("--haystack", default="essays", help="of niah: essays, noise, needles, or a glob of text files")
        add("--depths", help="of niah: depths of the needle in per cent, such as 0,50,100, or their number")
        add("--seed", type=any_seed, default=SEED, help="which prompts (default: %(default)s)")


def open_sequences(arguments: argparse.Namespace, subject: Subject) -> Sequences:
    """The sequences that the command line asks for, in the tokens of a checkpoint.

    Raises:
      UserError: no text, too short a text, a length or a suite that is impossible.
    """
    count = arguments.sequences
    length = parse_length("--length", arguments.length or "1x", subject.training_length)
    suite = getattr(arguments, "suite", None)
    if suite is None:
        return text_windows(arguments.text, subject, length, count)
    if arguments.text is not None:
        raise ConfigError("--text and --suite each give the sequences: leave one of them out (see --haystack).")
    if suite == NEEDLES:
        return symbol_windows(subject, length, count, arguments.seed)
    tokenizer = subject.lm.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"--suite: {subject.path} came without a tokenizer, so prompts cannot be read.")
    named = parse_suites(suite)
    if list(named) != ["niah"] or len(named["niah"]) != 1:
        raise ConfigError(f"--suite={suite}: name one task with one needle, niah:standard or another, or {NEEDLES}.")
    options = {"haystack": arguments.haystack, "depths": arguments.depths, "samples": count}
    tasks = open_tasks(named, options)
    return prompts(tasks[0], tokenizer, length, count, arguments.seed)


def data_of(subject: Subject) -> DataConfig | None:
    """The data of a checkpoint's config; None if it is external."""
    config = subject.checkpoint.metadata.get("config")
    if not config:
        return None
    return from_dict(Config, {"data": config["data"]}, f"config of {subject.path}").data


def text_windows(text: str | None, subject: Subject, length: int, count: int) -> Sequences:
    """`count` windows at even distances of a text, or of what the run's data holds out.

    Raises:
      ConfigError: an external checkpoint, and no text.
      DataError: a text with fewer tokens than the windows need.
    """
    data = data_of(subject) if text is None else text_source(text, subject)
    if data is None:
        raise ConfigError(f"{subject.path} does not tell its training data. Give a text: --text=GLOB.")
    mixture = open_mixture(data)
    sources = [i for i, s in enumerate(mixture.sources) if s.prepared is not None and s.tokens("validation")]
    if not sources:
        raise ConfigError(f"The data of {subject.path} holds out no text. Give one: --text=GLOB.")
    stream = held_out_tokens(data, sources[0], POOL * count * (length + 1))
    tiles = len(stream) // (length + 1)
    name = mixture.sources[sources[0]].name
    if tiles < count:
        raise DataError(
            f"{name} has {len(stream):,} tokens, too few for {count} sequences of {length:,} + 1. Give a smaller "
            "--length or --sequences, or another --text."
        )
    chosen = [int((i + 0.5) * tiles / count) for i in range(count)]
    windows = stream[: tiles * (length + 1)].reshape(tiles, length + 1)[chosen]
    batch = held_out_batch(windows, segments=data.segments, eos_id=mixture.tokenizer.eos_id)
    tokens = batch["tokens"].astype(np.int32)
    return Sequences(
        f"{counted(count, 'window')} of {name}, {length:,} tokens",
        tokens,
        np.full(count, length),
        batch["targets"].astype(np.int32),
        *(batch[key].astype(np.int32) if data.segments else None for key in ("segments", "positions")),
    )


def symbol_windows(subject: Subject, length: int, count: int, seed: int) -> Sequences:
    """Held-out windows of the needles source that the model was trained with; see `data.needles`.

    Raises:
      ConfigError: it was trained without needles.
    """
    data = data_of(subject)
    sources = [] if data is None else [i for i, s in enumerate(open_mixture(data).sources) if s.needles is not None]
    if data is None or not sources:
        raise ConfigError(f"--suite={NEEDLES}: {subject.path} was trained without needles. Use --suite=niah:standard.")
    asked = needles.questions(data, sources[0], length, count, seed)
    source = asked.at + 1 - asked.distance
    needle = np.stack([source - 1, source + 1], -1)
    return Sequences(
        f"{counted(count, 'window')} of needles, {length:,} tokens",
        np.asarray(asked.tokens, np.int32),
        np.full(count, length),
        questions=SequenceQuestions(asked.at, asked.answers, source, needle),
    )


def prompts(task: PromptTask, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Sequences:
    """`count` prompts of a task with one needle, each followed by the answer.

    Raises:
      ConfigError: a task with several needles, or a length that holds no prompt.
      DataError: the answer's tokens are not in the prompt.
    """
    rows, lengths, found = [], [], []
    for sample in task.samples(tokenizer, length, count, seed):
        if len(sample.references) != 1:
            raise ConfigError(f"--suite={task.suite}:{task.name} asks for several needles: take niah:standard.")
        answer = np.asarray(tokenizer.encode_prompt(f" {sample.references[0]}", add_special_tokens=False), np.int32)
        place, size = find_copy(sample.tokens, answer)
        if size == 0:
            raise DataError(
                f"{task.suite}:{task.name}: no token of the answer {sample.references[0]!r} is in the prompt."
            )
        row = np.concatenate([sample.tokens, answer])
        at = len(row) - 1 - size + np.arange(size)
        rows.append(row)
        lengths.append(len(row))
        found.append((at, answer[-size:], place + np.arange(size), (place, place + size)))
    fewest = min(len(at) for at, *_ in found)  # of questions; a value of more tokens keeps its last ones
    at, answers, source = (np.stack([one[k][-fewest:] for one in found]) for k in range(3))
    needle = np.stack([np.broadcast_to(one[3], (fewest, 2)) for one in found])
    tokens = np.stack([np.pad(row, (0, length - len(row)), mode="edge") for row in rows])
    name = f"{counted(len(rows), 'prompt')} of {task.suite}:{task.name}, {length:,} tokens"
    questions = SequenceQuestions(at, answers, source, needle)
    return Sequences(name, tokens.astype(np.int32), np.asarray(lengths), questions=questions)


def find_copy(tokens: Int[np.ndarray, " n"], answer: Int[np.ndarray, " m"]) -> tuple[int, int]:
    """Where the longest possible end of `answer` stands in `tokens` for the last time, and its length; 0 if nowhere.

    The first tokens of a value may be joined with what precedes it, and differ in needle and answer.
    """
    for size in range(len(answer), 0, -1):
        end = answer[-size:]
        windows = np.lib.stride_tricks.sliding_window_view(tokens, size) if len(tokens) >= size else np.zeros((0, size))
        places = np.nonzero((windows == end).all(-1))[0]
        if len(places):
            return int(places[-1]), size
    return 0, 0


def counted(count: int, what: str) -> str:
    """A number of things in words: `1 window`, `4 windows`."""
    return f"{count} {what}{'s' * (count != 1)}"


def check_length(analysis: str, sequences: Sequences, least: int) -> None:
    """Raises a `ConfigError` if sequences are shorter than an analysis needs."""
    if sequences.length < least:
        raise ConfigError(f"{analysis} needs sequences of at least {least} tokens, not {sequences.length}.")


def parse_numbers(option: str, text: str | None, count: int, what: str) -> tuple[int, ...]:
    """Numbers such as `0,2,8-11` below `count`; all for None. `ConfigError` names one that is not there."""
    if text is None:
        return tuple(range(count))
    chosen: Sequence[int] = sorted(set(numbers_and_ranges(text, option)))
    for n in chosen:
        if not 0 <= n < count:
            raise ConfigError(f"{option}: there is no {what} {n}; the model has {count}, counted from 0.")
    return tuple(chosen)


def parse_heads(text: str, layers: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(layer, head) of each of `1.5,27.8`; `ConfigError` for what is no such pair or is not there."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        layer, dot, head = item.partition(".")
        if not (dot and re.fullmatch("[0-9]{1,9}", layer) and re.fullmatch("[0-9]{1,9}", head)):
            raise ConfigError(f"--heads: '{item}' is no head. Write LAYER.HEAD, such as 1.5,27.8.")
        if int(layer) not in layers or int(head) >= count:
            raise ConfigError(
                f"--heads: there is no head {item} among the layers measured ({min(layers)} to {max(layers)}) and "
                f"their {count} query heads, counted from 0."
            )
        found.append((int(layer), int(head)))
    if not found:
        raise ConfigError("--heads is empty. Leave it out for the clearest head of each kind.")
    return list(dict.fromkeys(found))

"""Chats as token sequences: rendered by the tokenizer's chat template, with loss on the assistant's answers alone."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.tokenizers.tokenizer import digest
from pe_lab.errors import DataError

ANSWERS = "assistant"  # the role whose messages are learned
DATE = datetime.date(2024, 7, 26)  # for templates that ask for today's, which would change the data from day to day
# The settings of tokenizer_config.json that may change the tokens of a text with special tokens.
_SETTINGS = ("split_special_tokens", "add_prefix_space", "legacy", "tokenizer_class")
_NAME = f"answer {secrets.token_hex(8)}"  # stands for an answer in a rendered chat, to find where it is


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """The token ids of a chat [n], and which of them are targets of the loss [n].

    Targets are the tokens of the assistant's answers and of what ends each, which the model has to generate; the tokens
    of other messages and of headers are not. A template that marks answers with `{% generation %}` decides itself. With
    any other, the chat is rendered up to each answer, as for generation, and up to its end: what is in between are its
    targets, without the whitespace after the token that ends it. A token that is partly in an answer is a target.

    Special tokens are found in the whole text, as transformers does: a message that spells one contains it. But one
    that spells the end of a document, also in characters that the tokenizer normalizes to it, contains their text: that
    token is the template's alone.

    Args:
      tokenizer: one with a chat template.
      messages: {"role": ..., "content": ...}, in order.

    Raises:
      UnsupportedError: the tokenizer has no chat template, or jinja2 is not installed.
      DataError: a message has no role, the template refuses the messages, or an answer is not found in what it renders.
    """
    end = _characters_of_end(tokenizer)
    stands = _stand_in(end, messages)
    # A text of the same length takes the place of the end, so that the characters of answers stay where they are.
    hidden = [{k: v.replace(end, stands) if end and isinstance(v, str) else v for k, v in m.items()} for m in messages]
    text, answers = _rendered(tokenizer, hidden)
    spelled = [match.start() for match in re.finditer(stands, text)] if stands else []
    text = text.replace(stands, end) if stands else text
    ids, offsets = tokenizer.encode_with_offsets(text)
    if end and (ids == tokenizer.eos_id).any():
        ids, offsets = _spell(tokenizer, text, end, ids, offsets, spelled)
    loss = np.zeros(len(ids), bool)
    start, stop = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # a byte of a character may have none
    for first, after in answers:
        loss |= (start < after) & (stop > first)
    return ids, loss


def _characters_of_end(tokenizer: Tokenizer) -> str:
    """The characters for which a template's text has the end of a document; "" if none are known."""
    # A decoder may replace some of its characters, and a vocabulary may name it in the symbols of bytes.
    named = tokenizer.companions.named.get("eos_token", "")
    known = (named, tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False))
    return next((text for text in known if text and tokenizer.eos_id in tokenizer.encode_with_offsets(text)[0]), "")


def _stand_in(end: str, messages: Sequence[Mapping[str, str]]) -> str:
    """A text as long as `end`, of one character that no message has; "" if no message has `end`."""
    whole = "".join(value for message in messages for value in message.values() if isinstance(value, str))
    if not end or end not in whole:
        return ""
    return len(end) * next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in whole)  # for private use


def _spell(
    tokenizer: Tokenizer,
    text: str,
    end: str,
    ids: Int32[np.ndarray, " n"],
    offsets: Int32[np.ndarray, "n 2"],
    spelled: Sequence[int],
) -> tuple[Int32[np.ndarray, " m"], Int32[np.ndarray, "m 2"]]:
    """Ids of `text` with the ends of messages replaced by what documents have for their characters.

    Those are the ends at the characters `spelled`, and the ones whose characters only become `end` when the tokenizer
    normalizes them: a template has it as it is.
    """
    parts, places = [], []
    for token, place in zip(ids, offsets, strict=True):
        part = token[None]
        if token == tokenizer.eos_id:
            start, stop = map(int, place)  # a token may absorb spaces beside it
            if end not in text[start:stop] or any(start <= at and at + len(end) <= stop for at in spelled):
                part = tokenizer.encode(text[start:stop])
        parts.append(part)
        places.append(np.repeat(place[None], len(part), 0))
    return np.concatenate(parts), np.concatenate(places)


def chat_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of what chats depend on beside `tokenizer.fingerprint`. `UnsupportedError` if there is no template."""
    companions = tokenizer.companions
    added = [token.to_json() for token in companions.added]
    given = {name: value for name in _SETTINGS if (value := companions.configuration.get(name)) is not None}
    return digest(json.dumps([companions.template, companions.named, added, given]).encode())


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], generation: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text of messages, and the characters of marked answers, if the template marks them."""
    today = {"strftime_now": DATE}
    return tokenizer.companions.marked_chat(messages, generation, **today)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and the characters [start, stop) of its targets."""
    text, marked = _render(tokenizer, messages)
    if marked is not None:
        return text, marked
    answers = [i for i, message in enumerate(messages) if message["role"] == ANSWERS]
    return text, [_find_answer(tokenizer, messages, i, text) for i in answers]


def _find_answer(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], index: int, text: str) -> tuple[int, int]:
    """The characters [start, stop) of an answer and of what ends it, in the text of the whole chat."""
    named = {**messages[index], "content": _NAME}
    before, found, after = _render(tokenizer, [*messages[:index], named, *messages[index + 1 :]])[0].partition(_NAME)
    starts = [before]
    with contextlib.suppress(DataError):  # a template may refuse a chat without messages
        asked, prompt = (_render(tokenizer, messages[:index], generation)[0] for generation in (False, True))
        if asked != prompt:  # else the template has no prompt for generation
            starts.insert(0, prompt)
    start = next((len(each) for each in starts if text.startswith(each)), None)
    if not found or start is None or not text.endswith(after) or len(text) - len(after) < start:
        raise DataError(
            f"The chat template of {tokenizer.companions.where} renders message {index}, an answer, in a way that "
            "depends on its content, so that it is not found. Put {% generation %} and {% endgeneration %} around the "
            "answers in the template."
        )
    stop = len(text) - len(after)
    # What follows the content when the chat ends there: a special token, and perhaps whitespace.
    ending = _render(tokenizer, [*messages[:index], named])[0].partition(_NAME)[2]
    ending = ending.rstrip() or ending
    return start, stop + len(ending) if after.startswith(ending) else stop

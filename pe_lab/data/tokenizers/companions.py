"""The companion files of a tokenizer: its special tokens, the ends of generation and the chat template."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pe_lab.data.tokenizers.chat_templates import TemplateFails, render
from pe_lab.errors import DataError, UnsupportedError
from pe_lab.storage import json_object

CONFIGURATION = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (CONFIGURATION, SPECIAL_TOKENS, ADDED_TOKENS, GENERATION, CHAT_TEMPLATE)
VOCABULARIES = ("vocab.json", "merges.txt", "tokenizer.model")  # older forms of the same vocabulary
MOST_IDS = 2**24  # of a vocabulary; the largest have 2^18
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is split, with the flags of `tokenizers.AddedToken`."""

    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    @classmethod
    def from_json(cls, value: Any, id: int | None = None) -> AddedToken:
        """From a configuration: a string, or an object with flags."""
        if isinstance(value, str):
            return cls(_utf8(value), id)
        return cls(_utf8(str(value["content"])), id, **{flag: bool(value[flag]) for flag in FLAGS if flag in value})

    def flags(self) -> dict[str, bool]:
        """The flags by name."""
        return {flag: getattr(self, flag) for flag in FLAGS}

    def to_json(self) -> dict[str, Any]:
        """The entry of tokenizer.json; in tokenizer_config.json it has no id."""
        return {"id": self.id, "content": self.content, **self.flags()}


def _utf8(content: str) -> str:
    """The content of a token; `ValueError` for a lone surrogate, which no text has."""
    content.encode()
    return content


def split_at_tokens(text: str, tokens: Mapping[str, AddedToken]) -> list[str | AddedToken]:
    """The text split at the tokens in it, of which the longest is found first; flags as in transformers."""
    if not tokens:
        return [text] if text else []
    either = "|".join(re.escape(content) for content in sorted(tokens, key=len, reverse=True) if content)
    parts: list[str] = [part for part in re.split(f"({either})", text) if part]
    for i, part in enumerate(parts):
        if part not in tokens:
            continue
        token = tokens[part]
        left, right = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        if token.rstrip and right:
            parts[i + 1] = right.lstrip()
        if token.lstrip and left:
            parts[i - 1] = left.rstrip()
        if token.single_word and left and left[-1] != " ":
            parts[i - 1], parts[i] = parts[i - 1] + part, ""
        elif token.single_word and right and right[0] != " ":
            parts[i + 1], parts[i] = part + parts[i + 1], ""
    return [tokens.get(part, part) for part in parts if part]


@dataclass(frozen=True)
class Companions:
    """Companion files by name. `where` names the tokenizer in messages. Properties raise `DataError` at a bad file."""

    where: str
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def beside(cls, path: Path, names: Iterable[str] = COMPANIONS) -> Companions:
        """The files in the directory of `path` that have one of `names`, without `path` itself."""
        found = [path.with_name(name) for name in names]
        return cls(str(path), {p.name: p.read_bytes() for p in found if p.is_file() and p != path})

    def _object(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            return {}
        value = json_object(self.files[name])
        if value is None:
            raise DataError(f"{name} beside {self.where} is not a JSON object. Mend it, or remove it.")
        return value

    @cached_property
    def configuration(self) -> dict[str, Any]:
        return self._object(CONFIGURATION)

    @cached_property
    def named(self) -> dict[str, str]:
        """The contents of the tokens with a role: `eos_token` and the other `ROLES` that a file names."""
        return {name: token.content for name, token in self._roles.items()}

    @cached_property
    def _roles(self) -> dict[str, AddedToken]:
        given = {**self._object(SPECIAL_TOKENS), **{k: v for k, v in self.configuration.items() if v is not None}}
        try:
            return {name: AddedToken.from_json(given[name]) for name in ROLES if given.get(name)}
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(
                f"{CONFIGURATION} or {SPECIAL_TOKENS} beside {self.where} names a special token that is neither a "
                "string nor an object with 'content'."
            ) from error

    @cached_property
    def added(self) -> tuple[AddedToken, ...]:
        """Every token that a file adds or gives flags: first those with an id, ordered by it."""
        listed = self.configuration.get("added_tokens_decoder")
        try:
            if listed is not None:
                tokens = [AddedToken.from_json(value, int(id)) for id, value in listed.items()]
            else:
                added = self._object(ADDED_TOKENS).items()
                tokens = [AddedToken(_utf8(str(content)), int(id), special=False) for content, id in added]
            tokens.sort(key=lambda token: token.id)
            if any(not 0 <= token.id < MOST_IDS for token in tokens):
                raise ValueError(f"an id is not below {MOST_IDS:,}")
            more = list(self._roles.values())
            for name in ("additional_special_tokens", "extra_special_tokens"):
                extra = self.configuration.get(name) or self._object(SPECIAL_TOKENS).get(name) or []
                more += [AddedToken.from_json(t) for t in (extra.values() if isinstance(extra, dict) else extra)]
        except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
            raise DataError(
                f"The added tokens in {CONFIGURATION} or {ADDED_TOKENS} beside {self.where} cannot be read: {error!r}."
            ) from error
        known = {token.content for token in tokens}
        special = {token.content for token in more}
        tokens = [dataclasses.replace(t, special=t.special or t.content in special) for t in tokens]
        return (*tokens, *{t.content: t for t in more if t.content not in known}.values())

    def stop_ids(self, eos_id: int) -> tuple[int, ...]:
        """`eos_id`, and the ends of generation that generation_config.json lists."""
        listed = self._object(GENERATION).get("eos_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        if not all(isinstance(id, int) and id >= 0 for id in listed):
            raise DataError(f"{GENERATION} beside {self.where}: eos_token_id is {listed}, not token ids.")
        return tuple(dict.fromkeys([eos_id, *listed]))

    def marked_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The messages as one prompt, by the chat template, rendered in a sandbox as transformers renders it.

        Also the characters [start, stop) in each `{% generation %}`; None if the template has no such block.

        Raises:
          UnsupportedError: there is no template, or jinja2 is not installed.
          DataError: a message has no role, or the template refuses the messages.
        """
        template = self.template
        if importlib.util.find_spec("jinja2") is None:
            raise UnsupportedError("A chat template needs jinja2. Install it: pip install 'pe-lab[chat]'")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise DataError(f"Message {i} of the chat is {message!r}: each is {{'role': ..., 'content': ...}}.")
        defaults = {"tools": None, "documents": None, **self.named}
        values = {**defaults, **variables, "add_generation_prompt": add_generation_prompt, "messages": list(messages)}
        try:
            return render(template, values)
        except TemplateFails as error:
            raise DataError(f"The chat template of {self.where} does not accept these messages: {error}") from None

    @cached_property
    def template(self) -> str:
        """The chat template; `UnsupportedError` if there is none."""
        if CHAT_TEMPLATE in self.files:
            try:
                template = self.files[CHAT_TEMPLATE].decode("utf-8-sig")
            except UnicodeDecodeError:
                raise DataError(f"{CHAT_TEMPLATE} beside {self.where} is not UTF-8. Mend it, or remove it.") from None
        else:
            template = self.configuration.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
            if template and "default" not in named:
                listed = ", ".join(named) or "none with a name"
                raise DataError(
                    f"{CONFIGURATION} beside {self.where} lists chat templates and no 'default' ({listed})."
                )
            template = named.get("default")
        if template and not isinstance(template, str):
            raise DataError(f"{CONFIGURATION} beside {self.where}: chat_template is no text. Mend it, or remove it.")
        if not template:
            raise UnsupportedError(
                f"The tokenizer {self.where} has no chat template: its model was not made for chats. Give the prompt "
                f"as plain text, or put a {CHAT_TEMPLATE} beside it."
            )
        return template

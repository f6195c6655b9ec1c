"""The files beside a tokenizer: what they say of its special tokens, of where generation ends, and of chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pe_lab.errors import UserError

CONFIGURATION = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SETTINGS = (CONFIGURATION, SPECIAL_TOKENS, ADDED_TOKENS, GENERATION, CHAT_TEMPLATE)
VOCABULARIES = ("vocab.json", "merges.txt", "tokenizer.model")  # older forms of the same vocabulary
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is split; the flags are those of `tokenizers.AddedToken`."""

    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    @classmethod
    def read(cls, given: Any, id: int | None = None) -> AddedToken:
        """From a configuration, which spells a token as its text or as an object with flags."""
        if isinstance(given, str):
            return cls(given, id)
        flags = {k: bool(given[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in given}
        return cls(str(given["content"]), id, **flags)

    def to_json(self) -> dict[str, Any]:
        """As `tokenizer.json` lists it, and tokenizer_config.json (less the id)."""
        flags = {k: getattr(self, k) for k in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        return {"id": self.id, "content": self.content, **flags}


@dataclass(frozen=True)
class Companions:
    """Files beside a tokenizer, by name. `where` names the tokenizer in messages.

    Raises (when asked):
      UserError: a file is not what its name says.
    """

    where: str
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def beside(cls, path: Path, names: Iterable[str] = SETTINGS) -> Companions:
        """Those of `names` that lie in the folder of `path`, other than `path` itself."""
        found = [path.with_name(name) for name in names]
        return cls(str(path), {p.name: p.read_bytes() for p in found if p.is_file() and p != path})

    def write(self, directory: Path) -> None:
        for name, content in self.files.items():
            (directory / name).write_bytes(content)

    def _object(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            return {}
        try:
            read = json.loads(self.files[name])
            if not isinstance(read, dict):
                raise ValueError(f"it holds a {type(read).__name__}")
        except ValueError as error:
            raise UserError(f"{name} beside {self.where} is not a JSON object: {error}.") from error
        return read

    @cached_property
    def configuration(self) -> dict[str, Any]:
        return self._object(CONFIGURATION)

    @cached_property
    def named(self) -> dict[str, str]:
        """The tokens with a role: `eos_token` and its like, as far as a file names them."""
        return {name: token.content for name, token in self._roles.items()}

    @cached_property
    def _roles(self) -> dict[str, AddedToken]:
        given = {**self._object(SPECIAL_TOKENS), **{k: v for k, v in self.configuration.items() if v is not None}}
        try:
            return {name: AddedToken.read(given[name]) for name in NAMES if given.get(name)}
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{CONFIGURATION} or {SPECIAL_TOKENS} beside {self.where} names a special token that is neither a "
                "text nor an object with 'content'."
            ) from error

    @cached_property
    def added(self) -> tuple[AddedToken, ...]:
        """Every token that a file adds or flags, those with an id first and in its order."""
        listed = self.configuration.get("added_tokens_decoder")
        try:
            if listed is not None:
                tokens = [AddedToken.read(given, int(id)) for id, given in listed.items()]
            else:
                tokens = [AddedToken(str(c), int(id), special=False) for c, id in self._object(ADDED_TOKENS).items()]
            tokens.sort(key=lambda token: token.id)
            more = list(self._roles.values())
            for name in ("additional_special_tokens", "extra_special_tokens"):
                extra = self.configuration.get(name) or self._object(SPECIAL_TOKENS).get(name) or []
                more += [AddedToken.read(t) for t in (extra.values() if isinstance(extra, dict) else extra)]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(
                f"The added tokens in {CONFIGURATION} or {ADDED_TOKENS} beside {self.where} cannot be read: {error!r}."
            ) from error
        ours = {token.content for token in tokens}
        special = {token.content for token in more}
        tokens = [AddedToken(**{**vars(t), "special": t.special or t.content in special}) for t in tokens]
        return (*tokens, *{t.content: t for t in more if t.content not in ours}.values())

    def stop_ids(self, eos_id: int) -> tuple[int, ...]:
        """`eos_id`, and what generation_config.json lists as ends: the end of a turn, of a document."""
        listed = self._object(GENERATION).get("eos_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        if not all(isinstance(id, int) and id >= 0 for id in listed):
            raise UserError(f"{GENERATION} beside {self.where}: eos_token_id is {listed}, not token ids.")
        return tuple(dict.fromkeys([eos_id, *listed]))

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """The messages as one text, by the chat template, rendered as transformers renders it."""
        if CHAT_TEMPLATE in self.files:
            template = self.files[CHAT_TEMPLATE].decode("utf-8")
        else:
            template = self.configuration.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template:
            raise UserError(
                f"The tokenizer {self.where} has no chat template: its model was not made for chats. Give the prompt "
                f"as plain text, or put a {CHAT_TEMPLATE} beside it."
            )
        values = {**self.named, **variables, "add_generation_prompt": add_generation_prompt}
        return render_chat(template, messages, values, self.where)


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], where: str) -> str:
    """A Jinja chat template on messages, in a sandbox, with the helpers that transformers gives to templates.

    Raises:
      UserError: jinja2 is not installed, a message has no role, or the template refuses the messages.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise UserError("A chat template needs jinja2. Install it: pip install jinja2") from error
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"Message {i} of the chat is {message!r}: each is {{'role': ..., 'content': ...}}.")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(format)

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant says, for training; it renders as what it encloses."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        values = {"tools": None, "documents": None, **variables}
        return environment.from_string(template).render(messages=list(messages), **values)
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"The chat template of {where} does not take these messages: {error}") from error

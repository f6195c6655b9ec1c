"""Records of columns as documents: one column, a template of several, or a chat."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pe_lab.config import SourceConfig
from pe_lab.data.sources.source import Document
from pe_lab.errors import ConfigError, DataError, excerpt

PROMPT, INSTRUCTION = "prompt/completion", "instruction"  # the values of `chat` that are no column
CHATS = {PROMPT: ("prompt", "completion"), INSTRUCTION: ("instruction", "output")}  # their columns
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_response": "tool",
    "observation": "tool",
}  # of ShareGPT's `from`, as chat templates name them; any other is its own


class Records:
    """How a record of one source becomes a document, by the source's `column`, `template` or `chat`.

    Raises:
      ConfigError: two of them are given, or the template is none.
    """

    def __init__(self, config: SourceConfig):
        self._source, self._column = config.source, config.column
        self._template, self._chat = config.template, config.chat
        if config.template and config.chat:
            raise ConfigError(f"data source {config.source!r} has a template and a chat; give one of them.")
        self._parts = self._parsed(config.template)
        self._setting = "template" if config.template else "chat" if config.chat else "column"
        self._optional = ("system", "input") if config.chat == INSTRUCTION else ()
        self.columns: tuple[str, ...] = CHATS.get(config.chat, (config.chat or config.column,))
        if config.template:
            self.columns = tuple(dict.fromkeys(name for _, name in self._parts if name))

    def _parsed(self, template: str) -> list[tuple[str, str]]:
        """Pairs of plain text and the field after it, "" where there is none."""
        example = 'Write columns in braces, as in "{title}\\n\\n{meta.text}", and other braces twice: {{ }}.'
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ConfigError(f"data source {self._source!r}: template {template!r}: {error}. {example}") from None
        for _, name, form, conversion in parts:
            if name == "" or form or conversion:
                raise ConfigError(f"data source {self._source!r}: template {template!r}: a field is no name. {example}")
        if template and not any(name for _, name, *_ in parts):
            raise ConfigError(f"data source {self._source!r}: template {template!r} names no column. {example}")
        return [(literal, name or "") for literal, name, *_ in parts]

    @property
    def is_column(self) -> bool:
        """Whether the documents are the values of one column."""
        return self._setting == "column"

    def columns_of(self, has: Iterable[str]) -> list[str]:
        """The columns to read from a file that has those names."""
        return [*self.columns, *(name for name in self._optional if name in set(has))]

    def tops(self, has: Iterable[str]) -> set[str]:
        """The columns to read from a file that has those names: of `meta.title`, which it does not have, `meta`."""
        names = set(has)
        return {column if column in names else column.partition(".")[0] for column in self.columns_of(names)}

    def check_columns(self, where: str, has: Iterable[str]) -> None:
        """`ConfigError` if a column is missing; of a nested name, the first part is looked for."""
        names = list(has)
        for column in self.columns:
            if column not in names and column.partition(".")[0] not in names:
                raise self.no_column(where, column, names)

    def no_column(self, where: str, column: str, has: Iterable[Any]) -> ConfigError:
        """The error of a file or a record that lacks a column."""
        names = ", ".join(str(name) if str(name).isprintable() else repr(name) for name in has)
        return ConfigError(
            f"{where} has no column {column!r} (it has: {excerpt(names, 500)}). Set the source's {self._setting}."
        )

    def identity(self) -> dict[str, str]:
        """What the documents depend on beside the files and `column`: nothing without a template and a chat."""
        given = {"template": self._template, "chat": self._chat}
        return {name: value for name, value in given.items() if value}

    def document(self, record: Mapping[str, Any], where: str | Callable[[], str]) -> Document | None:
        """The document of a record; None if it is empty.

        Args:
          record: the record.
          where: what to call it in a message, such as its file and line.

        Raises:
          ConfigError: it has no such column.
          DataError: a column holds something else.
        """
        try:
            if self._setting == "chat":
                messages = self._messages(record)
                return Document("", messages) if any(m["content"] for m in messages) else None
            text = self._filled(record) if self._template else _text(self._column, self._value(record, self._column))
            return Document(text) if text else None
        except _Refused as refused:
            named = where if isinstance(where, str) else where()
            if refused.column:
                raise self.no_column(named, refused.column, refused.has) from None
            raise DataError(f"{named}: {refused}.") from None

    def _value(self, record: Mapping[str, Any], column: str) -> Any:
        """The value of a column, also of one inside another: `meta.title`."""
        if column in record:
            return record[column]
        value: Any = record
        for name in column.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or name not in value:
                raise _Refused(column=column, has=list(value) if isinstance(value, Mapping) else list(record))
            value = value[name]
        return value

    def _filled(self, record: Mapping[str, Any]) -> str:
        """The template filled in; "" if every field is null or empty."""
        parts, empty = [], True
        for literal, name in self._parts:
            parts.append(literal)
            if name:
                value = self._value(record, name)
                if not isinstance(value, str | bytes | Mapping | Sequence | None) and not getattr(value, "shape", ()):
                    value = str(value)  # a number, a truth value, a date
                value = _text(name, value)
                empty = empty and not value
                parts.append(value)
        return "" if empty else "".join(parts)

    def _messages(self, record: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
        if self._chat == INSTRUCTION:
            return self._instruction(record)
        if self._chat == PROMPT:
            prompt, completion = (self._value(record, name) for name in self.columns)
            return (*self._one_side("prompt", prompt, "user"), *self._one_side("completion", completion, "assistant"))
        return self._listed(self._chat, self._value(record, self._chat))

    def _instruction(self, record: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
        """instruction, input and output as Alpaca has them: the input, where there is one, follows the instruction."""
        system, asked, given, answer = (
            _text(name, None if name in self._optional and name not in record else self._value(record, name))
            for name in ("system", "instruction", "input", "output")
        )
        first = [{"role": "system", "content": system}] if system else []
        request = "\n\n".join(filter(None, (asked, given)))
        return (*first, {"role": "user", "content": request}, {"role": "assistant", "content": answer})

    def _one_side(self, column: str, value: Any, role: str) -> tuple[Mapping[str, str], ...]:
        """A prompt or a completion: a text, or messages."""
        if isinstance(value, str | bytes | None):
            return ({"role": role, "content": _text(column, value)},)
        return self._listed(column, value)

    def _listed(self, column: str, value: Any) -> tuple[Mapping[str, str], ...]:
        """Messages as {role, content}, or as ShareGPT's {from, value}; a list of them, or columns of lists."""
        if value is None:
            return ()
        if isinstance(value, Mapping) and value and all(_is_list(each) for each in value.values()):
            # TensorFlow Datasets and Hugging Face's Sequence store a list of records as one record of lists.
            value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
        if not _is_list(value):
            raise _Refused(f"column {column!r} holds a {type(value).__name__}, not a list of messages")
        return tuple(self._message(f"message {i} of {column!r}", each) for i, each in enumerate(value))

    def _message(self, what: str, message: Any) -> Mapping[str, str]:
        if not isinstance(message, Mapping):
            raise _Refused(f"{what} is a {type(message).__name__}; each is {{role, content}} or {{from, value}}")
        role_key, content_key = (
            ("from", "value") if "role" not in message and "from" in message else ("role", "content")
        )
        role, content = _decoded(message.get(role_key)), message.get(content_key)
        if not isinstance(role, str) or not role:
            raise _Refused(f"{what} has no {role_key!r} (it has: {', '.join(map(str, message))})")
        if _is_list(content):  # parts, of which texts alone are read
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if not all(isinstance(part, str) for part in parts):
                raise _Refused(f"{what}: its {content_key!r} has parts that are not text")
            content = "".join(parts)
        content = _decoded(content)
        if not isinstance(content, str):
            raise _Refused(f"{what}: its {content_key!r} is {type(content).__name__}, not text")
        return {"role": ROLES.get(role, role) if role_key == "from" else role, "content": content}


class _Refused(Exception):
    """Why a record is no document; or the column that it lacks, and those that it has."""

    def __init__(self, message: str = "", column: str = "", has: Sequence[str] = ()):
        super().__init__(message)
        self.column, self.has = column, has


def _text(column: str, value: Any) -> str:
    """A value that must be a string, or null."""
    value = _decoded(value)
    if value is not None and not isinstance(value, str):
        raise _Refused(f"column {column!r} holds a {type(value).__name__}, not text")
    return value or ""


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) or type(value).__name__ == "ndarray"

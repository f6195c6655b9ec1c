"""JSON and JSON lines, read with the errors that users see, and written atomically."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pe_lab.errors import DataError, UserError
from pe_lab.storage.files import write_file
from pe_lab.storage.logs import log_exists, read_log
from pe_lab.storage.paths import AnyPath, is_remote, read_bytes

Kind = TypeVar("Kind", dict, list)
LARGEST = 2**26  # bytes of a whole file; as Python objects they take up to twenty times as much
TOGETHER = 1000  # lines that are parsed at once
DEEPEST = 64  # objects and lists inside one another; whoever walks a value may do so by recursion
_BETWEEN = secrets.randbits(62)  # stands between lines that are parsed at once; no file has it


def json_object(text: str | bytes, kind: type[Kind] = dict) -> Kind | None:
    """The JSON object (or list, with that `kind`) in a text; None for all else, also what is deeper than `DEEPEST`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, kind) and not _too_deep(value) else None


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def json_objects(lines: Sequence[bytes]) -> Iterator[dict[str, Any] | None]:
    """The JSON object of each line; None of a line that holds anything else.

    Lines are parsed `TOGETHER` at a time, so that their keys are the same strings: a third of the memory, and faster.
    Between two lines there is a number that no line has. Where all of these lie between objects, each line is one;
    halves of an object on two lines have one inside, whatever other lines make up for.
    """
    for start in range(0, len(lines), TOGETHER):
        part = [line.strip() for line in lines[start : start + TOGETHER]]
        whole = all(line.startswith(b"{") and line.endswith(b"}") for line in part)
        found = json_object(b"[" + (b",%d," % _BETWEEN).join(part) + b"]", list) if whole else None
        separate = found is not None and found[1::2] == [_BETWEEN] * (len(part) - 1)
        yield from found[::2] if separate else map(json_object, part)


def read_json(path: AnyPath, advice: str = "", error: type[UserError] = DataError, kind: type[Kind] = dict) -> Kind:
    """The JSON object (or list) in a file; `error` with `advice` if it is missing, unreadable or something else."""
    try:
        if not is_remote(path) and (size := path.stat().st_size) > LARGEST:
            raise error(f"'{path}' has {size:,} bytes; such a file has at most {LARGEST:,}. {advice}".rstrip())
        value = json_object(read_bytes(path), kind)
    except FileNotFoundError:
        raise error(f"There is no '{path}'. {advice}".rstrip()) from None
    except OSError as failure:
        raise error(f"'{path}' cannot be read ({failure.strerror or failure}). {advice}".rstrip()) from None
    if value is None:
        what = "list" if kind is list else "object"
        raise error(f"'{path}' is damaged: it holds no JSON {what}. {advice}".rstrip())
    return value


def read_records(
    path: AnyPath,
    what: str = "record",
    advice: str = "",
    partial: bool = False,
    check: Callable[[dict[str, Any]], str] = lambda record: "",
) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of JSON lines, or of an `AppendedLog`; nothing if there is no file.

    Args:
      what, advice: what a line holds, and what to do about a damaged file, for messages.
      partial: whether a last line without its line end, which a killed process leaves, is skipped.
      check: describes a defect of a record; "" if there is none.

    Raises:
      DataError: the file cannot be read, or a line is no JSON object or fails `check`; names the line.
    """
    try:
        content = read_log(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from None
    if partial:
        content = content[: content.rfind(b"\n") + 1]
    lines = content.split(b"\n")
    del content
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    for number, record in zip(numbers, json_objects([line for line in lines if line.strip()]), strict=True):
        wrong = "no JSON object" if record is None else check(record)
        if wrong:
            raise DataError(f"{path}, line {number}, is no {what}: {wrong}. {advice}".rstrip())
        yield record


def set_aside(path: AnyPath, content: bytes) -> AnyPath:
    """Renames a damaged file to NAME.damaged-XXXX, so that another can be written, and returns the new path."""
    aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(2)}")
    if is_remote(path):
        return write_file(aside, content)
    path.rename(aside)
    return aside


def salvage_records(
    path: AnyPath, check: Callable[[dict[str, Any]], str], show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The whole records of a log that a run goes on to write; nothing if there is no file.

    A last line without its line end, which a killed process leaves, is skipped. If other lines are damaged, or fail
    `check` (see `read_records`), the file is set aside, and `show` gets a line about it.
    """
    content = read_log(path) if log_exists(path) else b""
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")
    found = [json_object(line) for line in lines if line.strip(b" \t\r")]
    whole = [record for record in found if record is not None and not check(record)]
    if len(whole) < len(found):
        lost, aside = len(found) - len(whole), set_aside(path, content)
        show(f"{path}: {lost} of {len(found)} records are damaged and left out; the file is now {aside.name}")
    return whole


def write_json(path: AnyPath, value: Any, advice: str = "", private: bool = False) -> AnyPath:
    """Writes a value as indented JSON, atomically; `private` as for `write_files`."""
    return write_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", advice, private)


def write_records(path: AnyPath, records: Iterable[Mapping[str, Any]], advice: str = "") -> AnyPath:
    """Writes a file of JSON lines, atomically."""
    return write_file(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), advice)

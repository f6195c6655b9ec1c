"""The registry of positional encodings: names for classes, and where each class comes from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pe_lab.config import register_kind
from pe_lab.errors import ConfigError, EncodingError, UserError, is_external
from pe_lab.positional.hooks import HOOKS, Encoding

Kind = TypeVar("Kind", bound=type[Encoding])


@dataclasses.dataclass(frozen=True)
class EncodingSource:
    """Where the class of an encoding comes from.

    Attributes:
      module: its name.
      file: its path; "" if the class was not read from a file.
      digest: of the file; of the class alone, or "", if there is none.
    """

    module: str
    file: str
    digest: str


ENCODINGS: dict[str, type[Encoding]] = {}
_equal_sources: dict[str, tuple[str, ...]] = {}  # by name: digests of earlier sources that computed the same
_sources: dict[type, EncodingSource] = {}  # of classes that are not pe_lab's own, when they were registered


def register(name: str, *, same_as: tuple[str, ...] | str = ()) -> Callable[[Kind], Kind]:
    """A class decorator: gives an encoding the name by which recipes, texts and checkpoints know it.

    Args:
      name: of letters, digits and `_`.
      same_as: digests of earlier sources that computed the same. A checkpoint made with one of them can be opened.

    Raises:
      ConfigError: another class has the name, or the class is no frozen dataclass derived from `Encoding`.
    """

    def decorate(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, Encoding)):
            raise ConfigError(f"register('{name}'): {kind!r} is no class derived from pe_lab.positional.Encoding.")
        # A subclass that forgets @dataclass inherits __dataclass_fields__, and would ignore its own fields.
        if "__dataclass_params__" not in vars(kind) or not kind.__dataclass_params__.frozen:
            raise ConfigError(
                f"register('{name}'): {kind.__name__} is no frozen dataclass; write @dataclass(frozen=True) under "
                "@register(...)."
            )
        if not name.isidentifier():
            raise ConfigError(f"register('{name}'): a name has letters, digits and _ only.")
        before = ENCODINGS.get(name)
        if before is not None and _place(before) != _place(kind):
            raise ConfigError(
                f"register('{name}'): the name is taken by {' of '.join(_place(before))}; give "
                f"{' of '.join(_place(kind))} another one."
            )
        _check_signatures(name, kind)
        _equal_sources[name] = (same_as,) if isinstance(same_as, str) else tuple(same_as)
        if is_external(kind):
            source = source_of(kind)
            if before is not None and source.digest and _sources[before] == source:
                return before  # the module was read again, and instances of both are to be equal
            _sources[kind] = source
        register_kind(name, kind)
        ENCODINGS[name] = kind
        return kind

    return decorate


def _place(kind: type) -> tuple[str, str]:
    """A class's name and its file, by which a module that is read twice is the same."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__qualname__, kind.__module__ if file is None else str(Path(file).resolve())


def _check_signatures(name: str, kind: type[Encoding]) -> None:
    for hook in ("frequencies", "slopes", "init", *HOOKS):
        own = getattr(kind, hook)
        if own is getattr(Encoding, hook):
            continue
        wanted = list(inspect.signature(getattr(Encoding, hook)).parameters)
        found = inspect.signature(own).parameters
        fits = len(found) == len(wanted) or any(p.kind == p.VAR_POSITIONAL for p in found.values())
        if not fits:
            raise ConfigError(
                f"register('{name}'): {kind.__name__}.{hook} takes ({', '.join(found)}); it must take "
                f"({', '.join(wanted)})."
            )


def registered_name(encoding: Any) -> str:
    """The name of an encoding's class."""
    for name, kind in ENCODINGS.items():
        if kind is type(encoding):
            return name
    raise ConfigError(f"{encoding!r} is no registered encoding: write @register('NAME') above its class.")


def source_of(kind: type) -> EncodingSource:
    """Where a class comes from."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        return EncodingSource(kind.__module__, "", digest_of(kind))
    return EncodingSource(kind.__module__, str(Path(file).resolve()), _digest(Path(file).read_text()))


def digest_of(kind: Any) -> str:
    """A digest of the source of a class or a function alone; "" where there is none, as for what was typed in."""
    try:
        return _digest(inspect.getsource(kind))
    except (OSError, TypeError):
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(encodings: Iterable[Encoding]) -> dict[str, dict[str, str]]:
    """For a checkpoint's metadata: the sources of encodings that are not pe_lab's own, by name."""
    kinds = {registered_name(one): type(one) for one in encodings if is_external(type(one))}
    return {name: dataclasses.asdict(_sources[kind]) for name, kind in sorted(kinds.items())}


def external_files() -> list[str]:
    """The files of all registered encodings that are not pe_lab's own."""
    return sorted({source.file for source in _sources.values()} - {""})


def check_sources(recorded: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Raises an `EncodingError` if an encoding of a checkpoint is not registered, or has another source by now.

    Args:
      recorded: as `sources` returns them.
      where: the checkpoint, for the message.
    """
    for name, source in recorded.items():
        file, module = source.get("file", ""), source.get("module", "")
        if name not in ENCODINGS:
            raise EncodingError(
                f"{where} uses the encoding '{name}', which is not registered: it comes from the module {module}"
                f"{f' ({file})' if file else ''}. Import it first: --encodings={file or module + '.py'}, or "
                "pe_lab.load(..., encodings=...)."
            )
        now, then = _sources[ENCODINGS[name]], source.get("digest", "")
        if then and now.digest and now.digest != then and then not in _equal_sources.get(name, ()):
            raise EncodingError(
                f"{where} was made with another source of the encoding '{name}': its digest was {then}, and that of "
                f"{now.file or now.module} is {now.digest}. Bring the former source back; or, if both compute the "
                f"same, write @register('{name}', same_as='{then}')."
            )


def import_encodings(reference: Any) -> ModuleType | None:
    """Imports the module of some encodings, so that they are registered.

    Args:
      reference: a module, which is registered already, a path of a .py file, or the dotted name of a module.

    Raises:
      ConfigError: there is no such module, or importing it fails.
    """
    if reference is None or isinstance(reference, ModuleType):
        return reference
    text = str(reference)
    try:
        if not text.endswith(".py"):
            return importlib.import_module(text)
        path = Path(text).resolve()
        if not path.is_file():
            raise ConfigError(f"--encodings: there is no file '{text}'.")
        name = f"pe_lab_encodings_{_digest(str(path))[:8]}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"--encodings: '{text}': {error}. Give a .py file or an importable module.") from None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--encodings: '{text}' raises {type(error).__name__}: {reason}") from error

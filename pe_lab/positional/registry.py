"""Encodings from outside: names for classes, where each comes from, and functions as encodings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from pe_lab.config import OMIT_DEFAULT, register_kind
from pe_lab.errors import ConfigError, EncodingError, UserError, call, is_external
from pe_lab.positional.hooks import HOOKS, Encoding, Hidden, Keys, Params, Positions, Queries
from pe_lab.positional.scalings import require

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


Settings = tuple[tuple[str, Any], ...]

_known: dict[tuple[str, str], Callable[..., Any]] = {}  # by name and digest


def function(f: Callable[..., Array], **settings: Any) -> Function:
    """The encoding that applies `f(inputs, positions, head_dim, **settings)` to queries and to keys.

    Args:
      f: a function of a module or of a recipe, not a lambda. It takes `inputs` [B, T, heads, K], `positions` [B, T] and
        K, and returns an array of the shape of `inputs`, whose token t depends on its own input and position alone.
      settings: its other arguments, as plain data: numbers, strings, true and false, None, and lists of them.

    Raises:
      ConfigError: f has no name by which it can be found again, or a setting is no plain data.
    """
    name = _name_of(f)
    own = name.partition(":")[0].partition(".")[0] == "pe_lab"
    made = Function(name, tuple(settings.items()), "" if own else digest_of(f))
    _known[made.name, made.digest] = f
    return made


@register("function")
@dataclass(frozen=True)
class Function(Encoding):
    """A function applied to queries and to keys; make it with `function`.

    Nothing is known of the function: it is not declared `relative`, and library kernels take its queries and keys.

    Attributes:
      name: `MODULE:NAME`, or `PATH/FILE.py:NAME` where the file is no importable module.
      settings: the function's other arguments, sorted by name.
      digest: of the function's source, without what it calls; "": not compared. pe_lab's own have none.
    """

    name: str
    settings: Settings = ()
    digest: str = field(default="", metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, attribute = str(self.name).rpartition(":")
        require(
            bool(module) and all(part.isidentifier() for part in attribute.split(".")),
            f"Function.name is {self.name!r}; give MODULE:NAME or PATH/FILE.py:NAME, such as "
            "pe_lab.positional:apply_p_rope.",
        )
        given = self.settings.items() if isinstance(self.settings, Mapping) else self.settings
        pairs = sorted((str(name), _plain(value, f"{self.name}: {name}")) for name, value in given)
        object.__setattr__(self, "settings", tuple(pairs))

    @property
    def display_name(self) -> str:  # type: ignore[override]
        return self.name.rpartition(":")[2]

    def encode(self, params: Params, q: Queries, k: Keys, positions: Positions, x: Hidden) -> tuple[Queries, Keys]:
        f, settings = _found(self.name, self.digest), dict(self.settings)
        positions = jnp.broadcast_to(positions, q.shape[:2])

        def applied(inputs: Array) -> Array:
            out = jnp.asarray(call(f, "", inputs, positions, inputs.shape[-1], **settings))
            require(
                out.shape == inputs.shape,
                f"{self.name} returned shape {list(out.shape)} for inputs {list(inputs.shape)}; it must keep theirs.",
            )
            return out.astype(inputs.dtype)

        return applied(q), applied(k)


def _plain(value: Any, where: str) -> Any:
    """The value with tuples for lists, so that it can be hashed."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item, where) for item in value)
    finite = not isinstance(value, float) or math.isfinite(value)
    require(
        value is None or (isinstance(value, str | bool | int | float) and finite),
        f"{where} is {value!r}; a setting is a finite number, a string, true, false, None, or a list of them.",
    )
    return value


def _name_of(f: Any) -> str:
    """The name by which a function can be imported again."""
    module, name = getattr(f, "__module__", None), getattr(f, "__qualname__", None)
    if not callable(f) or not module or not name or "<" in name:
        raise ConfigError(
            f"function: {f!r} has no name in a module; write 'def NAME(inputs, positions, head_dim, ...)' in one, "
            "not inside a function, and give its settings by keyword."
        )
    if module != "__main__" and _is_importable(module):
        parts = module.split(".")
        parents = [".".join(parts[: n + 1]) for n in range(len(parts))]
        # The shortest public name stays when files move.
        module = next((p for p in parents if getattr(sys.modules.get(p), name.partition(".")[0], None) is f), module)
        return f"{module}:{name}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return f"{module}:{name}"  # an interactive session: found in this process only
    path = Path(file).resolve()
    inside = path.is_relative_to(Path.cwd())
    return f"{os.path.relpath(path) if inside else path}:{name}"


def _is_importable(module: str) -> bool:
    """Whether a fresh process with this sys.path could import a module; recipes are loaded from files instead."""
    top = module.partition(".")[0]
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(top, None) is not None for find in finders if find is not None)


def _found(name: str, digest: str) -> Callable[..., Any]:
    """The function of a name, from modules that are imported already: a checkpoint names it, and must not run code.

    Raises:
      EncodingError: it is not there, or its source is not the recorded one.
    """
    if (name, digest) in _known:
        return _known[name, digest]
    module, _, attribute = name.rpartition(":")
    if module.partition(".")[0] == "pe_lab" and not module.endswith(".py"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    other = ""
    for one in _modules(module):
        found = functools.reduce(lambda at, part: getattr(at, part, None), attribute.split("."), one)
        if not callable(found):
            continue
        now = digest_of(found) if digest else ""
        if now == digest:
            _known[name, digest] = found
            return found
        other = now
    if other:
        raise EncodingError(
            f"The encoding is the function {name}, whose source had the digest {digest} and now has {other}. Bring the "
            "former source back, or give the layers the present function."
        )
    raise EncodingError(
        f"The encoding is the function {name}, which is not imported. Import it first: --encodings={module}, or "
        "pe_lab.load(..., encodings=...)."
    )


def _modules(name: str) -> list[ModuleType]:
    """The imported modules of a name or of a file, which may have moved."""
    if not name.endswith(".py"):
        return [sys.modules[name]] if name in sys.modules else []
    files = [(one, getattr(one, "__file__", None)) for one in list(sys.modules.values())]
    same = [(one, Path(file)) for one, file in files if file and Path(file).name == Path(name).name]
    return [one for one, _ in sorted(same, key=lambda pair: pair[1].resolve() != Path(name).resolve())]

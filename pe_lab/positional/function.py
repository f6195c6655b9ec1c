"""A function of queries or keys and positions as an encoding: `function(apply_p_rope, rope_percentage=0.75)`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.config import OMIT_DEFAULT
from pe_lab.errors import ConfigError, EncodingError, call
from pe_lab.positional.hooks import Encoding, Params
from pe_lab.positional.registry import digest_of, register
from pe_lab.positional.scalings import require

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

    def encode(
        self,
        params: Params,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        positions: Int[Array, "#B T"],
        x: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
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

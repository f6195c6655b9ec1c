"""The run-time checker of annotations, which conftest.py puts on every function of pe_lab."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

# An int is a float where a float is asked for, as in every other Python (PEP 484).
_check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))
_jaxtyped = jaxtyping.jaxtyped


def check(function: Callable) -> Callable:
    """A function within another one would be compiled by beartype at each call of that one: it is not checked."""
    return function if "<locals>" in function.__qualname__ else _check(function)


def jaxtyped(*, typechecker: Callable) -> Callable:
    """`jaxtyping.jaxtyped` where there are shapes to compare; elsewhere beartype alone, which takes next to no time."""

    def decorate(target: Any) -> Any:
        if inspect.isclass(target) or not target.__module__.startswith("pe_lab.") or needs_shapes(target):
            return _jaxtyped(typechecker=typechecker)(target)
        return _unless_disabled(target, check(target))

    return decorate


def _unless_disabled(function: Callable, checked: Callable) -> Callable:
    """As jaxtyping does: a test that disables the checks passes arguments of any type."""
    if checked is function:
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        return (function if jaxtyping.config.jaxtyping_disable else checked)(*arguments, **named)

    return call


def needs_shapes(function: Callable) -> bool:
    """Whether an annotation, which is a string, has the shape of an array, or a name that is not defined (yet)."""
    if "<locals>" in function.__qualname__:
        return False
    known = {**vars(builtins), **function.__globals__}
    texts = (re.sub(r"\".*?\"|'.*?'", "", text) for text in function.__annotations__.values())
    names = {name for text in texts for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)}
    return any(name not in known or _is_shape(known[name]) for name in names)


def _is_shape(value: Any) -> bool:
    return getattr(value, "__module__", None) == "jaxtyping" or any(map(_is_shape, typing.get_args(value)))


def install(modules: list[str]) -> None:
    """Checks modules that are imported from now on."""
    jaxtyping.jaxtyped = jaxtyped  # what the hook writes above every function
    jaxtyping.install_import_hook(modules, "type_checks.check")

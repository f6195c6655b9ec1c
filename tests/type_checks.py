"""The run-time checker of annotations, which conftest.py puts on every function of pe_lab."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype

# An int is a float where a float is asked for, as in every other Python (PEP 484).
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    """A function within another one would be compiled by beartype at each call of that one: it is not checked."""
    return function if "<locals>" in function.__qualname__ else _check(function)

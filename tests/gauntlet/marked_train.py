"""`pe_lab.train`, saying when a restore and a validation begin and end: moments that leave no trace in files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

RESTORE, VALIDATION = "restore", "validation"


def begins(output: str, what: str) -> int:
    """How many have begun."""
    return output.count(_mark(what, "begins"))


def inside(output: str, what: str) -> bool:
    """Whether the last that was said of it is that it begins."""
    return output.rfind(_mark(what, "begins")) > output.rfind(_mark(what, "ends"))


def _mark(what: str, event: str) -> str:
    return f"[{what} {event}]"


def _marked(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        os.write(2, f"{_mark(what, 'begins')}\n".encode())
        found = function(*args, **kwargs)
        os.write(2, f"{_mark(what, 'ends')}\n".encode())
        return found

    return run


if __name__ == "__main__":  # what reads the output does not need JAX
    from pe_lab.checkpoints.store import Store
    from pe_lab.train import main
    from pe_lab.training import loop

    Store.restore = _marked(Store.restore, RESTORE)
    make = loop.validation

    def validation(*args: Any) -> Any:
        made = make(*args)
        return made._replace(measure=_marked(made.measure, VALIDATION))

    loop.validation = validation
    sys.exit(main())

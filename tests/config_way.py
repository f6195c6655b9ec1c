"""The way of a config to the first training step: the files whose functions get it, or a part of it, as an argument.

`python tests/config_way.py --config=RECIPE --workdir=DIRECTORY` trains in this process up to the dispatch of the first
step, and prints them in the order in which the config reaches them, with the number of calls. `test_config_way.py`
bounds their number. A part is any dataclass of `pe_lab/config.py`; what carries one (a plan, a run, a model) is counted
apart.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pe_lab
import pe_lab.config
from pe_lab.train import main

PACKAGE = os.path.dirname(pe_lab.__file__)
PARTS = tuple(
    kind
    for kind in vars(pe_lab.config).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == "pe_lab.config"
)


class _FirstStep(BaseException):
    """The first step is about to be dispatched."""


class Way:
    """The files that a config has passed.

    Attributes:
      calls: by file, of functions that get a part of it.
      carriers: by file, of functions that get what carries a part: a dataclass with a field of that type.
      stays: how often the file changed from one such call to the next.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.carriers: Counter[str] = Counter()
        self.stays, self._last = 0, ""

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names]
        file = os.path.relpath(code.co_filename, PACKAGE)
        if any(isinstance(value, PARTS) for value in values):
            self.calls[file] += 1
            self.stays += file != self._last
            self._last = file
        elif any(_carries(value) for value in values):
            self.carriers[file] += 1


def _carries(value: Any) -> bool:
    kind = type(value)
    if not dataclasses.is_dataclass(kind):
        return False
    return any(isinstance(getattr(value, field.name, None), PARTS) for field in dataclasses.fields(kind))


def way(argv: list[str]) -> Way:
    """The way of the config of a command line of `pe_lab.train`, which exits here if it ends before the first step."""
    from pe_lab.training import loop

    compile_train_step, found = loop.compile_train_step, Way()

    def compiled(*args: Any, **keys: Any) -> Any:
        compile_train_step(*args, **keys)

        def first(*_: Any) -> None:
            sys.setprofile(None)
            raise _FirstStep

        return first

    loop.compile_train_step = compiled
    sys.setprofile(found.see)
    try:
        sys.exit(main(argv))
    except _FirstStep:
        pass
    finally:
        sys.setprofile(None)
        loop.compile_train_step = compile_train_step
    return found


if __name__ == "__main__":
    passed = way(sys.argv[1:])
    print(f"a config passes {len(passed.calls)} files in {passed.stays} stays before the first step")
    for file, count in passed.calls.items():
        print(f"  {file} {count}")
    others = [file for file in passed.carriers if file not in passed.calls]
    print(f"{len(others)} others get what carries a part of it: {', '.join(others)}")

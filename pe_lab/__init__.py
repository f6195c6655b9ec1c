"""pe_lab: pretrain decoder language models; choose, rescale, drop and measure their positional encoding."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

from pe_lab.output import open_standard_streams

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel, load
    from pe_lab.training.fit import fit

__all__ = ["LanguageModel", "__version__", "fit", "load"]


def _interrupted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Says in one line that a command was interrupted while its imports ran."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # so it is while `python -m pe_lab.COMMAND` finds the command
    open_standard_streams()  # before an import opens a file
    sys.excepthook = _interrupted


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a command can choose its platform before JAX starts.
    if name == "__version__":
        return importlib.metadata.version("pe-lab")
    if name == "fit":
        from pe_lab.training.fit import fit

        return fit
    if name in __all__:
        return getattr(importlib.import_module("pe_lab.language_model"), name)
    raise AttributeError(f"module 'pe_lab' has no attribute '{name}'")


def __dir__() -> list[str]:
    imported = (name.split(".")[1] for name in sys.modules if name.startswith("pe_lab."))
    return sorted({*__all__, *imported})

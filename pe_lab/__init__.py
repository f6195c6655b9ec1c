"""pe_lab: pretrain decoder language models; choose, rescale, drop and study their positional encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel, load

__all__ = ["LanguageModel", "load"]


def __getattr__(name: str) -> Any:
    # On first use: `import pe_lab` alone stays quick, and a verb can choose its platform before JAX starts.
    if name in __all__:
        from pe_lab import language_model

        return getattr(language_model, name)
    raise AttributeError(f"module 'pe_lab' has no attribute '{name}'")

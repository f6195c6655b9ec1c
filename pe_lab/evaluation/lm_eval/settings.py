"""Parses the values of `--model_args`; a bad value is a `ConfigError` that names its setting."""

from __future__ import annotations

import math
import re
from typing import Any

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError
from pe_lab.language_model import LanguageModel


def whole_number(name: str, given: Any, low: int, high: int) -> int:
    """A whole number of low to high, also from a text."""
    try:
        number = int(str(given))
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"--model_args: {name} is {given!r}; give a whole number from {low:,} to {high:,}.")
    return number


def yes_or_no(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"--model_args: {name} is {given!r}; give True or False.")
    return given


def positive(name: str, given: Any) -> float:
    """A number above 0, also from a text."""
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(
            f"--model_args: {name} is {given!r}; give a number above 0, such as the one that "
            "`python -m pe_lab.evaluate --suite=beta` fitted."
        )
    return number


def sequences_at_once(given: Any) -> int | None:
    """A number of sequences; None for as many as memory allows."""
    if given is None or str(given).startswith("auto"):
        return None
    if not re.fullmatch("[0-9]{1,9}", str(given)) or int(given) < 1:
        raise ConfigError(f"batch_size is {given}; give a whole number of at least 1, or auto.")
    return int(given)


def add_bos(given: Any, tokenizer: Tokenizer) -> bool | None:
    """Whether BOS is put before texts; None: the tokenizer's own habit."""
    if given is None or not yes_or_no("add_bos_token", given):
        return given
    if tokenizer.bos_id is None:
        raise ConfigError(
            "--model_args: add_bos_token=True, and the tokenizer has no beginning-of-text token. Leave it out; "
            "prefix_token_id names the token before texts without a context."
        )
    return True


def with_encoding(
    lm: LanguageModel, positional: Any, drop: Any, logit_scale: Any, attention: str | None
) -> LanguageModel:
    """The model under another encoding, or with another implementation of attention."""
    if yes_or_no("drop", drop):
        lm = lm.drop_positional()
    if positional is not None or logit_scale is not None:
        scale = None if logit_scale is None else positive("logit_scale", logit_scale)
        lm = lm.with_positional(lm.layers if positional is None else positional, scale)
    return lm if attention is None else lm.with_attention(attention)

"""Hypotheses about frequencies and the factor on cos and sin: bases, scalings, YaRN's ramp, the length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from pe_lab.checkpoints.audit.faults import AuditedModel, Hypothesis
from pe_lab.checkpoints.audit.misreadings import Misapplication, Misapplied
from pe_lab.positional import DynamicYarn, Encoding, NTKByParts, Scaling, Yarn

COMMON_BASE = 10000.0  # what a runtime rotates with that finds no base where it looks


def _scaled(
    at: AuditedModel, fault: str, what: str, change: Callable[[Any], Scaling | None], kinds: Any = Scaling
) -> Hypothesis:
    """Another scaling in the layers that have one of these kinds."""
    having = [n for n in at.rotated if isinstance(at.encodings[n].scaling, kinds)]
    return at.changed(fault, what, lambda e: dataclasses.replace(e, scaling=change(e.scaling)), having)


def _misapplied(at: AuditedModel, fault: str, what: str, how: Misapplication, kinds: Any = Scaling) -> Hypothesis:
    return _scaled(at, fault, what, lambda scaling: Misapplied(scaling, how), kinds)


def bases_and_scalings(at: AuditedModel) -> Iterator[Hypothesis]:
    """Bases and scalings ignored, scalings applied twice, attention factors missing, rounded frequencies."""
    base = f"are rotated with base {COMMON_BASE:,.0f}"
    bases = sorted({kind.base for kind in at.rotations})
    own = f"{bases[0]:,.10g}" if len(bases) == 1 else "their own"

    def common(encoding: Any) -> Encoding:
        return dataclasses.replace(encoding, base=COMMON_BASE)

    yield at.changed("base ignored", f"{base} instead of {own}", common, at.rotated)
    yield _scaled(at, "scaling ignored", "are rotated without their scaling", lambda scaling: None)
    what = f"{base} and without scaling"
    unscaled = lambda e: dataclasses.replace(common(e), scaling=None)  # noqa: E731
    if any(kind.scaling is not None for kind in at.rotations):
        yield at.changed("base and scaling ignored", what, unscaled, at.rotated)
    twice, factor = "scaling applied twice", "attention factor"
    yield _misapplied(at, twice, "are rotated with a scaling that is applied twice", "twice")
    what = "are rotated with scaling and attention factor applied twice"
    yield _misapplied(at, twice, what, "twice with its factor")
    divisible = tuple(type(kind.scaling) for kind in at.rotations if hasattr(kind.scaling, "factor"))
    what = "are rotated at positions divided by the factor, with frequencies that are scaled already"
    yield _misapplied(at, twice, what, "divided again", divisible)
    yield _misapplied(at, factor, "are rotated without their attention factor", "no factor")
    yield _misapplied(at, factor, "are rotated with the attention factor applied twice", "factor twice")
    what = "are rotated without their scaling, but with its attention factor"
    yield _misapplied(at, "scaling ignored", what, "factor alone")
    what = "are rotated with frequencies that were rounded to bfloat16"
    rounded = lambda e: dataclasses.replace(e, scaling=Misapplied(e.scaling, "rounded"))  # noqa: E731
    yield at.changed("frequencies in bfloat16", what, rounded, at.rotated)


def yarn(at: AuditedModel) -> Iterator[Hypothesis]:
    """YaRN's ramp over half the dimensions, and its settings that some runtimes have fixed."""
    kinds, ramp = (Yarn, NTKByParts), "YaRN's ramp"

    def plain(scaling: Yarn | NTKByParts) -> Yarn:
        return scaling if isinstance(scaling, Yarn) else Yarn(**vars(scaling), attention_factor=1.0)

    what = "are rotated with YaRN's ramp over half the dimensions"
    yield _scaled(at, ramp, what, lambda s: Misapplied(plain(s), "half ramp"), kinds)
    what = f"{what}, at positions divided by the factor as well"
    yield _scaled(at, ramp, what, lambda s: Misapplied(plain(s), "half ramp divided"), kinds)
    what = "are rotated with the published betas, rounding and attention factor of YaRN"
    yield _scaled(at, ramp, what, lambda s: Yarn(s.factor, s.original_length), kinds)
    what = "are rotated with the published betas and rounding of YaRN's ramp"
    published = lambda s: dataclasses.replace(s, beta_fast=32.0, beta_slow=1.0, truncate=True)  # noqa: E731
    yield _scaled(at, ramp, what, published, (*kinds, DynamicYarn))
    what = "are rotated with YaRN's published attention factor instead of their own"
    computed = lambda s: dataclasses.replace(plain(s), attention_factor=None, mscale=0.0, mscale_all_dim=0.0)  # noqa: E731
    yield _scaled(at, "attention factor", what, computed, kinds)


def lengths(at: AuditedModel) -> Iterator[Hypothesis]:
    """Encodings that depend on the length, computed for another one: LongRoPE's short table for its long one."""
    following = tuple(n for n, layer in enumerate(at.layers) if layer.follows_length)
    fault, original = "length ignored", max((getattr(k.scaling, "original_length", 0) for k in at.rotations), default=0)
    sentence = at.say(following, "are encoded as for sequences of the training length, whatever their length is")
    yield Hypothesis(fault, sentence, lambda c: c._replace(length=None), following)
    sentence = at.say(
        following, "are encoded as for sequences just beyond the training length, though these are shorter"
    )
    longer = lambda c: c._replace(length=max(c.length or 0, original + 1))  # noqa: E731
    yield Hypothesis(fault, sentence, longer, following)
    for factor in sorted({k.scaling.factor for k in at.rotations if hasattr(k.scaling, "factor")}):
        sentence = at.say(following, f"are encoded as for sequences of {original * factor:,.0f} tokens")
        longest = lambda c, factor=factor: c._replace(length=int(original * factor))  # noqa: E731
        yield Hypothesis(fault, sentence, longest, following)

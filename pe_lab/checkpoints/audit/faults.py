"""The faults that the audit knows. One is a name, what to look at where it is found, and its hypotheses.

A new fault is a decorated function here; the likely ones come first. `self_test.INJECTIONS` has faulty runtimes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pe_lab.checkpoints.audit.hypotheses import (
    AnglesInBfloat16,
    AuditedModel,
    ChannelOrder,
    Computation,
    HalfRamp,
    Hypothesis,
    Misapplied,
    QueriesLater,
    bfloat16,
    rotary,
)
from pe_lab.positional import (
    DynamicYarn,
    Encoding,
    Layer,
    Layout,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Scaling,
    Yarn,
    channel_order,
)

COMMON_BASE = 10000.0  # what a runtime rotates with that finds no base where it looks
OTHER_BASES = (1e5, 5e5, 1e6, 5e6)  # of another model, whose default it is
PERIODS = range(2, 7)  # of patterns in which one layer of so many is not rotated
OFFSETS = {1: "one too late", 2: "two too late", -1: "one too early", -2: "two too early"}


class Fault(NamedTuple):
    """A fault of a runtime.

    Attributes:
      advice: what to look at.
      hypotheses: the ways in which a model may have it; those that change nothing are left out.
    """

    advice: str
    hypotheses: Callable[[AuditedModel], Iterable[Hypothesis]]


FAULTS: dict[str, Fault] = {}


def fault(name: str, advice: str) -> Callable[..., Any]:
    """A decorator: the function yields the hypotheses of a new fault."""

    def register(function: Callable[[AuditedModel], Iterable[Hypothesis]]) -> Any:
        FAULTS[name] = Fault(advice, function)
        return function

    return register


def hypotheses(at: AuditedModel) -> list[Hypothesis]:
    """All hypotheses for a model, without those that change nothing."""
    return [one.of(name) for name, known in FAULTS.items() for one in known.hypotheses(at) if one.layers]


def described(encoding: Any) -> str:
    """An encoding in a sentence: `base 10,000`, `base 10,000 and Yarn`."""
    return f"base {encoding.base:,.10g}" + (f" and {type(encoding.scaling).__name__}" if encoding.scaling else "")


def _with_common_base(e: Any) -> Any:
    return dataclasses.replace(e, base=COMMON_BASE)


def _misapplied(how: Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, float]]) -> Callable[[Any], Scaling]:
    return lambda scaling: Misapplied(scaling, how)


def _has_ramp(scaling: Scaling) -> bool:
    return isinstance(scaling, Yarn | NTKByParts)


def _as_yarn(scaling: Yarn | NTKByParts) -> Yarn:
    return scaling if isinstance(scaling, Yarn) else Yarn(**vars(scaling), attention_factor=1.0)


@fault(
    "base ignored",
    "Look where the runtime reads the base: transformers 4 and most servers read `rope_theta`, transformers 5 writes "
    "it into `rope_parameters`. Give the config both.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    bases = " or ".join(f"{base:,.10g}" for base in sorted({kind.base for kind in at.rotations}))
    for base in (COMMON_BASE, *OTHER_BASES):
        what = f"are rotated with base {base:,.0f} instead of {bases}"
        yield at.rotating(what, lambda e, base=base: dataclasses.replace(e, base=base))
    for kind in at.rotations if len(at.rotations) > 1 else ():
        what = f"are rotated with base {COMMON_BASE:,.0f} instead of {kind.base:,.10g}"
        yield at.rotating(what, lambda e, kind=kind: _with_common_base(e) if e == kind else e)


@fault(
    "scaling ignored",
    "Look where the runtime reads the scaling: `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5), "
    "with `rope_type` inside; and whether it knows this kind.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    yield at.scaled("are rotated without their scaling", lambda scaling: None, some=True)
    what = "are rotated without their scaling, but with its attention factor"
    yield at.scaled(what, _misapplied(lambda own, scaled, factor: (own, factor)))


@fault(
    "base and scaling ignored",
    "The runtime finds neither where it looks: give the config the keys of both majors of transformers, `rope_theta` "
    "and `rope_scaling` beside `rope_parameters`.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    if any(kind.scaling is not None and kind.base != COMMON_BASE for kind in at.rotations):
        what = f"are rotated with base {COMMON_BASE:,.0f} and without scaling"
        yield at.rotating(what, lambda e: dataclasses.replace(_with_common_base(e), scaling=None))


@fault(
    "attention factor",
    "Look at the factor on cos and sin: `attention_factor`, `mscale` and `mscale_all_dim`, and where the runtime "
    "multiplies by it.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    what = "are rotated without their attention factor"
    yield at.scaled(what, _misapplied(lambda own, scaled, factor: (scaled, 1.0)))
    what = "are rotated with the attention factor applied twice"
    yield at.scaled(what, _misapplied(lambda own, scaled, factor: (scaled, factor**2)))
    published = dict(attention_factor=None, mscale=0.0, mscale_all_dim=0.0)
    what = "are rotated with YaRN's published attention factor instead of their own"
    yield at.scaled(what, lambda scaling: dataclasses.replace(_as_yarn(scaling), **published), _has_ramp)


@fault(
    "scaling applied twice",
    "Look for a second place that scales: positions divided by the factor beside scaled frequencies, or a converter "
    "that writes scaled frequencies and the scaling.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    what = "are rotated with a scaling that is applied twice"
    yield at.scaled(what, _misapplied(lambda own, scaled, factor: (scaled * scaled / own, factor)))
    what = "are rotated with scaling and attention factor applied twice"
    yield at.scaled(what, _misapplied(lambda own, scaled, factor: (scaled * scaled / own, factor**2)))

    def divided_again(s: Any) -> Scaling:
        return Misapplied(s, lambda own, scaled, factor: (scaled / s.factor, factor))

    what = "are rotated at positions divided by the factor, with frequencies that are scaled already"
    yield at.scaled(what, divided_again, lambda scaling: hasattr(scaling, "factor"))


@fault(
    "YaRN's ramp",
    "Look at the function that finds the ends of the ramp: its dimension is that of the rotated channels of a head, "
    "not half of it; and at `beta_fast`, `beta_slow` and `truncate`.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    what = "are rotated with YaRN's ramp over half the dimensions"
    yield at.scaled(what, lambda s: HalfRamp(_as_yarn(s)), _has_ramp)

    def divided(s: Any) -> Scaling:
        return Misapplied(HalfRamp(_as_yarn(s)), lambda own, scaled, factor: (scaled / s.factor, factor))

    yield at.scaled(f"{what}, at positions divided by the factor as well", divided, _has_ramp)
    what = "are rotated with the published betas, rounding and attention factor of YaRN"
    yield at.scaled(what, lambda s: Yarn(s.factor, s.original_length), _has_ramp)
    published = dict(beta_fast=32.0, beta_slow=1.0, truncate=True)
    what = "are rotated with the published betas and rounding of YaRN's ramp"
    kinds = Yarn | NTKByParts | DynamicYarn
    yield at.scaled(what, lambda s: dataclasses.replace(s, **published), lambda s: isinstance(s, kinds))


@fault("length ignored", "Look at the length that the runtime computes the frequencies for, and when it does it anew.")
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    """LongRoPE's short table for its long one, dynamic NTK of another length."""
    following = tuple(n for n, layer in enumerate(at.layers) if layer.follows_length)
    original = max((getattr(kind.scaling, "original_length", 0) for kind in at.rotations), default=0)
    factors = sorted({kind.scaling.factor for kind in at.rotations if hasattr(kind.scaling, "factor")})
    for length, tokens in (
        (None, "the training length, whatever their length is"),
        (original + 1, "just more than the training length, though these are shorter"),
        *((int(original * factor), f"{original * factor:,.0f} tokens") for factor in factors),
    ):

        def other(c: Computation, length: int | None = length) -> Computation:
            return c._replace(length=max(c.length or 0, length) if length == original + 1 else length)

        yield Hypothesis(at.say(following, f"are encoded as for sequences of {tokens}"), following, other)


@fault(
    "proportional and partial",
    "Look at `rope_type` and `partial_rotary_factor`: `proportional` keeps the first frequencies of the whole head, a "
    "partial rotation fits all of them into its first channels.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    """Partial RoPE as p-RoPE, and the reverse: in frequencies, in pairs of channels, in both; and the whole head.

    Partial RoPE pairs channels within those that rotate, p-RoPE over the whole head.
    """
    K = [one.head_dim for one in at.heads]
    partial = [n for n in at.rotated if isinstance(at.encodings[n], PartialRope)]
    portions = [n for n in at.rotated if isinstance(e := at.encodings[n], Rope) and 0 < e.fraction < 1]
    # The channels that rotate: those of partial RoPE, and those that it would rotate instead of p-RoPE.
    width = {n: at.encodings[n].rotated_channels(K[n]) for n in partial}
    width |= {n: 2 * int(at.encodings[n].fraction * K[n] // 2) for n in portions}
    half = {n: channel_order(Layout("half", channels), K[n]) for n, channels in width.items()}
    whole = {n: Rope(at.encodings[n].base, 1.0, at.encodings[n].scaling) for n in width}

    def other(n: int) -> Encoding:
        e = at.encodings[n]
        if n in partial:  # half a channel is rounded off
            return Rope(e.base, (width[n] + 0.5) / K[n], e.scaling)
        return PartialRope(e.base, width[n] / K[n], e.scaling)

    for among, orders, name, pairing in (
        (partial, {n: np.argsort(half[n]) for n in partial}, "p-RoPE", "over the whole head"),
        (portions, {n: half[n] for n in portions}, "partial RoPE", "within the rotated channels"),
    ):
        what = f"are rotated with the frequencies of {name}, in their own pairs of channels"
        spectrum = at.given(what, {n: other(n) for n in among})
        sentence = at.say(among, f"have pairs of channels {pairing}, at their own frequencies")
        pairs = at.reordered(sentence, orders, ("query", "key", "norm"))
        all_channels = at.given("are rotated on the whole head", {n: whole[n] for n in among})
        yield from (spectrum, pairs)
        yield spectrum.then(pairs, at.say(among, f"are rotated as {name}, with pairs of channels {pairing}"))
        yield all_channels.then(pairs, all_channels.sentence) if among is partial else all_channels


@fault(
    "head size",
    "Look at the head size that frequencies are computed for: that of the layer, or of the others (`head_dim` and "
    "`global_head_dim`).",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    """base^(-2i / K') with the K' of other layers, for a portion of these channels or of the layer's own."""
    for other in sorted({one.head_dim for one in at.heads}):
        for of_layer, what in ((False, "and as many pairs"), (True, "for the pairs of their own")):

            def sized(n: int, one: Layer, other: int = other, of_layer: bool = of_layer) -> Layer:
                ratio = at.heads[n].head_dim / other
                fraction = one.encoding.fraction / (1 if of_layer else ratio)
                return dataclasses.replace(one, encoding=Rope(one.encoding.base**ratio, min(fraction, 1.0)))

            plain = [n for n in at.rotated if isinstance(e := at.encodings[n], Rope) and e.scaling is None]
            among = [n for n in plain if at.heads[n].head_dim != other]
            yield at.edited(f"are rotated with the frequencies of heads of {other} channels, {what}", sized, among)


@fault(
    "query/key permutation",
    "Look at the converter: `q_proj` and `k_proj` are permuted where one side pairs channels i and i + K/2, and the "
    "other 2i and 2i + 1; keys with the number of key heads.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    """Pairs (i, i + K/2) taken for (2i, 2i + 1) and the reverse, of both sides or one; the wrong number of heads."""
    K = [one.head_dim for one in at.heads]
    if not at.rotated:
        return
    # A layer without rotation is permuted with the others, as a whole head.
    width = [e.rotated_channels(K[n]) if isinstance(e, PartialRope) else K[n] for n, e in enumerate(at.encodings)]
    inverse = [np.argsort(channel_order(Layout("half", r), K[n])) for n, r in enumerate(width)]
    taken = {n: inverse[n][channel_order(Layout("interleaved", r), K[n])] for n, r in enumerate(width)}
    for orders, what in (
        (taken, "channels i and i + K/2, a pair of queries and keys, are taken for 2i and 2i + 1"),
        (
            {n: np.argsort(order) for n, order in taken.items()},
            "channels 2i and 2i + 1, a pair of queries and keys, are taken for i and i + K/2",
        ),
    ):
        yield at.reordered(what, orders, ("query", "key", "norm"))
        if at.values_are_keys:
            yield at.reordered(f"{what}, and so are values that are keys", orders, ("query", "key", "norm", "value"))
        if at.model.qk_norm != "none":
            yield at.reordered(f"{what}, but not in the QK-norm", orders, ("query", "key"))
        yield at.reordered(f"{what}, in queries alone", orders, ("query", "norm"))
        yield at.reordered(f"{what}, in keys alone", orders, ("key", "norm"))
    H = at.model.heads
    grouped = {n: one.num_kv_heads for n, one in enumerate(at.heads) if one.num_kv_heads != H}
    if grouped and all((G * K[n]) % (2 * H) == 0 and width[n] == K[n] for n, G in grouped.items()):
        for reverse in (False, True):
            orders = []
            for n, G in grouped.items():
                own, wrong = (np.arange(G * K[n]).reshape(heads, 2, -1).swapaxes(1, 2).ravel() for heads in (G, H))
                order = own[np.argsort(wrong)] if reverse else wrong[np.argsort(own)]
                orders.append(ChannelOrder((n,), None, tuple(order.tolist())))

            def permuted(c: Computation, orders: list[ChannelOrder] = orders) -> Computation:
                return c._replace(orders=(*c.orders, *orders))

            what = "the keys are permuted with the number of query heads instead of that of key heads"
            yield Hypothesis(what, tuple(grouped), permuted)


_NO_ROPE = "Look at `no_rope_layers`, or at the rule by which the runtime chooses layers without rotation."


def _patterns(at: AuditedModel) -> Iterator[tuple[str, dict[int, Encoding]]]:
    """Each second, third, ... layer is not rotated, and the others are."""
    if not at.rotations:
        return
    common = max(at.rotations, key=at.encodings.count)
    for period in PERIODS:
        for phase in (0, period - 1):
            if bare := [n for n in at.every if n % period == phase]:
                rotated = [n for n in at.bare if n not in bare]
                what = at.say(bare, f"are not rotated, one of {period}, and no others")
                yield what, dict.fromkeys(rotated, common) | dict.fromkeys(bare, NoPE())


@fault("unrotated layers rotated", _NO_ROPE)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    for kind in at.rotations:
        what = f", which the config leaves without encoding, are rotated with {described(kind)}"
        yield at.given(what, dict.fromkeys(at.bare, kind), some=True)
    for sentence, encodings in _patterns(at):
        if all(n in at.bare for n, encoding in encodings.items() if isinstance(encoding, NoPE)):
            yield dataclasses.replace(at.given("", encodings), sentence=sentence)


@fault("rotated layers not rotated", _NO_ROPE)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    yield at.rotating("are not rotated", lambda e: NoPE(), some=True)
    for kind in at.rotations:
        of_kind = [n for n in at.rotated if at.encodings[n] == kind]
        yield at.given(f", of {described(kind)}, are not rotated", dict.fromkeys(of_kind, NoPE()))
    for sentence, encodings in _patterns(at):
        yield dataclasses.replace(at.given("", encodings), sentence=sentence)
    if at.bare:
        for kind in at.rotations:
            inverted = dict.fromkeys(at.bare, kind) | dict.fromkeys(at.rotated, NoPE())
            sentence = at.say(at.bare, "are rotated, instead of those that the config rotates")
            yield dataclasses.replace(at.given("", inverted), sentence=sentence)


@fault("windows ignored", "Look at `sliding_window`, `use_sliding_window` and `layer_types`.")
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    yield at.windowed("have no window", [None for _ in at.every], some=True)


@fault(
    "windows off by one",
    "Look at the mask: a window of W tokens contains the query's own, so that i - j < W; kernels take W - 1 as the "
    "left side.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    for by, what in ((1, "have windows of one token more"), (-1, "have windows of one token less")):
        if all(size is None or size + by > 0 for size in at.windows):
            yield at.windowed(what, [size and size + by for size in at.windows])


@fault(
    "windows on the wrong layers",
    "Look at `layer_types` and `sliding_window_pattern`: whether layers count from 0 or from 1, and which kind comes "
    "first.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    sizes = sorted({size for size in at.windows if size is not None})
    for size in sizes:
        yield at.windowed(f"have a window of {size:,}", [size for _ in at.every], some=True)
    if sizes and None in at.windows:
        inverted = [sizes[0] if size is None else None for size in at.windows]
        yield at.windowed("have windows where the config has none, and none where it has them", inverted)
    for by, side in ((1, "before"), (-1, "after")):
        moved = [at.layers[(n - by) % len(at.layers)] for n in at.every]
        yield at.windowed(f"have the window of the layer {side}", [one.window for one in moved])
        if sizes:
            what = f"have the window and the encoding of the layer {side}"
            yield at.edited(what, lambda n, one, moved=moved: moved[n], at.every)


_BY_TYPE = (
    "Look at which rope parameters each type of layer gets: `rope_theta` and `rope_local_base_freq`, or "
    "`rope_parameters` by `layer_types`."
)


@fault("bases exchanged", _BY_TYPE)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    for i, one in enumerate(at.rotations):
        for two in at.rotations[i + 1 :]:
            swapped = {n: two if at.encodings[n] == one else one for n in at.rotated if at.encodings[n] in (one, two)}
            yield at.given(f"have exchanged encodings, {described(one)} against {described(two)}", swapped)
            bases = {n: dataclasses.replace(at.encodings[n], base=other.base) for n, other in swapped.items()}
            yield at.given(f"have exchanged bases, {one.base:,.10g} against {two.base:,.10g}, at their scalings", bases)


@fault("encodings on the wrong layers", _BY_TYPE)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    for kind in at.rotations:
        others = [n for n in at.rotated if at.encodings[n] != kind]
        yield at.given(f"are rotated with {described(kind)}", dict.fromkeys(others, kind), some=True)
        if kind.scaling is not None:
            what = f"are scaled with the {type(kind.scaling).__name__} of the others"
            yield at.rotating(what, lambda e, kind=kind: dataclasses.replace(e, scaling=kind.scaling))
    for by, side in ((1, "before"), (-1, "after")):
        moved = {n: at.encodings[(n - by) % len(at.layers)] for n in at.every}
        yield at.given(f"have the encoding of the layer {side}", moved)


@fault(
    "encoding ignored", "Look at which positional encodings the runtime knows beside rotations: ALiBi, learned tables."
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    for kind in dict.fromkeys(e for e in at.encodings if not rotary(e) and not isinstance(e, NoPE)):
        having = [n for n in at.every if at.encodings[n] == kind]
        yield at.given(f"have no {type(kind).__name__}", dict.fromkeys(having, NoPE()))


def _at_positions(sentence: str, layers: Iterable[int], change: Callable[[np.ndarray], np.ndarray]) -> Hypothesis:
    return Hypothesis(sentence, tuple(layers), lambda c: c._replace(positions=change(c.positions).astype(np.int32)))


def _beside(sentence: str, at: AuditedModel, change: Callable[[Layer, int | None], Layer]) -> Hypothesis:
    """`change` of the layers that rotate; it is given the length of the sequence, too."""

    def edit(c: Computation) -> Computation:
        return c._replace(layers=tuple(change(one, c.length) if rotary(one.encoding) else one for one in c.layers))

    return Hypothesis(sentence, tuple(at.rotated), edit)


@fault(
    "positions offset",
    "Look at the positions that the runtime gives to queries, and to the keys of its cache; and whether it counts them "
    "from 0 (OPT's table has two rows before the first).",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    """Of queries against keys, from one token on, and of all tokens.

    An offset of all positions changes no rotation, which knows distances alone: it shows in learned tables.
    """
    for by, side in ((1, "after"), (-1, "before")):

        def later(one: Layer, length: int | None, by: int = by) -> Layer:
            return dataclasses.replace(one, extras=(*one.extras, QueriesLater(one.encoding, by, length)))

        yield _beside(f"queries are rotated as if they stood one position {side} the keys of their tokens", at, later)
    absolute = [n for n, layer in enumerate(at.layers) if any(not one.relative for _, one in layer.acting())]
    for by, what in OFFSETS.items():
        yield _at_positions(f"all positions are {what}", absolute, lambda p, by=by: p + by)
    if at.begins and at.begins > 1:  # an error of all tokens begins at the second
        first = at.begins

        def restarted(p: np.ndarray) -> np.ndarray:
            return np.where(np.arange(len(p)) >= first, p - p[min(first, len(p) - 1)], p)

        def since(p: np.ndarray) -> np.ndarray:
            return np.arange(len(p)) >= first

        for by, side in ((1, "late"), (-1, "early")):
            what = f"positions from token {first:,} on are one too {side}, as if the cache had been counted wrong"
            yield _at_positions(what, at.rotated, lambda p, by=by: p + by * since(p))
        yield _at_positions(f"positions count from 0 again at token {first:,}", at.rotated, restarted)
        what = f"all tokens from token {first:,} on have position 0"
        yield _at_positions(what, at.rotated, lambda p: np.where(since(p), 0, p))


@fault(
    "positions in bfloat16",
    "Look at the dtype of positions before they are multiplied with frequencies: bfloat16 cannot count past 256.",
)
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    yield _at_positions("positions are rounded to bfloat16", at.rotated, lambda p: bfloat16(p.astype(np.float64)))

    def angles(one: Layer, length: int | None) -> Layer:
        extras = (*one.extras, AnglesInBfloat16(one.encoding, length))
        return dataclasses.replace(one, encoding=NoPE(), extras=extras)

    yield _beside("positions, frequencies and their products are rounded to bfloat16", at, angles)


@fault("frequencies in bfloat16", "Look at the dtype of the buffer `inv_freq`: a cast of the whole model rounds it.")
def _(at: AuditedModel) -> Iterator[Hypothesis]:
    what = "are rotated with frequencies that were rounded to bfloat16"
    round_them = _misapplied(lambda own, scaled, factor: (bfloat16(scaled), factor))
    yield at.rotating(what, lambda e: dataclasses.replace(e, scaling=round_them(e.scaling)))

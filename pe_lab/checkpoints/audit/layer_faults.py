"""Hypotheses about which layer has what: encodings and windows on the wrong layers, of all, of a pattern, of some."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pe_lab.checkpoints.audit.faults import AuditedModel, Hypothesis, described
from pe_lab.positional import Encoding, NoPE

BARE, NOT_ROTATED = "unrotated layers rotated", "rotated layers not rotated"
ENCODINGS, WINDOWS = "encodings on the wrong layers", "windows on the wrong layers"
PERIODS = range(2, 7)  # of patterns in which one layer of so many is not rotated


def encodings(at: AuditedModel) -> Iterator[Hypothesis]:
    """Encodings on the wrong layers: all alike, exchanged, shifted by a layer, in another pattern."""
    count = len(at.layers)
    for kind in at.rotations:
        of_kind = [n for n in at.rotated if at.encodings[n] == kind]
        others = [n for n in at.rotated if at.encodings[n] != kind]
        what = f", which have no encoding, are rotated with {described(kind)}"
        yield at.given(BARE, at.say(at.bare, what), dict.fromkeys(at.bare, kind))
        sentence = at.say(of_kind, f", of {described(kind)}, are not rotated")
        yield at.given(NOT_ROTATED, sentence, dict.fromkeys(of_kind, NoPE()))
        sentence = at.say(others, f"are rotated with {described(kind)}, as the others are")
        yield at.given(ENCODINGS, sentence, dict.fromkeys(others, kind))
        if kind.scaling is not None:
            scaled = lambda e, kind=kind: dataclasses.replace(e, scaling=kind.scaling)  # noqa: E731
            what = f"are scaled with the {type(kind.scaling).__name__} of the others"
            yield at.changed(ENCODINGS, what, scaled, at.rotated)
    yield at.given(NOT_ROTATED, "no layer is rotated", dict.fromkeys(at.rotated, NoPE()))
    for kind in dict.fromkeys(at.encodings[n] for n in range(count) if n not in at.rotated and n not in at.bare):
        having = [n for n in range(count) if at.encodings[n] == kind]
        sentence = at.say(having, f"have no {type(kind).__name__}")
        yield at.given("encoding ignored", sentence, dict.fromkeys(having, NoPE()))
    yield from _exchanged(at)
    if at.rotations:
        common = max(at.rotations, key=at.encodings.count)
        inverted = dict.fromkeys(at.bare, common) | dict.fromkeys(at.rotated, NoPE())
        yield at.given(BARE, at.say(at.bare, "are rotated, and the others are not"), inverted)
        for period in PERIODS:
            for phase in (0, period - 1):
                bare = [n for n in range(count) if n % period == phase]
                after = dict.fromkeys([n for n in at.bare if n not in bare], common) | dict.fromkeys(bare, NoPE())
                sentence = at.say(bare, f"are not rotated, one of {period}, and the others are")
                yield at.given(NOT_ROTATED if set(bare) - set(at.bare) else BARE, sentence, after)
    for by, side in ((1, "before"), (-1, "after")):
        moved = {n: at.encodings[(n - by) % count] for n in range(count)}
        yield at.given(ENCODINGS, f"each layer has the encoding of the layer {side}", moved)


def _exchanged(at: AuditedModel) -> Iterator[Hypothesis]:
    for i, one in enumerate(at.rotations):
        for two in at.rotations[i + 1 :]:
            either = [n for n in at.rotated if at.encodings[n] in (one, two)]
            swapped = {n: two if at.encodings[n] == one else one for n in either}
            sentence = f"{described(one)}, and {described(two)}, are exchanged on {at.named(either)}"
            yield at.given("bases exchanged", sentence, swapped)
            bases = {n: dataclasses.replace(at.encodings[n], base=swapped[n].base) for n in either}
            sentence = f"the bases {one.base:,.10g} and {two.base:,.10g} are exchanged, and the scalings are not"
            yield at.given("bases exchanged", sentence, bases)


def windows(at: AuditedModel) -> Iterator[Hypothesis]:
    """Windows off by one, ignored, on all layers, exchanged, shifted by a layer."""
    sizes, count = sorted({size for size in at.windows if size is not None}), len(at.layers)
    if not sizes:
        return
    having = [n for n, size in enumerate(at.windows) if size is not None]
    listed = " and ".join(f"{size:,}" for size in sizes)
    for by, what in ((1, "one token more"), (-1, "one token less")):
        if sizes[0] + by > 0:
            sentence = f"windows of {listed} tokens have {what}, on {at.named(having)}"
            yield at.windowed("windows off by one", sentence, [size and size + by for size in at.windows])
    yield at.windowed("windows ignored", at.say(having, "have no window"), [None] * count)
    for size in sizes:
        yield at.windowed(WINDOWS, f"all layers have a window of {size:,}", [size] * count)
    inverted = [sizes[0] if size is None else None for size in at.windows]
    yield at.windowed(WINDOWS, f"{at.named(having)} have no window, and the others have one", inverted)
    for by, side in ((1, "before"), (-1, "after")):
        order = [(n - by) % count for n in range(count)]
        yield at.windowed(WINDOWS, f"each layer has the window of the layer {side}", [at.windows[n] for n in order])
        both = tuple(at.layers[n] for n in order)
        sentence = f"each layer has the window and the encoding of the layer {side}"
        yield Hypothesis(WINDOWS, sentence, lambda c, both=both: c._replace(layers=both), tuple(range(count)))


class SomeLayers(NamedTuple):
    """A fault that some layers may have.

    Attributes:
      among: the layers that can have it.
      make: the hypothesis that the given ones do.
    """

    among: tuple[int, ...]
    make: Callable[[Sequence[int]], Hypothesis]


def some_layers(at: AuditedModel) -> list[SomeLayers]:
    """The faults that single layers may have."""
    found: list[SomeLayers] = []

    def encoded(fault: str, among: Sequence[int], what: str, encoding: Callable[[int], Encoding]) -> None:
        found.append(
            SomeLayers(
                tuple(among),
                lambda chosen: at.given(fault, at.say(chosen, what), {n: encoding(n) for n in chosen}),
            )
        )

    for kind in at.rotations:
        what = f", which the config leaves without encoding, are rotated with {described(kind)}"
        encoded(BARE, at.bare, what, lambda n, kind=kind: kind)
        others = [n for n in at.rotated if at.encodings[n] != kind]
        encoded(ENCODINGS, others, f"are rotated with {described(kind)}", lambda n, kind=kind: kind)
    encoded(NOT_ROTATED, at.rotated, "are not rotated", lambda n: NoPE())
    scaled = [n for n in at.rotated if at.encodings[n].scaling is not None]
    what = "are rotated without their scaling"
    encoded("scaling ignored", scaled, what, lambda n: dataclasses.replace(at.encodings[n], scaling=None))

    def windowed(fault: str, among: Sequence[int], what: str, size: int | None) -> None:
        def make(chosen: Sequence[int]) -> Hypothesis:
            after = [size if n in chosen else own for n, own in enumerate(at.windows)]
            return at.windowed(fault, at.say(chosen, what), after)

        found.append(SomeLayers(tuple(among), make))

    sizes = [size for size in at.windows if size is not None]
    if sizes:
        windowed("windows ignored", [n for n, size in enumerate(at.windows) if size], "have no window", None)
        bare = [n for n, size in enumerate(at.windows) if size is None]
        windowed(WINDOWS, bare, f"have a window of {sizes[0]:,}", sizes[0])
    return [one for one in found if one.among]

"""Hypotheses about which channels of queries and keys a runtime takes for a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from pe_lab.checkpoints.audit.faults import AuditedModel, ChannelOrder, Hypothesis
from pe_lab.positional import Encoding, Layout, PartialRope, Rope, channel_order

Orders = Mapping[int, Int[np.ndarray, " K"]]  # by layer
PARTIAL = "proportional and partial"


def _reordered(at: AuditedModel, fault: str, sentence: str, orders: Orders, sides: Sequence[str]) -> Hypothesis:
    """The channels of each head in the order of its layer; sides are of query, key and norm."""
    counts = {"query": at.model.heads, "key": at.model.kv_heads}
    found = []
    for order in {tuple(order.tolist()): None for order in orders.values()}:
        layers = tuple(n for n, one in orders.items() if tuple(one.tolist()) == order)
        flat: dict[str, tuple[int, ...] | None] = {}
        for side, count in counts.items():
            channels = (len(order) * np.arange(count)[:, None] + np.array(order)).ravel()
            flat[side] = tuple(channels.tolist()) if side in sides else None
        found.append(ChannelOrder(layers, flat["query"], flat["key"], "norm" in sides))
    return Hypothesis(fault, sentence, lambda c: c.reordered(found), tuple(orders))


def fractions(at: AuditedModel) -> Iterator[Hypothesis]:
    """Partial RoPE as p-RoPE, and the reverse: in frequencies, in pairs of channels, in both; and the whole head.

    Partial RoPE pairs channels within those that rotate, p-RoPE over the whole head.
    """
    K = at.model.head_dim
    partial = [n for n in at.rotated if isinstance(at.encodings[n], PartialRope)]
    portions = [n for n in at.rotated if isinstance(e := at.encodings[n], Rope) and 0 < e.fraction < 1]

    def half(n: int) -> np.ndarray:
        e = at.encodings[n]
        rotated = e.rotated_channels(K) if isinstance(e, PartialRope) else 2 * int(e.fraction * K // 2)
        return channel_order(Layout("half", rotated), K)

    def portion(e: Any) -> Encoding:
        return Rope(e.base, (e.rotated_channels(K) + 0.5) / K, e.scaling)  # half a channel is rounded off

    def part(e: Any) -> Encoding:
        return PartialRope(e.base, 2 * int(e.fraction * K // 2) / K, e.scaling)

    for among, orders, other, name, pairing in (
        (partial, {n: np.argsort(half(n)) for n in partial}, portion, "p-RoPE", "over the whole head"),
        (portions, {n: half(n) for n in portions}, part, "partial RoPE", "within the rotated channels"),
    ):
        if not among:
            continue
        what = f"are rotated with the frequencies of {name}, in their own pairs of channels"
        spectrum = at.changed(PARTIAL, what, other, among)
        sentence = at.say(among, f"have pairs of channels {pairing}, at their own frequencies")
        pairs = _reordered(at, PARTIAL, sentence, orders, ("query", "key", "norm"))
        whole = at.changed(PARTIAL, "are rotated on the whole head", lambda e: Rope(e.base, 1.0, e.scaling), among)
        yield from (spectrum, pairs)
        yield spectrum.then(pairs, at.say(among, f"are rotated as {name}, with pairs of channels {pairing}"))
        yield whole.then(pairs, whole.sentence) if among is partial else whole


def permutations(at: AuditedModel) -> Iterator[Hypothesis]:
    """Pairs (i, i + K/2) taken for (2i, 2i + 1) and the reverse, of both sides or one; the wrong number of heads."""
    fault, K = "query/key permutation", at.model.head_dim
    if not at.rotated:
        return
    # A layer without rotation is permuted with the others, as a whole head.
    width = [e.rotated_channels(K) if isinstance(e, PartialRope) else K for e in at.encodings]
    inverse = [np.argsort(channel_order(Layout("half", r), K)) for r in width]
    taken = {n: inverse[n][channel_order(Layout("interleaved", r), K)] for n, r in enumerate(width)}
    for orders, sentence in (
        (taken, "channels i and i + K/2, a pair of queries and keys, are taken for 2i and 2i + 1"),
        (
            {n: np.argsort(order) for n, order in taken.items()},
            "channels 2i and 2i + 1, a pair of queries and keys, are taken for i and i + K/2",
        ),
    ):
        yield _reordered(at, fault, sentence, orders, ("query", "key", "norm"))
        if at.model.qk_norm != "none":
            yield _reordered(at, fault, f"{sentence}, but not in the QK-norm", orders, ("query", "key"))
        yield _reordered(at, fault, f"{sentence}, in queries alone", orders, ("query", "norm"))
        yield _reordered(at, fault, f"{sentence}, in keys alone", orders, ("key", "norm"))
    H, G = at.model.heads, at.model.kv_heads
    if H != G and (G * K) % (2 * H) == 0 and set(width) == {K}:
        own, wrong = (np.arange(G * K).reshape(heads, 2, -1).swapaxes(1, 2).ravel() for heads in (G, H))
        sentence = "the keys are permuted with the number of query heads instead of that of key heads"
        for order in (wrong[np.argsort(own)], own[np.argsort(wrong)]):
            every = tuple(range(len(at.layers)))
            found = ChannelOrder(every, None, tuple(order.tolist()))
            yield Hypothesis(fault, sentence, lambda c, found=found: c.reordered([found]), every)

"""Part of `attention.py`: every feature of a layer on every implementation that honours it, forward and with gradients.

Before anything is timed at a length, an implementation's output and gradients for a short sequence are compared with
those of chunked attention in float32, which tests compare with float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import DOCUMENTS, SOFT_CAP, TOLERANCE, WINDOW, Case, beside, chosen_rows, error
from attention_kernels import placed, rotating, runs, taken
from attention_tools import Plan, Table, measure, reason, summary, tell, turn_of

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.capabilities import AttentionRequest, refusals
from pe_lab.attention.key_block import AttentionInputs, scaled
from pe_lab.parallel import compute_capability

CHANNELS = "cudnn, ALiBi by channels"  # `by_channels`
FLEX = "torch flex"  # torch's flex_attention
KERNELS = ("cudnn", "tokamax", "pallas_hopper", "pallas_gpu", CHANNELS, FLEX)
ROTATES = "heads rotate differently"


@dataclass(frozen=True)
class Feature:
    """What a layer needs beside causality.

    Attributes:
      needs: of `capabilities.FEATURES`.
      learned: fields of the inputs whose gradient is taken, too.
    """

    needs: frozenset[str] = frozenset()
    learned: tuple[str, ...] = ()


FEATURES = {
    "plain": Feature(),
    ROTATES: Feature(),
    f"a window of {WINDOW:,}": Feature(frozenset({"windows"})),
    f"{DOCUMENTS} documents": Feature(frozenset({"segments"})),
    "ALiBi": Feature(frozenset({"slopes"})),
    "a bias for every distance": Feature(frozenset({"distance bias"}), ("distance_bias",)),
    "a bias for 128 distances": Feature(frozenset({"distance bias"}), ("distance_bias",)),
    "a bias of keys": Feature(frozenset({"key bias"}), ("key_bias",)),
    "a sink": Feature(frozenset({"sinks"}), ("sink",)),
    "a soft cap": Feature(frozenset({"soft cap"})),
}


def inputs_of(what: str, case: Case) -> AttentionInputs:
    """What a feature has beside queries, keys and values."""
    given = {name: jnp.asarray(array) for name, array in beside(what, case).items()}
    if (ids := given.pop("segments", None)) is not None:
        return AttentionInputs(query_segments=ids, key_segments=ids)
    if "windows" in FEATURES[what].needs:
        return AttentionInputs(window=min(WINDOW, case.T))
    return AttentionInputs(soft_cap=SOFT_CAP if "soft cap" in FEATURES[what].needs else None, **given)


def by_channels(query: jax.Array, key: jax.Array, value: jax.Array, slope: jax.Array, run: Any) -> jax.Array:
    """ALiBi on a kernel without it, up to 65,536 tokens, for scaled queries.

    Of -m (i - j), m i cancels in the softmax, and m j is a product: eight further channels hold m in two parts of
    bfloat16, and j in two digits of base 256.
    """
    B, T, H, K = query.shape
    high = slope.astype(query.dtype)
    parts = jnp.stack([high, (slope - high.astype(jnp.float32)).astype(query.dtype)], -1)
    of_queries = jnp.concatenate([256 * parts, parts, jnp.zeros((H, 4), query.dtype)], -1)
    at = jnp.arange(T)
    digits = jnp.stack([at // 256, at // 256, at % 256, at % 256], -1).astype(key.dtype)
    of_keys = jnp.pad(digits, ((0, 0), (0, 4)))
    query = jnp.concatenate([query, jnp.broadcast_to(of_queries, (B, T, H, 8))], -1)
    key = jnp.concatenate([key, jnp.broadcast_to(of_keys[:, None], (*key.shape[:3], 8))], -1)
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, 8)))
    return run(query, key, value, AttentionInputs())[..., :K]


def call_of(name: str, what: str, case: Case, plan: Plan) -> Callable[..., jax.Array]:
    """Attention of queries, keys and values, and the learned inputs, by an implementation."""
    run, one = runs(plan.tiny)["cudnn" if name == CHANNELS else name], FEATURES[what]
    if what == ROTATES:
        return rotating(run, inside=IMPLEMENTATIONS[name].capabilities.rotates_keys)

    def call(query: jax.Array, key: jax.Array, value: jax.Array, *learned: jax.Array) -> jax.Array:
        inputs = replace(inputs_of(what, case), **dict(zip(one.learned, learned, strict=True)))
        query = scaled(query, jnp.float32(case.K**-0.5))
        if name == CHANNELS:
            return by_channels(query, key, value, inputs.slope, run)
        return run(query, key, value, inputs)

    return call


def both(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The output and the gradients of all arguments, where the gradient of the output is the queries."""

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(call, *arguments)
        return out, *pull(arguments[0])

    return run


def arguments_of(what: str, case: Case) -> tuple[jax.Array, ...]:
    one = FEATURES[what]
    inputs = inputs_of(what, case)
    return *placed(case), *(getattr(inputs, name) for name in one.learned)


def exact(what: str, case: Case, plan: Plan, backward: bool) -> Any:
    """The output, or it and the gradients, of chunked attention in float32."""
    chunked = call_of("chunked", what, case._replace(dtype="float32"), plan)
    with jax.default_matmul_precision("highest"):  # on a GPU products of float32 would be TF32's otherwise
        given = (x.astype(jnp.float32) for x in arguments_of(what, case))
        return jax.jit(both(chunked) if backward else chunked)(*given)


def off(name: str, what: str, case: Case, plan: Plan, backward: bool, wanted: Any) -> float:
    """The largest error of an implementation's output, and of its gradients, in a short case; `wanted` is `exact`."""
    call = call_of(name, what, case, plan)
    found = jax.jit(both(call) if backward else call)(*arguments_of(what, case))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(error(np.asarray(x, np.float32).reshape(1, -1, 1), np.asarray(y).reshape(1, -1, 1)) for x, y in pairs)


def torch_off(what: str, case: Case, plan: Plan, backward: bool, wanted: Any) -> float:
    """As `off` of torch's flex_attention, for some of the queries: their outputs, or their gradients."""
    rows, wanted = chosen_rows(case), wanted[1] if backward else wanted
    found = plan.peer.rows(case, f"flex {what}", rows, "gradient" if backward else "out")
    return error(found, np.asarray(wanted)[:, rows])


def measured(what: str, case: Case, short: Case, plan: Plan, backward: bool) -> dict[str, dict[str, Any]]:
    """A row for each implementation that honours a feature: its error, then its times, or why there are none."""
    capability, apart = 9.0 if plan.tiny else compute_capability(), what == ROTATES
    request = AttentionRequest(
        FEATURES[what].needs, "gpu", capability, case.K, case.dtype, case.T, case.B, backward, split_heads=apart
    )
    rows, turns = {}, {}
    names = [name for name in KERNELS if name in runs(plan.tiny)]
    names = [name for name in names if not refusals(IMPLEMENTATIONS[name].capabilities, request)]
    names += [CHANNELS] if what == "ALiBi" and case.T <= 2**16 else []
    wanted = exact(what, short, plan, backward)
    for name in filter(plan.wants, names):
        try:
            rows[name] = {"error": off(name, what, short, plan, backward, wanted)}
            if rows[name]["error"] > TOLERANCE[case.dtype]:
                rows[name]["failure"] = "wrong"
                continue
            call = call_of(name, what, case, plan)
            made = functools.partial(jax.jit(both(call) if backward else call), *arguments_of(what, case))
            turns[name] = turn_of(made, plan.turn)
        except Exception as failure:
            rows.setdefault(name, {})["failure"] = reason(failure)
    if plan.peer is not None and plan.wants(FLEX) and not apart:
        try:
            rows[FLEX] = {"error": torch_off(what, short, plan, backward, wanted)}
            if rows[FLEX]["error"] > TOLERANCE[case.dtype]:
                rows[FLEX]["failure"] = "wrong"
            else:
                turns[FLEX] = plan.peer.turn(case, f"flex {what}", "backward" if backward else "forward", plan.turn)
        except Exception as failure:
            rows.setdefault(FLEX, {})["failure"] = reason(failure)
    for name, spent in measure(turns, plan.rounds).items():
        rows[name] |= summary(spent)
    return rows


def features(case: Case, short: Case, plan: Plan, chosen: list[str]) -> list[dict[str, Any]]:
    """Results of each feature, forward and with gradients."""
    results = []
    for what in chosen:
        for backward in (False, True):
            tell(f"  {what}{', with gradients' if backward else ''}: {case}")
            rows = measured(what, case, short, plan, backward)
            auto = taken(case, backward, needs=FEATURES[what].needs, split_heads=what == ROTATES)
            found = {"case": case._asdict(), "feature": what, "backward": backward, "auto": auto, "rows": rows}
            results.append(found | {"needs": sorted(FEATURES[what].needs)})
    return results


def table_of(results: list[dict[str, Any]]) -> Table:
    """Milliseconds of each implementation; the fastest, and what `auto` takes, in the last columns."""
    head = ["", *KERNELS, "auto", "auto / fastest"]
    lines, worst = [head], []
    for one in results:
        case, rows = Case(**one["case"]), one["rows"]
        times = {name: row["seconds"] for name, row in rows.items() if "seconds" in row}
        cells = [
            f"{times[name] * 1e3:,.2f}" if name in times else rows[name]["failure"][:20] if name in rows else "–"
            for name in KERNELS
        ]
        ratio = min(times.values()) / times[one["auto"]] if one["auto"] in times else None
        worst += [] if ratio is None else [ratio]
        mode = "forward and backward" if one["backward"] else "forward"
        label = f"{one['feature']}, {case.T:,} tokens, {mode}"
        lines.append([label, *cells, one["auto"], "–" if ratio is None else f"{ratio:.2f}"])
    errors = [row["error"] for one in results for row in one["rows"].values() if "error" in row]
    case = Case(**results[0]["case"])
    notes = [f"Largest relative error {max(errors):.1e}."] if errors else []
    if worst:
        notes.append(f"auto / fastest: {min(worst):.2f} at worst, target 0.98.")
    title = f"Milliseconds, by feature; {case.H} heads, {case.G} key heads, {case.K} channels, {case.dtype}"
    return Table(title, lines, notes)

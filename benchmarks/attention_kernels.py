"""Part of `attention.py`: an accelerator's kernels against each other, torch, and the limits of the device.

With `plan.tiny` it runs on any machine: pe_lab's kernels are interpreted, and XLA computes the calls of cuDNN and
tokamax.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, arrays, chosen_rows, error, head_frequencies, reference
from attention_tools import Contestant, Plan, compare, measure, tell, turn_of

from pe_lab.attention import IMPLEMENTATIONS, KeyRotation, LayerEncoding, attention
from pe_lab.attention.capabilities import AttentionRequest
from pe_lab.attention.chunked import chunked_key_block
from pe_lab.attention.dispatch import choose
from pe_lab.attention.kernels.external import cudnn_attention, tokamax_attention
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.gpu_gradient import gpu_key_block_gradient
from pe_lab.attention.kernels.hopper import hopper_key_block
from pe_lab.attention.kernels.hopper_gradient import hopper_key_block_gradient
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.kernels.tpu_gradient import tpu_key_block_gradient
from pe_lab.attention.key_block import AttentionInputs, Pair, scaled, whole_sequence
from pe_lab.parallel import compute_capability, platform
from pe_lab.positional import alibi_slopes, rotate, rotation_tables
from pe_lab.positional.rotation import fixed_point_frequencies

OURS = "pallas_gpu"
CHUNKED_UP_TO = 4096  # tokens: on a GPU it takes seconds beyond
CACHES, MOST_CACHES = 2**27, 16  # bytes that a pass of decoding reads at least: more than a GPU keeps of what it read
Run = Callable[..., jax.Array]


class Entry(NamedTuple):
    """One way to compute attention.

    Attributes:
      run: of queries, keys and values, [B, T, H, K], or [B, H, T, K] if `heads_first`.
      feature: of the expected result: "", slopes, or rotations (a different one for each head).
    """

    name: str
    run: Run
    feature: str = ""
    heads_first: bool = False


def runs(tiny: bool) -> dict[str, Run]:
    """The implementations that an accelerator has, by name, as `Implementation.run`."""
    names = [OURS, "pallas_hopper", "cudnn", "tokamax", "chunked"]
    if jax.__version_info__ < (0, 11):
        names.remove("pallas_hopper")
    if importlib.util.find_spec("tokamax") is None:
        names.remove("tokamax")
    if not tiny:
        return {name: IMPLEMENTATIONS[name].run for name in names}
    interpreted = functools.partial(functools.partial, interpret=True)
    made = {
        OURS: whole_sequence(Pair(interpreted(gpu_key_block), interpreted(gpu_key_block_gradient))),
        "pallas_hopper": whole_sequence(Pair(interpreted(hopper_key_block), interpreted(hopper_key_block_gradient))),
        "pallas_tpu": whole_sequence(Pair(interpreted(tpu_key_block), interpreted(tpu_key_block_gradient))),
        "cudnn": functools.partial(cudnn_attention, implementation="xla"),
        "tokamax": functools.partial(tokamax_attention, implementation="xla"),
        "chunked": lambda q, k, v, inputs: IMPLEMENTATIONS["chunked"].run(q, k, v, replace(inputs, chunk=32)),
    }
    return {name: run for name, run in made.items() if name in names or name == "pallas_tpu"}


def plain(run: Run, slope: np.ndarray | None = None) -> Run:
    """An implementation as a function of queries, keys and values alone."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        inputs = AttentionInputs(slope=None if slope is None else jnp.asarray(slope, jnp.float32))
        return run(scaled(query, jnp.float32(query.shape[-1] ** -0.5)), key, value, inputs)

    return call


def rotation_of(H: int, K: int) -> KeyRotation:
    frequencies = head_frequencies(H, K)
    return KeyRotation(jnp.asarray(fixed_point_frequencies(frequencies)), jnp.ones(frequencies.shape, jnp.float32))


def rotating(run: Run, inside: bool) -> Run:
    """Heads of a group that rotate differently: keys are rotated inside the kernel, or before, in a copy per head."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        _, T, H, K = query.shape
        rotation, inputs = rotation_of(H, K), AttentionInputs()
        cos, sin = rotation_tables(*rotation, jnp.arange(T, dtype=jnp.int32)[None])
        query = scaled(rotate(query, cos, sin), jnp.float32(K**-0.5))
        if inside:
            inputs = AttentionInputs(rotation=rotation)
        else:
            key, value = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (key, value))
            key = rotate(key, cos, sin)
        return run(query, key, value, inputs)

    return call


def auto(backward: bool) -> Run:
    return lambda q, k, v: attention(q, k, v, LayerEncoding(), implementation="auto", backward=backward)


def taken(case: Case, backward: bool = False, needs: frozenset[str] = frozenset(), **more: bool) -> str:
    """The name of the implementation that the dispatcher chooses; `more` are fields of the request."""
    here = platform(), compute_capability()
    return choose("auto", AttentionRequest(needs, *here, case.K, case.dtype, case.S, case.B, backward, **more))


def kernel_alone(tiny: bool) -> Run:
    """pe_lab's kernel without the transposition of [B, T, H, K] to [B, H, T, K] and back."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
        return gpu_key_block(query, key, value, AttentionInputs(), interpret=tiny).out

    return call


def forward_entries(case: Case, tiny: bool) -> list[Entry]:
    made = runs(tiny)
    entries = [
        Entry("auto", auto(backward=False)),
        *(Entry(name, plain(run)) for name, run in made.items()),
        Entry(f"{OURS}, heads first", kernel_alone(tiny), heads_first=True),
        Entry(f"{OURS}, ALiBi", plain(made[OURS], alibi_slopes(case.H)), "slopes"),
        Entry(f"{OURS}, heads rotate differently", rotating(made[OURS], inside=True), "rotations"),
        Entry("cudnn, heads rotate differently", rotating(made["cudnn"], inside=False), "rotations"),
    ]
    if "pallas_hopper" in made:
        hopper = made["pallas_hopper"]
        entries += [
            Entry("pallas_hopper, ALiBi", plain(hopper, alibi_slopes(case.H)), "slopes"),
            Entry("pallas_hopper, heads rotate differently", rotating(hopper, inside=True), "rotations"),
        ]
    if tiny or case.T <= CHUNKED_UP_TO:
        return entries
    return [e for e in entries if e.name != "chunked" and (e.name != "auto" or taken(case) != "chunked")]


def placed(case: Case) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, case.dtype) for x in arrays(case))


def rounded(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32))


def right_answers(case: Case, inputs: Sequence[jax.Array], queries: list[int]) -> Callable[[str], np.ndarray]:
    """The reference's outputs [B, queries, H, K], as a function of the feature."""
    given = [rounded(x) for x in inputs]

    @functools.cache
    def answer(feature: str) -> np.ndarray:
        slope = alibi_slopes(case.H) if feature == "slopes" else None
        frequencies = head_frequencies(case.H, case.K) if feature == "rotations" else None
        return reference(*given, queries, slope, frequencies)

    return answer


def forward(case: Case, plan: Plan, entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Attention of whole texts to themselves."""
    inputs, queries = placed(case), chosen_rows(case)
    heads_first = tuple(x.swapaxes(1, 2) for x in inputs)
    right = right_answers(case, inputs, queries)

    def contestant(entry: Entry) -> Contestant:
        call = functools.partial(jax.jit(entry.run), *(heads_first if entry.heads_first else inputs))

        def check() -> float:
            out = call().swapaxes(1, 2) if entry.heads_first else call()
            return error(rounded(out[:, np.asarray(queries)]), right(entry.feature))

        return Contestant(call, check)

    def torch_is_off(how: str) -> float:
        return error(plan.peer.rows(case, how, queries), right(""))

    ours = {entry.name: contestant(entry) for entry in entries}
    return compare(case, plan, "forward", ours, torch_is_off)


def gradients(run: Run) -> Run:
    """Of queries, keys and values, where the output's gradient is the queries."""
    return lambda query, key, value: jax.vjp(run, query, key, value)[1](query)


def backward(case: Case, plan: Plan, tried: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Forward and backward pass together, as a training step takes them."""
    inputs, queries = placed(case), chosen_rows(case)
    slow = plain(IMPLEMENTATIONS["reference" if case.T <= 1024 else "chunked"].run)
    # On a GPU products of float32 would be TF32's otherwise.
    with jax.default_matmul_precision("highest"):
        right = [np.asarray(x) for x in jax.jit(gradients(slow))(*(x.astype(jnp.float32) for x in inputs))]

    def off(found: np.ndarray, expected: np.ndarray) -> float:
        # Over all at once: the gradient of a key that hardly anyone sees is small, and rounding is relatively large.
        return error(found.reshape(1, -1, 1), expected.reshape(1, -1, 1))

    def contestant(run: Run) -> Contestant:
        call = functools.partial(jax.jit(gradients(run)), *inputs)
        return Contestant(call, lambda: max(off(rounded(g), r) for g, r in zip(call(), right, strict=True)))

    def torch_is_off(how: str) -> float:
        return off(plan.peer.rows(case, how, queries, "gradient"), right[0][:, queries])

    ours = {name: contestant(run) for name, run in tried.items()}
    return compare(case, plan, "backward", ours, torch_is_off)


def backward_runs(tiny: bool) -> dict[str, Run]:
    """What has gradients on an accelerator."""
    made = {name: plain(run) for name, run in runs(tiny).items()}
    return {"auto": auto(backward=True)} | made


def decode_entries(case: Case, tiny: bool) -> list[Entry]:
    """One query [B, H, 1, K] against a cache [B, G, S, K], or, unless `heads_first`, [B, S, G, K]."""
    B, S, H, K = case.B, case.S, case.H, case.K
    ours = functools.partial(gpu_key_block, interpret=tiny)

    def at_the_end(kernel: Run, apart: bool = False) -> Run:
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            inputs = AttentionInputs(start=jnp.full(B, S - 1, jnp.int32), used=jnp.full(B, S, jnp.int32))
            if apart:
                inputs = replace(inputs, rotation=rotation_of(H, K))
                tables = rotation_tables(*inputs.rotation, jnp.full((B, 1), S - 1, jnp.int32))
                query = rotate(query.swapaxes(1, 2), *tables).swapaxes(1, 2)
            query = (query.astype(jnp.float32) * K**-0.5).astype(query.dtype)
            return kernel(query, key, value, inputs).out

        return run

    def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(
            query.swapaxes(1, 2), key, value, scale=K**-0.5, implementation="xla" if tiny else "cudnn"
        )
        return out.swapaxes(1, 2)

    hopper = functools.partial(hopper_key_block, interpret=tiny)
    entries = [
        Entry(OURS, at_the_end(ours), heads_first=True),
        Entry(f"{OURS}, heads rotate differently", at_the_end(ours, apart=True), "rotations", heads_first=True),
        Entry("pallas_hopper", at_the_end(hopper), heads_first=True),
        Entry("pallas_hopper, heads rotate differently", at_the_end(hopper, apart=True), "rotations", heads_first=True),
        Entry("chunked", at_the_end(chunked_key_block), heads_first=True),
        Entry("cudnn", cudnn),
    ]
    if "pallas_hopper" not in runs(tiny):
        entries = [entry for entry in entries if not entry.name.startswith("pallas_hopper")]
    if tiny:
        tpu = functools.partial(tpu_key_block, interpret=True)
        entries.append(Entry("pallas_tpu", at_the_end(tpu), heads_first=True))
    return entries


def caches_of(case: Case) -> int:
    """How many caches one after the other a pass reads."""
    return max(2, min(MOST_CACHES, -(-CACHES // case.cache_bytes)))


def decode(case: Case, plan: Plan) -> dict[str, dict[str, Any]]:
    """One new token of every text, through the caches of several layers; seconds are those of one layer."""
    layers = 2 if plan.tiny else caches_of(case)
    query, key, value = placed(case)
    right = right_answers(case, (query, key, value), [0])
    query = query.swapaxes(1, 2)

    def copies(cut: Callable[[jax.Array], jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.array(cut(key), copy=True), jnp.array(cut(value), copy=True)) for _ in range(layers)]

    lying = {False: copies(lambda x: x), True: copies(lambda x: x.swapaxes(1, 2))}

    def contestant(entry: Entry) -> Contestant:
        caches = lying[entry.heads_first]

        def through(query: jax.Array, caches: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            for one in caches:
                query = entry.run(query, *one)  # a layer's output is the next one's query
            return query

        def check() -> float:
            return error(rounded(jax.jit(entry.run)(query, *caches[0]).swapaxes(1, 2)), right(entry.feature))

        return Contestant(functools.partial(jax.jit(through), query, caches), check)

    def torch_is_off(how: str) -> float:
        return error(plan.peer.rows(case, how, [0]), right(""))

    ours = {entry.name: contestant(entry) for entry in decode_entries(case, plan.tiny)}
    return compare(case, plan, "decode", ours, torch_is_off, layers)


def ceilings(plan: Plan) -> dict[str, float]:
    """What the device does at best: FLOP/s of a bf16 product of 8192 x 8192 matrices, bytes/s of a copy, both ways."""
    side, size = (256, 2**16) if plan.tiny else (8192, 2**29)
    tell("  ceilings: a matrix product and a copy")
    a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    x = jnp.ones(size, jnp.float32)
    turns = {
        "matmul": turn_of(functools.partial(jax.jit(jnp.matmul), a, b), plan.turn),
        "copy": turn_of(functools.partial(jax.jit(jnp.copy), x), plan.turn),
    }
    best = {name: min(spent).seconds for name, spent in measure(turns, plan.rounds).items()}
    return {"matmul": 2.0 * side**3 / best["matmul"], "copy": 8.0 * size / best["copy"], "side": side}

"""How attention crosses a context axis: what is chosen, and what is sent, by arithmetic and by the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention import LayerEncoding, attention
from pe_lab.attention.capabilities import AttentionRequest
from pe_lab.attention.context import context_attention, sent
from pe_lab.attention.dispatch import choose
from pe_lab.config import MeshConfig
from pe_lab.errors import UnsupportedError
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.parallel.topology import placeholder_mesh
from pe_lab.planning.hlo import parse
from pe_lab.planning.program import collectives


def chosen(heads, needs=(), asked="auto", split_heads=False, backward=True, **mesh):
    config = MeshConfig(**{"data": 1, **mesh})
    count = int(np.prod([config.fsdp, config.tensor, config.context]))
    with use_mesh(placeholder_mesh(config, count), AxisRules(context_attention=asked)):
        return context_attention(heads, "bfloat16", needs, split_heads, backward)


def test_what_sends_less_is_chosen():
    """Bytes of a token by hand: keys and values visit 7 devices, and go round 8 of them with gradients in float32."""
    llama = chosen((32, 8, 128), context=8)
    ring, ulysses = 2 * 8 * 128 * (2 * 7 + 6 * 8), 3 * 2 * (32 + 8) * 128 * 2 * 7 / 8
    assert llama.name == "ulysses"
    assert f"{ulysses / 1024:.1f} KiB with ulysses and {ring / 1024:.1f} in a ring" in llama.reason
    assert sent((32, 8, 128), 2, 8, 1, False, True) == (ring, ulysses)
    assert chosen((32, 1, 128), context=8).name == "ring"  # one key head is little to send
    assert chosen((32, 1, 128), context=8, split_heads=True).name == "ulysses"  # a copy for each query head
    assert chosen((32, 8, 128), context=2, backward=False).name == "ring"
    assert chosen((32, 8, 128), fsdp=8) is None


def test_what_a_ring_alone_can_do_has_one():
    assert "14 query heads do not divide over 4 devices of mesh axis 'context'" in chosen((14, 2, 64), context=4).reason
    shared = chosen((8, 2, 64), context=4, tensor=4)
    assert shared.name == "ring" and "context' and 4 of 'tensor'" in shared.reason
    assert "position bias has all heads" in chosen((16, 2, 64), needs={"position bias"}, context=4).reason
    assert chosen((16, 16, 64), asked="ring", context=4).name == "ring"
    ring = chosen((32, 1, 128), context=8)
    request = AttentionRequest(platform="tpu", head_dim=128, length=4096, backward=True, partial=True, context=ring)
    with pytest.raises(UnsupportedError, match="'splash' gives no partial .*; mesh.context_attention=ulysses needs"):
        choose("splash", request)
    for needs, heads in ((set(), 14), ({"logit functions"}, 16)):
        with pytest.raises(UnsupportedError, match="mesh.context_attention is 'ulysses', and .*Use ring, or auto"):
            chosen((heads, 2, 64), needs=needs, asked="ulysses", context=4)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_the_compiler_sends_what_arithmetic_says(way):
    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    T, H, G, K = 64, 8, 2, 16
    q, k = (jax.ShapeDtypeStruct((1, T, heads, K), jnp.float32) for heads in (H, G))
    tokens = jax.NamedSharding(mesh, jax.P(None, "context"))

    def run(q, k, v):
        with use_mesh(mesh, AxisRules(context_attention=way)):
            return attention(q, k, v, LayerEncoding(), backward=False)

    compiled = jax.jit(run, in_shardings=tokens, out_shardings=tokens).lower(q, k, k).compile()
    found = collectives(parse(compiled.as_text()), dict(mesh.shape))
    assert {one.kind for one in found} == {"collective-permute" if way == "ring" else "all-to-all"}
    ring, ulysses = sent((H, G, K), 4, 4, 1, False, False)
    assert sum(one.wire * one.times for one in found) == T // 4 * (ring if way == "ring" else ulysses)

"""One sequence in one pass, in chunks, token by token, and on several devices: the same logits.

Slow: 4,097 tokens, everything by every encoding. Fast: 261, some of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.model import Model
from pe_lab.model.generation import Decoder, GenerationRequest, Schedules, with_shared_rotation
from pe_lab.model.programs import ChunkedForward
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Alibi, Beta, DynamicNTK, Layer, NoPE, Rope, Yarn, build_schedule, layers

CONFIG = ModelConfig(
    vocab_size=64, layers=3, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=32, dtype="float32", qk_norm="head"
)
KINDS = ("rope", "yarn", "dynamic ntk", "alibi", "windowed", "dropped with beta", "heads apart")
SLOW, FAST = 4097, 261


def layers_of(kind: str, T: int) -> list[Layer]:
    """A model trained on an eighth of the sequence."""
    trained = T // 8
    rope = Rope(base=1e4)
    return {
        "rope": [Layer(rope)] * 3,
        "yarn": [Layer(Rope(base=1e4, scaling=Yarn(factor=8, original_length=trained)))] * 3,
        "dynamic ntk": [Layer(Rope(base=1e4, scaling=DynamicNTK(original_length=trained)))] * 3,
        "alibi": [Layer(Alibi())] * 3,
        "windowed": [Layer(rope, window=T // 13), Layer(rope, window=T // 13), Layer(NoPE())],
        "dropped with beta": [Layer(NoPE(), logit_scale=Beta(0.412, trained))] * 3,
        # Heads of one group that rotate differently, in every layer; the first has a window, too.
        "heads apart": [*layers(f"rope/heads=0:nope/window={T // 13}", 1), *layers("rope/heads=2:nope", 2)],
    }[kind]


def cases(*fast: str) -> pytest.MarkDecorator:
    """(kind, T): all kinds for the long sequence, slow, and the given ones for the short one."""
    slow = [pytest.param(kind, SLOW, marks=pytest.mark.slow) for kind in KINDS]
    return pytest.mark.parametrize(("kind", "T"), [*slow, *((kind, FAST) for kind in fast)])


def chunk_of(T: int) -> int:
    return 512 if T == SLOW else 64


def config_of(T: int, **changes) -> ModelConfig:
    return dataclasses.replace(CONFIG, attention_chunk=chunk_of(T), **changes)


@functools.cache
def setting(T: int):
    model = Model(config_of(T))
    params = model.init(jax.random.key(0))
    # Larger than at initialization, so that attention is peaked.
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, params)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, T)).astype(np.int32)
    return model, params, tokens


def schedule_of(kind: str, T: int):
    return build_schedule(layers_of(kind, T), CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, T)


@functools.cache
def plain(kind: str, T: int) -> np.ndarray:
    """Logits by the reference: all [T, T] logits of a head at once."""
    _, params, tokens = setting(T)
    model = Model(config_of(T, attention="reference"))
    return np.asarray(jax.jit(model.apply)(params, tokens, None, None, schedule_of(kind, T)))[0]


def logits_of(hidden, T: int) -> np.ndarray:
    model, params, _ = setting(T)
    return np.asarray(hidden @ model.head(params).embedding.T)


@cases()
def test_in_blocks(kind, T):
    model, params, tokens = setting(T)
    model = Model(config_of(T, attention="chunked"))
    found = jax.jit(model.apply)(params, tokens, None, None, schedule_of(kind, T))[0]
    np.testing.assert_allclose(found, plain(kind, T), atol=1e-4)


@cases("windowed")
def test_in_chunks(kind, T):
    """4,097 tokens in chunks of 512: eight of them, and one token more."""
    _, params, tokens = setting(T)
    reader = ChunkedForward(config_of(T), chunk=chunk_of(T))
    at = np.arange(T)[None]
    found = reader.hidden(params, tokens, at, schedule_of(kind, T))[0]
    np.testing.assert_allclose(logits_of(found, T), plain(kind, T), atol=1e-4)
    losses = reader.losses(params, tokens, np.roll(tokens, -1, 1), schedule_of(kind, T))
    log_p = jax.nn.log_softmax(plain(kind, T))
    np.testing.assert_allclose(losses[0], -log_p[np.arange(T), np.roll(tokens[0], -1)], atol=1e-4)
    assert max(reader.traces.values()) == 1  # all chunks share a program


@pytest.mark.slow  # 8 s
@cases("windowed", "heads apart")
def test_continuations_of_what_is_read_once(kind, T):
    """Each follows the first tokens alone: neither those before it nor those after it change it."""
    _, params, tokens = setting(T)
    rng, size = np.random.default_rng(1), 9
    suffixes = rng.integers(0, CONFIG.vocab_size, (1, 3, size)).astype(np.int32)
    at = np.array([[[0, 4, 8], [1, 2, 3], [8, 7, 7]]])
    reader = ChunkedForward(config_of(T), chunk=chunk_of(T))
    first = tokens[:, : T - size]
    found = reader.branches(params, first, suffixes, at, schedule_of(kind, T))[0]
    model = Model(config_of(T, attention="reference"))
    for n in range(3):
        whole = np.concatenate([first, suffixes[:, n]], axis=1)
        expected = np.asarray(jax.jit(model.apply)(params, whole, None, None, schedule_of(kind, T)))[0]
        np.testing.assert_allclose(logits_of(found[n], T), expected[T - size + at[0, n]], atol=1e-4)
    assert max(reader.traces.values()) == 1


ACROSS = (("ring", 2), ("ring", 4), ("ring", 8), ("ulysses", 4))
DEVICES = [pytest.param(kind, SLOW, way, n, marks=pytest.mark.slow) for kind in KINDS for way, n in ACROSS]
DEVICES += [("windowed", FAST, "ring", 4)]


@pytest.mark.parametrize(("kind", "T", "way", "parts"), DEVICES)
@pytest.mark.slow
def test_across_a_context_axis(kind, T, way, parts):
    """4 to 9 s each."""
    model, params, tokens = setting(T)
    mesh = make_mesh(MeshConfig(data=1, context=parts), jax.devices()[:parts])

    @jax.jit
    def apply(params, tokens, schedule):
        with use_mesh(mesh, AxisRules(context_attention=way)):
            targets = jnp.roll(tokens, -1, 1)
            batch = {"tokens": tokens, "targets": targets}
            return model.apply(params, tokens, None, None, schedule), model.token_loss(params, batch, schedule)

    found, losses = apply(params, tokens, schedule_of(kind, T))
    np.testing.assert_allclose(found[0], plain(kind, T), atol=1e-4)
    log_p = jax.nn.log_softmax(plain(kind, T))
    np.testing.assert_allclose(losses[0], -log_p[np.arange(T), np.roll(tokens[0], -1)], atol=1e-4)


def cached_logits(decoder: Decoder, kind: str, T: int, prompt: int, mesh=None) -> np.ndarray:
    """Logits after a prompt and after each of the tokens that follow it, from the decoder's own compiled steps."""
    model, params, tokens = setting(T)
    schedule = with_shared_rotation(schedule_of(kind, T))
    seen = []
    logits = decoder._logits

    def recorded(params, last):
        found = logits(params, last)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), found, ordered=mesh is None)
        return found

    decoder._logits = recorded
    # The chosen tokens are replaced by those of the sequence.
    request = GenerationRequest(max_new_tokens=T - prompt + 1)
    text = tokens[0]
    weights = decoder.prepare(params)
    step = decoder.next

    def forced(params, cache, token, lengths, *rest, **named):
        at = int(np.asarray(lengths)[0])
        return step(params, cache, decoder.place(jnp.asarray(text[at : at + 1])), lengths, *rest, **named)

    decoder.next = forced
    decoder.generate(weights, [text[:prompt]], Schedules.fixed(schedule), request)
    jax.effects_barrier()
    return np.concatenate(seen)


@cases()  # fast ones are in test_generation.py
def test_token_by_token(kind, T):
    """A prompt of 4,089 tokens, prefilled in chunks, and eight steps."""
    found = cached_logits(Decoder(config_of(T)), kind, T, T - 8)
    np.testing.assert_allclose(found, plain(kind, T)[T - 9 :], atol=1e-4)


@cases("heads apart")
@pytest.mark.slow
def test_token_by_token_by_the_kernel(kind, T):
    """With the interpreted TPU kernel, which attends to the cache."""
    decoder = Decoder(config_of(T), kernel=functools.partial(tpu_key_block, interpret=True))
    found = cached_logits(decoder, kind, T, T - 3)
    np.testing.assert_allclose(found, plain(kind, T)[T - 4 :], atol=1e-4)


@cases("windowed")
@pytest.mark.slow
def test_token_by_token_from_a_cache_on_several_devices(kind, T):
    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    _, params, _ = setting(T)
    found = cached_logits(Decoder(config_of(T), mesh=mesh), kind, T, T - 3, mesh)
    np.testing.assert_allclose(found, plain(kind, T)[T - 4 :], atol=1e-4)

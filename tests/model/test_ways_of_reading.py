"""One text of 4,097 tokens, read at once, in chunks, token by token, and on several devices: the same logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention.pallas_tpu import tpu_span
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.model import Model
from pe_lab.model.generation import Decoder, with_shared_rotation
from pe_lab.model.reading import ChunkReader
from pe_lab.model.request import Request, Schedules
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Alibi, Beta, DynamicNTK, Layer, NoPE, Rope, Yarn, build_schedule

T = 4097
CONFIG = ModelConfig(
    vocab_size=64, layers=3, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=32, dtype="float32", qk_norm="head"
)
LAYERS = {
    "rope": [Layer(Rope(base=1e4))] * 3,
    "yarn": [Layer(Rope(base=1e4, scaling=Yarn(factor=8, original_length=512)))] * 3,
    "dynamic ntk": [Layer(Rope(base=1e4, scaling=DynamicNTK(original_length=512)))] * 3,
    "alibi": [Layer(Alibi())] * 3,
    "windowed": [Layer(Rope(base=1e4), window=300), Layer(Rope(base=1e4), window=300), Layer(NoPE())],
    "dropped with beta": [Layer(NoPE(), logit_scale=Beta(0.412, 512))] * 3,
}
ALL = pytest.mark.parametrize("kind", LAYERS)


@functools.cache
def setting():
    model = Model(CONFIG)
    params = model.init(jax.random.key(0))
    # Larger than at the start of training: logits that attend to something in particular.
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, params)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, T)).astype(np.int32)
    return model, params, tokens


def schedule_of(kind: str):
    return build_schedule(LAYERS[kind], CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, T)


@functools.cache
def plain(kind: str) -> np.ndarray:
    """Logits by the reference: all [T, T] logits of a head at once."""
    _, params, tokens = setting()
    model = Model(dataclasses.replace(CONFIG, attention="reference"))
    return np.asarray(jax.jit(model.apply)(params, tokens, None, None, schedule_of(kind)))[0]


def logits_of(hidden) -> np.ndarray:
    model, params, _ = setting()
    return np.asarray(hidden @ model.unembedding(params).T)


@ALL
def test_in_blocks(kind):
    model, params, tokens = setting()
    model = Model(dataclasses.replace(CONFIG, attention="chunked"))
    found = jax.jit(model.apply)(params, tokens, None, None, schedule_of(kind))[0]
    np.testing.assert_allclose(found, plain(kind), atol=1e-4)


@ALL
def test_in_chunks(kind):
    """4,097 tokens in chunks of 512: eight of them, and one token more."""
    _, params, tokens = setting()
    reader = ChunkReader(CONFIG)
    at = np.arange(T)[None]
    found = reader.hidden(params, tokens, at, schedule_of(kind))[0]
    np.testing.assert_allclose(logits_of(found), plain(kind), atol=1e-4)
    losses = reader.losses(params, tokens, np.roll(tokens, -1, 1), schedule_of(kind))
    log_p = jax.nn.log_softmax(plain(kind))
    np.testing.assert_allclose(losses[0], -log_p[np.arange(T), np.roll(tokens[0], -1)], atol=1e-4)
    assert max(reader.traces.values()) == 1  # the ninth chunk is read by the program of the first


@ALL
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_on_a_ring_of_devices(kind, parts):
    model, params, tokens = setting()
    mesh = make_mesh(MeshConfig(data=1, context=parts), jax.devices()[:parts])

    @jax.jit
    def apply(params, tokens, schedule):
        with use_mesh(mesh, AxisRules()):
            targets = jnp.roll(tokens, -1, 1)
            batch = {"tokens": tokens, "targets": targets}
            return model.apply(params, tokens, None, None, schedule), model.token_loss(params, batch, schedule)

    found, losses = apply(params, tokens, schedule_of(kind))
    np.testing.assert_allclose(found[0], plain(kind), atol=1e-4)
    log_p = jax.nn.log_softmax(plain(kind))
    np.testing.assert_allclose(losses[0], -log_p[np.arange(T), np.roll(tokens[0], -1)], atol=1e-4)


def cached_logits(decoder: Decoder, kind: str, prompt: int, mesh=None) -> np.ndarray:
    """Logits after a prompt and after each of the tokens that follow it, from the decoder's own compiled steps."""
    model, params, tokens = setting()
    schedule = with_shared_rotation(schedule_of(kind))
    seen = []
    programs = decoder.programs
    logits = programs._logits

    def recorded(params, last):
        found = logits(params, last)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), found, ordered=mesh is None)
        return found

    programs._logits = recorded
    # What is chosen does not matter: the text's own tokens are fed.
    request = Request(max_new_tokens=T - prompt + 1)
    text = tokens[0]
    weights = decoder.prepare(params)
    step = programs.next

    def forced(params, cache, token, lengths, *rest, **named):
        at = int(np.asarray(lengths)[0])
        return step(params, cache, programs.place(jnp.asarray(text[at : at + 1])), lengths, *rest, **named)

    programs.next = forced
    decoder.generate(weights, [text[:prompt]], Schedules.fixed(schedule), request)
    jax.effects_barrier()
    return np.concatenate(seen)


@ALL
def test_token_by_token(kind):
    """A prompt of 4,089 tokens, read in chunks, and eight steps."""
    found = cached_logits(Decoder(CONFIG), kind, T - 8)
    np.testing.assert_allclose(found, plain(kind)[T - 9 :], atol=1e-4)


@ALL
def test_token_by_token_by_the_kernel(kind):
    """The same, with our TPU kernel reading the cache; interpreted."""
    decoder = Decoder(CONFIG, span=functools.partial(tpu_span, interpret=True))
    found = cached_logits(decoder, kind, T - 3)
    np.testing.assert_allclose(found, plain(kind)[T - 4 :], atol=1e-4)


@ALL
def test_token_by_token_from_a_cache_on_several_devices(kind):
    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    _, params, _ = setting()
    found = cached_logits(Decoder(CONFIG, mesh=mesh), kind, T - 3, mesh)
    np.testing.assert_allclose(found, plain(kind)[T - 4 :], atol=1e-4)

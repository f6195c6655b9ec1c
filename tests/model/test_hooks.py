"""Encodings with hooks in a whole model: every implementation, decoding with a cache, packing, meshes; bad hooks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import MeshConfig, ModelConfig, register_kind
from pe_lab.errors import UserError, call
from pe_lab.model import Decoder, GenerationRequest, Model, Schedules
from pe_lab.model.programs import ChunkedForward
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Encoding, Layer, Parameter, build_schedule, layer_hooks, layers, register
from pe_lab.positional.registry import ENCODINGS

CONFIG = ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=64, heads=4, kv_heads=2, dtype="float32")
CONFIG = dataclasses.replace(CONFIG, attention_chunk=8, attention="chunked")
TOKENS = jax.random.randint(jax.random.key(1), (2, 32), 0, 64)


@register("every_hook")
@dataclass(frozen=True)
class EveryHook(Encoding):
    """All hooks but `logits`, with parameters that are far from neutral."""

    relative = True
    content = True
    widens: bool = False

    def init(self, key, shape):
        H, _, _, D = shape
        draw = lambda n, *sizes: 0.3 * jax.random.normal(jax.random.fold_in(key, n), sizes)  # noqa: E731
        return {
            "forget": Parameter(draw(0, D, H), ("embed", "heads"), decay=True),
            "scale": Parameter(1 + draw(1, H), ("heads",)),
            "slope": Parameter(draw(2, H), ("heads",), learning_rate=3.0),
            "sink": Parameter(draw(3, H), ("heads",)),
        }

    def running_sum(self, params, x, earlier):
        return jax.nn.log_sigmoid(x.astype(jnp.float32) @ params["forget"])

    def encode(self, params, q, k, positions, x):
        scale = params["scale"] * jnp.log(positions + 2.0)[..., None]
        q, k = q * scale[..., None], k * 0.9
        wider = lambda y: jnp.concatenate([y, 0.1 * y[..., :2]], -1)  # noqa: E731
        return (wider(q), wider(k)) if self.widens else (q, k)

    def bias(self, params, query_positions, key_positions):
        far = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(jnp.float32)
        return params["slope"][:, None, None] * jnp.log1p(far)

    def key_bias(self, params, x):
        return -x.swapaxes(1, 2)

    def sink(self, params):
        return params["sink"]

    def output(self, params, x, out, value):
        return out * jax.nn.sigmoid(0.1 * x)[..., None].astype(out.dtype)


@register("row_function")
@dataclass(frozen=True)
class RowFunction(Encoding):
    """A function of all logits of a query that depends on the order of keys."""

    def logits(self, params, q, logits):
        gates = jax.nn.sigmoid(logits)
        return logits + 0.1 * jnp.flip(jnp.cumsum(jnp.flip(gates, -1), -1), -1)


SETS = {
    "beside rope": ["rope/with=every_hook", "rope"],
    "alone, wider": [Layer(EveryHook(widens=True)), "nope"],
    "on some heads": ["rope/heads=1,2,3:every_hook", "rope/window=5/with=every_hook"],
    "a function of rows": ["rope/with=row_function", "alibi/window=9/with=row_function/with=every_hook"],
}


def model_of(described, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    described = layers(described, config.layers)
    schedule = build_schedule(described, config.heads, config.kv_heads, 8)
    model = Model(config, hooks=schedule.hooks)
    return model, schedule, jax.jit(model.init)(jax.random.key(0))


def loss_and_gradient(model, schedule, params, **arrays):
    batch = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1), "weights": jnp.ones(TOKENS.shape), **arrays}
    return jax.jit(jax.value_and_grad(model.loss_sum))(params, batch, schedule)


def assert_close(found, wanted, tolerance=2e-5):
    for path, a in jax.tree_util.tree_leaves_with_path(found):
        b = dict(jax.tree_util.tree_leaves_with_path(wanted))[path]
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_chunked_and_scanned_equal_the_reference(name):
    model, schedule, params = model_of(SETS[name])
    found = loss_and_gradient(model, schedule, params)
    learned = found[1]["layers"].get("positional", {})
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(learned)), "a parameter without gradient"
    reference, _, _ = model_of(SETS[name], attention="reference", scan=False)
    assert_close(found, loss_and_gradient(reference, schedule, params))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_chunks_against_a_cache_equal_one_pass(name):
    model, schedule, params = model_of(SETS[name])
    targets = np.roll(np.asarray(TOKENS), -1, 1)
    chunked = ChunkedForward(model.config, chunk=8).losses(params, np.asarray(TOKENS), targets, schedule)
    whole = jax.jit(model.token_loss)(params, {"tokens": TOKENS, "targets": jnp.asarray(targets)}, schedule)
    np.testing.assert_allclose(chunked, whole, atol=3e-6)


@pytest.mark.slow
def test_packed_documents_equal_separate_ones():
    model, schedule, params = model_of(SETS["beside rope"])
    segments = jnp.asarray([[0] * 12 + [1] * 20] * 2)
    positions = jnp.asarray([[*range(12), *range(20)]] * 2)
    apply = jax.jit(model.apply)
    packed = apply(params, TOKENS, positions, segments, schedule)
    for part in (slice(0, 12), slice(12, 32)):
        np.testing.assert_allclose(packed[:, part], apply(params, TOKENS[:, part], None, None, schedule), atol=3e-6)


@pytest.mark.slow
def test_dense_equals_chunked():
    model, schedule, params = model_of(SETS["beside rope"])
    dense, _, _ = model_of(SETS["beside rope"], attention="dense")
    assert_close(loss_and_gradient(dense, schedule, params), loss_and_gradient(model, schedule, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(data=2, context=4), dict(data=2, tensor=2, context=2), dict(data=1, fsdp=2, tensor=2)]
)
@pytest.mark.parametrize("name", ["beside rope", "alone, wider"])
def test_on_meshes(name, mesh):
    model, schedule, params = model_of(SETS[name])
    expected = loss_and_gradient(model, schedule, params)
    with use_mesh(make_mesh(MeshConfig(**mesh), jax.devices()[: int(np.prod(list(mesh.values())))]), AxisRules()):
        assert_close(loss_and_gradient(model, schedule, params), expected, 5e-5)


@pytest.mark.parametrize("text", ["forgetting", "selective_rope:convolution=4"])
def test_training_with_running_sums_begins_on_a_context_axis(text):
    """The shapes of hooks are those of a sequence that the axis divides."""
    model, schedule, _ = model_of("nope")
    schedule = build_schedule(layers(text, 4), 4, 2, 8)
    alone = model.attention_by_layer(schedule.structure, 32, segments=True)
    with use_mesh(make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4]), AxisRules()):
        assert model.attention_by_layer(schedule.structure, 32, segments=True) == ("chunked",) * 4 == alone


@register("looks_two_back")
@dataclass(frozen=True)
class LooksTwoBack(Encoding):
    """Keys with a part of the token two before, which a chunk does not have: not exact under a cache."""

    content = True
    exact_cache = False

    def encode(self, params, q, k, positions, x):
        return q, k + jnp.pad(k, ((0, 0), (2, 0), (0, 0), (0, 0)))[:, :-2]


@pytest.mark.slow
def test_decoding_without_an_exact_cache_takes_whole_passes():
    """Every token is the likeliest of a pass over all tokens before it; chunks against a cache are refused."""
    model, schedule, params = model_of("rope/with=looks_two_back")
    params["token_embedder"]["embedding"] *= 50.0
    prompts = [np.asarray(TOKENS[0, :9]), np.asarray(TOKENS[1, :5])]
    made = Decoder(model.config)
    ended = made.generate(made.prepare(params), prompts, Schedules.fixed(schedule), GenerationRequest(max_new_tokens=4))
    for prompt, ending in zip(prompts, ended, strict=True):
        text = [*map(int, prompt), *ending.ids]
        logits = model.apply(params, jnp.asarray([text]), None, None, schedule)
        assert ending.ids == np.asarray(logits[0, len(prompt) - 1 : -1].argmax(-1)).tolist()
    with pytest.raises(UserError, match="LooksTwoBack is not exact under a KV cache"):
        ChunkedForward(model.config, chunk=8).losses(params, np.asarray(TOKENS), np.asarray(TOKENS), schedule)


# --- Bad hooks ---


def bad(**methods):
    kind = type("Bad", (Encoding,), {"__module__": __name__, **methods})
    return dataclass(frozen=True)(kind)()


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"bias": lambda self, p, q, k: jnp.zeros((7, len(q), len(k)))}, r"Bad.bias returned shape \[7, 8, 8\]"),
        ({"encode": lambda self, p, q, k, at, x: q}, r"Bad.encode returned shape .* must return queries"),
        ({"encode": lambda self, p, q, k, at, x: None}, r"Bad.encode returned shape NoneType; it must return queries"),
        ({"output": lambda self, p, x, out, value: None}, r"Bad.output returned a NoneType; it must return an array"),
        ({"encode": lambda self, p, q, k, at, x: (q[..., :4], k)}, "one K"),
        ({"key_bias": lambda self, p, x: x}, r"Bad.key_bias returned shape .* must return \[B, H, S\]"),
        ({"output": lambda self, p, x, out, value: value}, r"Bad.output returned .* \[B, T, H, K\]"),
        ({"sink": lambda self, p: jnp.zeros(3)}, r"Bad.sink returned shape \[3\]; it must return \[H\]"),
        ({"logits": lambda self, p, q, logits: logits[:, :1]}, "Bad.logits returned"),
        (
            {"running_sum": lambda self, p, x, earlier: x[0], "sink": lambda self, p: jnp.zeros(4)},
            "Bad.running_sum returned",
        ),
        ({"frequencies": lambda self, K, n: (np.ones(3), np.ones(3)), "sink": lambda self, p: 0}, "Bad.frequencies"),
    ],
)
def test_a_wrong_shape_names_the_encoding(hooks, message):
    with pytest.raises(UserError, match=message):
        described = (Layer(bad(**hooks)),) * 4
        schedule = build_schedule(described, 4, 2, 8)
        model = Model(CONFIG, hooks=schedule.hooks)
        jax.eval_shape(model.apply, model.shapes, TOKENS[:, :8], None, None, schedule)


def raises(*_):
    raise KeyError("missing")


@pytest.mark.parametrize(
    "hook",
    ["encode", "bias", "key_bias", "logits", "sink", "output", "running_sum", "frequencies", "slopes", "init"],
)
def test_a_hook_that_raises_is_named_with_its_line(hook):
    one = bad(**({"sink": lambda self, p: jnp.zeros(4)} | {hook: raises}))
    if hook == "init":
        one = register("raising_init")(type(one))()
    with pytest.raises(UserError, match=f"Bad.{hook} raised KeyError: 'missing' .*test_hooks.py, line [0-9]+: raise"):
        schedule = build_schedule((Layer(one),) * 4, 4, 2, 8)
        model = Model(CONFIG, hooks=schedule.hooks)
        jax.eval_shape(model.apply, model.shapes, TOKENS[:, :8], None, None, schedule)


def test_errors_of_pe_lab_keep_their_traceback_and_a_function_is_named():
    with pytest.raises(TypeError, match="NoneType"):
        call(layers("rope", 1)[0].encoding, "frequencies", None, None)
    with pytest.raises(UserError, match="raises raised KeyError: 'missing' "):
        call(raises, "", 1)


def test_callables_without_a_name_or_a_module_are_named(monkeypatch):
    class Raises:
        def __call__(self, *_):
            raise KeyError("missing")

    for one, name in (
        (functools.partial(raises, 1), "raises"),
        (Raises(), "Raises"),
        (functools.partial(Raises()), "Raises"),
    ):
        with pytest.raises(UserError, match=f"{name} raised KeyError: 'missing' .*test_hooks.py, line [0-9]+: raise"):
            call(one, "", 1)
    monkeypatch.setattr(Raises, "__module__", None)
    with pytest.raises(UserError, match="Raises raised KeyError: 'missing' "):
        call(Raises(), "", 1)


def test_settings_that_raise_are_named(monkeypatch):
    @dataclass(frozen=True)
    class RaisingSettings(Encoding):
        period: float = 1.0

        def __post_init__(self):
            raise ZeroDivisionError(f"period {self.period}")

    monkeypatch.setitem(ENCODINGS, "raising_settings", RaisingSettings)
    register_kind("raising_settings", RaisingSettings)
    with pytest.raises(UserError, match="RaisingSettings raised ZeroDivisionError: period 2.0 .* line [0-9]+: raise"):
        layers("rope/with=raising_settings:period=2", 1)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda self, key, shape: {"w": jnp.zeros(4)}, "'w' is a .*; give Parameter"),
        (lambda self, key, shape: {"w": Parameter(jnp.zeros(4), ())}, r"'w' has shape \[4\] and axes \(\)"),
        (lambda self, key, shape: jnp.zeros(4), "init returned .*; it must return a dict"),
    ],
)
def test_a_parameter_without_axes_is_refused(init, message):
    one = register(f"bad_parameter_{len(message)}")(type(bad(init=init, sink=lambda self, p: p["w"])))()
    with pytest.raises(UserError, match=message):
        _ = Model(CONFIG, hooks=layer_hooks((Layer(one),) * 4, 4)).shapes


def test_weights_without_the_parameters_are_refused():
    model, schedule, params = model_of("rope")
    with_hooks = model_of(SETS["beside rope"])[1]
    with pytest.raises(UserError, match="'every_hook' has parameters, and these weights have none"):
        jax.eval_shape(model.apply, params, TOKENS, None, None, with_hooks)

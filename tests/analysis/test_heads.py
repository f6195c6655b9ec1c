"""What a layer pass measures: frequency use, attention of heads and logit bounds, against all weights in float64."""

import dataclasses
from typing import Any, NamedTuple

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import LAYERS, G, H, K

from pe_lab.analysis import frequency_use, heads, logit_bounds
from pe_lab.analysis.heads import KINDS, MAP, NEAR, SAMPLED, Heads, edges, kinds, sampled_queries
from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model import layer_pass as module
from pe_lab.model.decoder import layer_arrays
from pe_lab.model.layer_pass import layer_pass
from pe_lab.model.modules import NO_INPUTS
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Layer, NoPE, Rope, build_schedule

R = K // 2
LONG = 261  # no multiple of a block


@dataclasses.dataclass(frozen=True)
class Every:
    """All three measurements in one compiled program for each layer."""

    length: int

    def __call__(self, view: Any, data: Any) -> tuple[Any, ...]:
        attended = heads._HeadsOfLayer(self.length, self.length)(view, data)
        return frequency_use._of_layer(view, None), attended, logit_bounds._of_layer(view, None)


class Case(NamedTuple):
    layers: tuple[Layer, ...]
    found: list[Any]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    weights: list[np.ndarray]
    positions: np.ndarray
    segments: np.ndarray


# A second or two to compile each structure.
BOTH = [
    pytest.param((97, (LAYERS[5],)), id="packed, 97 tokens"),
    pytest.param((97, LAYERS), id="packed, 97 tokens, all layers", marks=pytest.mark.slow),
    pytest.param((LONG, LAYERS), id="261 tokens", marks=pytest.mark.slow),
]


def questions(T: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each of two sequences, the positions of two queries, and of the tokens that answer them."""
    return np.array([[T - 2, T - 1], [70, 80]]), np.array([[30, T - 4], [3, 69]])


@pytest.fixture(scope="module", params=BOTH)
def case(request) -> Case:
    T, layers = request.param
    lm, ids = dense.language_model(layers), dense.tokens(T)
    places = {}
    segments, positions = np.ones((2, T), np.int32), np.broadcast_to(np.arange(T), (2, T)).astype(np.int32)
    if T != LONG:
        segments, positions = dense.packed(T)
        places = {"segments": segments, "positions": positions}
    at, source = questions(T)
    asked = at, source, np.stack([source - 1, source + 2], -1)
    found = lm.layer_pass(ids, Every(T), data=(*sampled_queries(T), asked), **places)
    views = lm.layer_pass(ids, _raw, **places)
    q, k, v = (np.stack([np.asarray(view[n], np.float64) for view in views]) for n in range(3))
    weights = [dense.weights(q[n], k[n], layer, positions, segments) for n, layer in enumerate(layers)]
    return Case(layers, found, q, k, v, weights, positions, segments)


def _raw(view, data):
    return view.query, view.key, view.value


def close(found, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=atol)


def test_frequency_use_is_what_all_pairs_and_all_weights_say(case):
    def norms(x):
        return np.hypot(x[..., :R], x[..., R:]).mean(1)

    for n, layer in enumerate(case.layers):
        query, key, value, attended, average = case.found[n][0]
        close(query, norms(case.q[n]))
        close(key, norms(case.k[n]))
        close(value, norms(case.v[n]))
        q = dense.rotated(case.q[n], layer, case.positions)
        k = dense.rotated(np.repeat(case.k[n], H // G, 2), layer, case.positions)
        by_channel = np.einsum("bthk,bshk->bhtsk", q, k) * dense.scale(layer)
        parts = by_channel[..., :R] + by_channel[..., R:]
        visible = case.weights[n] > 0
        equal = visible / visible.sum(-1, keepdims=True)
        for got, weights in ((attended, case.weights[n]), (average, equal)):
            close(got, (parts * weights[..., None]).sum(3).mean(2), atol=1e-4)


def test_attention_of_heads_is_what_all_weights_say(case):
    T = case.positions.shape[1]
    index = np.arange(T)
    distance = index[:, None] - index
    begin = np.stack([np.argmax(one[:, None] == one[None, :], -1) for one in case.segments])
    for n in range(len(case.layers)):
        weights, found = case.weights[n], Heads(*case.found[n][1])
        own = weights[:, :, index, index]
        previous = np.where(index > 0, weights[:, :, index, index - 1], 0)
        first = np.take_along_axis(weights, begin[:, None, :, None], -1)[..., 0]
        close(found.entropy, -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).mean(-1), atol=1e-4)
        close(found.on_self, own.mean(-1))
        close(found.on_previous, previous.mean(-1))
        close(found.on_first, first.mean(-1))
        close(found.largest, weights.max(-1).mean(-1))
        close(found.distance, (weights * distance).sum(-1).mean(-1), atol=1e-3)
        half = previous >= 0.5
        assert np.abs(np.asarray(found.previous_share) - half.mean(-1)).max() <= 1 / T  # a weight of 0.5, rounded
        elsewhere = np.where(half, 0, first).sum(-1) / np.maximum((~half).sum(-1), 1)
        close(found.first_elsewhere, elsewhere, atol=2e-2)
        bins = [*edges(T), T]
        assert bins[:NEAR] == list(range(NEAR)) and bins[-2] < T and bins[-2] * 2 >= T
        for b, (low, high) in enumerate(zip(bins[:-1], bins[1:], strict=True)):
            expected = (weights * ((distance >= low) & (distance < high))).sum((-1, -2)) / T
            close(found.by_distance[..., b], expected)
        norms = [np.hypot(x[..., :R], x[..., R:]).mean(1) for x in (case.q[n], np.repeat(case.k[n], H // G, 2))]
        bound = norms[0] * norms[1]
        close(found.fast, bound[..., 0] / bound.sum(-1))  # one of four pairs
        far = (weights * (distance >= NEAR)).sum(-1) - np.where(index - begin[:, None] >= NEAR, first, 0)
        close(found.far, far.mean(-1))


def test_maps_are_averages_over_queries_of_sums_over_keys(case):
    T = case.positions.shape[1]
    cell = np.minimum(np.arange(T) * MAP // T, MAP - 1)
    for n in range(len(case.layers)):
        found = np.asarray(Heads(*case.found[n][1]).map)
        for row, column in ((0, 0), (MAP // 2, 3), (MAP - 1, MAP - 1), (40, 39)):
            block = case.weights[n][:, :, cell == row][..., cell == column]
            expected = block.sum(-1).mean(-1) if (cell == row).any() else 0
            close(found[:, :, row, column], expected)


def test_questions_find_their_needle_by_all_weights(case):
    T = case.positions.shape[1]
    for n in range(len(case.layers)):
        found = Heads(*case.found[n][1])
        at, source = questions(T)
        for b in range(2):
            rows = case.weights[n][b][:, at[b]]  # [H, Q, T]
            close(found.on_source[b], np.stack([rows[:, q, source[b, q]] for q in range(2)]).mean(0))
            close(found.on_needle[b], np.stack([rows[:, q, source[b, q] - 1 : source[b, q] + 2].sum(-1) for q in range(2)]).mean(0))  # fmt: skip  # noqa: E501
            entropy = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1)
            close(found.needle_entropy[b], entropy.mean(-1), atol=1e-4)
            close(found.needle_first[b], rows[..., 0].mean(-1))
            d = heads.AROUND
            close(found.around[b][:, d + 1], np.stack([rows[:, q, source[b, q]] for q in range(2)]).mean(0))
        assert np.isnan(found.around[1][:, 0]).all()  # 32 tokens before the second token


def test_logit_bounds_are_the_products_of_norms(case):
    T = case.positions.shape[1]
    index = np.arange(T)
    begin = np.stack([np.argmax(one[:, None] == one[None, :], -1) for one in case.segments])
    for n, layer in enumerate(case.layers):
        logit, bound, alignment, tightest, parts, tokens = (np.asarray(x) for x in case.found[n][2])
        full = dense.logits(case.q[n], case.k[n], layer, case.positions)
        norm_q = np.linalg.norm(dense.rotated(case.q[n], layer, case.positions), axis=-1) * dense.scale(layer)
        repeated = dense.rotated(np.repeat(case.k[n], H // G, 2), layer, case.positions)
        norm_k = np.linalg.norm(repeated, axis=-1)
        window = layer.window or T
        keys = [np.broadcast_to(index, (2, T)), np.broadcast_to(index - 1, (2, T)), begin]
        counts = [np.full((2, T), True), keys[1] >= begin, index - begin < window]
        for t in range(3):
            at = np.maximum(keys[t], 0)
            one = np.take_along_axis(full, at[:, None, :, None], -1)[..., 0].swapaxes(1, 2)  # [B, T, H]
            limit = norm_q * np.take_along_axis(norm_k, at[..., None], 1)
            use = counts[t]
            for b in range(2):
                close(logit[b, :, t], one[b][use[b]].mean(0), atol=1e-4)
                close(bound[b, :, t], limit[b][use[b]].mean(0), atol=1e-4)
                close(alignment[b, :, t], (one[b] / limit[b])[use[b]].mean(0))
                close(tightest[b, :, t], (one[b] / limit[b])[use[b]].max(0))
        close(parts.sum(-1), logit, atol=1e-4)
        assert (tightest < 1 + 1e-5).all()
        close(tokens[:, :, 1], full[:, :, index, index][..., :8], atol=1e-4)
        assert np.isnan(tokens[:, :, 2, 0]).all()
        close(tokens[:, :, 2, 1:], full[:, :, index[1:], index[:-1]][..., :7], atol=1e-4)


@pytest.mark.slow
def test_aligned_queries_and_keys_reach_the_bound():
    """Theorem 5.3's construction: equal queries and keys are aligned with themselves, and with nothing else."""
    view = dense.language_model((Layer(Rope(100.0)),)).layer_pass(dense.tokens(40), _raw)[0]
    key = jnp.asarray(view[1])
    made = _view(np.repeat(view[1], H // G, 2), key)
    _, _, alignment, tightest, *_ = logit_bounds._of_layer(made, None)
    np.testing.assert_allclose(alignment[:, :, 0], 1, atol=1e-5)
    assert (np.asarray(alignment)[:, :, 1] < 0.95).all() and (np.asarray(tightest) < 1 + 1e-5).all()


def _view(query, key):
    model = Model(dense.CONFIG)
    schedule = jax.tree.map(jnp.asarray, build_schedule([Layer(Rope(100.0))], H, G, K))
    arrays = tuple(a[0] for a in layer_arrays(schedule))
    encoding = model.layer_encoding(arrays, schedule.structure[0], jnp.arange(query.shape[1])[None])
    return module.LayerView(None, None, jnp.asarray(query), key, key, encoding, None, None, None, {}, jnp.int32(0), 32)


@pytest.mark.slow
def test_padding_does_not_count():
    lm, ids = dense.language_model((Layer(Rope(100.0)),)), dense.tokens(97)
    padded = np.pad(ids[:, :80], ((0, 0), (0, 17)), mode="edge")
    found = heads.measure(lm, padded, length=80)
    for a, b in zip(found, heads.measure(lm, ids[:, :80]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.isnan(found.on_source).all() and np.isnan(found.around).all()  # no questions were asked


def test_sampled_queries_stand_for_all():
    """Every early query, one of each later range; a mean over them is one over all, if it is linear by range."""
    for length in (1, 40, SAMPLED, SAMPLED + 1, 8192):
        queries, shares = sampled_queries(length)
        assert len(queries) == min(length, SAMPLED) == len(set(queries.tolist())) and shares.sum() == pytest.approx(1)
        assert queries.max() < length and (np.diff(queries) > 0).all()
    assert queries[: 2 * NEAR].tolist() == list(range(2 * NEAR)) and len(set(np.diff(queries[2 * NEAR :]))) > 5
    assert (queries**2 * shares).sum() == pytest.approx((np.arange(8192.0) ** 2).mean(), rel=0.01)


def test_attention_to_the_first_token_has_its_true_distances():
    """A head that attends to the first token alone: query i at distance i, so each distance has weight 1 / T."""
    T = 1024
    weights = np.zeros((1, 1, T, T), np.float32)
    weights[..., 0] = 1
    found = by_distance_of(weights)
    bins = np.array([*edges(T), T])
    np.testing.assert_allclose(found[:NEAR], 1 / T, rtol=1e-4)
    np.testing.assert_allclose(found, np.diff(bins) / T, rtol=0.05)


def by_distance_of(weights):
    """What `_binned` makes of given weights [1, 1, T, T]."""
    T = weights.shape[-1]

    def rows(query, key, encoding, rows, **places):
        return jnp.asarray(weights)[:, :, rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "attention_rows", rows)
        view = _view(np.zeros((1, T, H, K), np.float32), jnp.zeros((1, T, G, K)))
        queries, shares = map(jnp.asarray, sampled_queries(T))
        return np.asarray(heads._HeadsOfLayer(T, T)._binned(view, queries, shares, {})[1])[0, 0]


def of_kind(**values):
    """Means of one head, all 0 but these; the weight near is 0.2 unless given."""
    near = values.pop("near", 0.2)
    means = {name: np.full((1, 1), float(values.get(name, 0))) for name in Heads._fields}
    means["by_distance"] = np.full((1, 1, NEAR + 1), near / NEAR)
    return KINDS[kinds(means)[0, 0]]


def test_kinds_are_by_their_thresholds():
    assert of_kind(on_self=0.5, on_previous=0.5) == "diagonal"
    assert of_kind(on_self=0.49, on_previous=0.5) == "previous token"
    apostrophe = dict(previous_share=0.02, first_elsewhere=0.5)
    assert of_kind(**apostrophe, on_first=0.9) == "apostrophe-like"
    assert of_kind(**(apostrophe | {"previous_share": 0.019}), on_first=0.9) == "sink"
    assert of_kind(**(apostrophe | {"previous_share": 0.51}), on_first=0.5) == "sink"
    assert of_kind(**(apostrophe | {"first_elsewhere": 0.49}), near=0.5) == "local"
    assert of_kind(on_source=0.1, on_first=0.9) == "retrieval" and of_kind(on_source=0.09, on_first=0.5) == "sink"
    assert of_kind(on_source=np.nan, far=0.5) == "semantic" and of_kind(far=0.49, on_first=0.49) == "mixed"


def test_all_layers_of_a_structure_share_a_program():
    lm = dense.language_model(tuple(Layer(Rope(b)) for b in (10.0, 20.0, 30.0, 9.0, 9.0, 9.0, 9.0)))
    before = module._layer._cache_size()
    assert len(lm.layer_pass(dense.tokens(21), _raw)) == 7
    assert module._layer._cache_size() == before + 1


@pytest.mark.slow  # 8 s
@pytest.mark.parametrize("measure", ["frequency_use", "heads", "logit_bounds"])
def test_memory_is_linear_in_the_length(measure):
    """The compiled program of a layer: attention, the measurement, and the output in place of the input."""

    def needed(length: int) -> int:
        model = Model(dataclasses.replace(dense.CONFIG, attention_chunk=128), backward=False)
        shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
        schedule = build_schedule([Layer(Rope(100.0))] * 6, H, G, K)
        measures = {
            "frequency_use": (frequency_use._of_layer, None),
            "heads": (heads._HeadsOfLayer(length, length), (shape(512), shape(512, dtype=jnp.float32), None)),
            "logit_bounds": (logit_bounds._of_layer, None),
        }
        function, data = measures[measure]
        lm = dense.language_model()
        blocks, arrays = lm.checkpoint.params["layers"], layer_arrays(jax.tree.map(jnp.asarray, schedule))
        stacked = (blocks, jnp.int32(0)), (arrays, jnp.int32(0))
        x = shape(1, length, 32, dtype=jnp.float32)
        lowered = module._layer.lower(
            model, schedule.structure[0], function, x, stacked, {}, NO_INPUTS, None, None, data
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    at_8k, at_32k = (needed(length) for length in (8192, 32768))
    assert at_32k < 4.1 * at_8k and at_8k < 8192 * 8192 * 4


def test_a_mesh_that_shards_sequences_is_refused():
    lm = dense.language_model((Layer(NoPE()),))
    model = Model(lm.config)
    mesh = make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    message = r"not measured on .* over 2 devices: use a mesh"
    with use_mesh(mesh, AxisRules()), pytest.raises(UserError, match=message):
        list(layer_pass(model, lm.checkpoint.params, dense.tokens(8), lm.schedule, _raw))


def test_what_is_not_there_is_an_error():
    lm = dense.language_model((Layer(NoPE()),))
    with pytest.raises(UserError, match="There is no layer 1 to measure; the model has 1, counted from 0"):
        heads.measure(lm, dense.tokens(8), layers=[0, 1])
    with pytest.raises(UserError, match="There is no layer to measure: name at least one"):
        lm.layer_pass(dense.tokens(8), _raw, layers=[])
    with pytest.raises(UserError, match="The schedule has 2 layers and the model 1"):
        schedule = build_schedule([Layer(NoPE())] * 2, H, G, K)
        list(layer_pass(Model(lm.config), lm.checkpoint.params, dense.tokens(8), schedule, _raw))

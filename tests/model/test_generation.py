"""Cached decoding against full forward passes, at every step: each scheme, unequal prompts, windows, growing texts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pe_lab.model.programs
import pe_lab.parallel.sharding
from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Decoder, GenerationRequest, GenerationStatistics, Model, Sampling, Schedules
from pe_lab.model.cache import plan
from pe_lab.model.generation import chunks
from pe_lab.model.sampling import choose
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Bands,
    Beta,
    DynamicNTK,
    DynamicYarn,
    Encoding,
    Gaussian,
    HeadEdit,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Uniform,
    Yarn,
    build_schedule,
    layers,
    rnope_swa,
)
from pe_lab.positional.notebook import NotebookBias, NotebookYarn

TINY = ModelConfig(vocab_size=64, layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=8, dtype="float32")
TOLERANCE = 1e-4


constrained = pe_lab.parallel.sharding._current.get
SEEN: list[list[np.ndarray]] = []
FORCED: list[np.ndarray] = []  # a text: its tokens are "chosen", whatever the logits


@pytest.fixture(scope="module", autouse=True)
def seen():
    """The logits that tokens were chosen from, in the order of choosing: [(logits [B, V], positions [B])].

    One list for all: a worker that steals tests of this file makes the fixture anew, and `decoder` keeps programs that
    were compiled with the one before.
    """

    def spy(logits, draw, rows, positions):
        if constrained() is None:  # on several devices there is no order to see things in
            jax.debug.callback(lambda *a: SEEN.append([np.asarray(x) for x in a]), logits, positions, ordered=True)
        if FORCED:
            return jnp.asarray(FORCED[0])[positions]
        return choose(logits, draw, rows, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pe_lab.model.programs, "choose", spy)
        yield SEEN


@functools.cache
def decoder(config: ModelConfig, scan: bool = False) -> Decoder:
    return Decoder(config, scan=scan)


@functools.cache
def parameters(config: ModelConfig):
    """Wide enough that attention is peaked, positions matter, and logits are far apart."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name, values = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "scale":
            values = 0.3 * values + (config.norm != "rms_plus_one")
        elif name.endswith("bias") or "embedding" in name:
            values = 0.5 * values
        else:
            values = values * 1.5 / np.prod(leaf.shape[1:-1]) ** 0.5
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, Model(config).shapes)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, schedule):
    return model.apply(params, tokens, None, None, schedule)


full_models = functools.cache(Model)


def schedules_of(config, described, **general) -> Schedules:
    described = [described] * config.layers if isinstance(described, Layer) else list(described)
    assert len(described) == config.layers

    def at(length):
        schedule = build_schedule(described, config.heads, config.kv_heads, config.head_dim, length)
        return schedule.generalize(**general) if general else schedule

    return Schedules(at, tuple(layer.follows_length for layer in described))


def reference(config, text, schedules: Schedules, first: int) -> np.ndarray:
    """Next-token logits of a full pass over each text[:n], n from `first` on, under the schedule of its length."""
    model, params = full_models(dataclasses.replace(config, scan=False)), parameters(config)
    # What comes after a text does not change it: all lengths are one shape.
    padded = np.zeros((1, -(-len(text) // 64) * 64), np.int32)
    padded[0, : len(text)] = text
    if not any(schedules.follows):
        return np.asarray(apply(model, params, padded, schedules.at(len(text))))[0, first - 1 : len(text)]
    lengths = range(first, len(text) + 1)
    return np.stack([np.asarray(apply(model, params, padded, schedules.at(n)))[0, n - 1] for n in lengths])


def prompts_of(config, *lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]


def assert_equals_full_passes(seen, config, schedules, prompts, new, scan=False, **settings):
    """Decodes, and compares every step's logits and every token with those of full passes."""
    seen.clear()
    made = decoder(config, scan)
    ended = made.generate(
        made.prepare(parameters(config)), prompts, schedules, GenerationRequest(max_new_tokens=new, **settings)
    )  # fmt: skip
    jax.effects_barrier()
    rows = len(prompts) if not any(schedules.follows) else 1
    for i, (prompt, ending) in enumerate(zip(prompts, ended, strict=True)):
        ids = ending.result()
        assert len(ids) == new
        steps = seen if rows > 1 else seen[i * new : (i + 1) * new]
        ours = np.stack([logits[i if rows > 1 else 0] for logits, _ in steps])
        assert [int(at[i if rows > 1 else 0]) for _, at in steps] == list(range(len(prompt), len(prompt) + new))
        full = reference(config, np.concatenate([prompt, ids])[:-1], schedules, len(prompt))
        assert np.ptp(full, axis=-1).min() > 1
        np.testing.assert_allclose(ours, full, atol=TOLERANCE)
        np.testing.assert_array_equal(ids, full.argmax(-1))


# --- each scheme ----------------------------------------------------------------------------------------------

SCHEMES = {
    "rope": Layer(Rope(100.0)),
    "nope": Layer(NoPE()),
    "alibi": Layer(Alibi()),
    "p_rope": Layer(Rope(100.0, fraction=0.5)),
    "partial_rope": Layer(PartialRope(100.0, 0.5)),
    "pi": Layer(Rope(100.0, scaling=PI(4.0))),
    "ntk": Layer(Rope(100.0, scaling=NTK(4.0))),
    "yarn": Layer(Rope(100.0, scaling=Yarn(4.0, 16))),
    "ntk_by_parts": Layer(Rope(100.0, scaling=NTKByParts(4.0, 16))),
    "llama3": Layer(Rope(100.0, scaling=Llama3(4.0, original_length=16))),
    "constant beta": Layer(NoPE(), logit_scale=1.3),
    "mixed layers": [Layer(Rope(100.0), logit_scale=1.2), Layer(Alibi())],
    "heads: nope": Layer(Rope(100.0), heads=(HeadEdit((1, 2), NoPE()),)),
    "heads: alibi": Layer(Rope(100.0), heads=(HeadEdit((0,), Alibi()),)),
    "heads: bands": Layer(Rope(100.0), heads=(HeadEdit((3,), Bands(0.5)),)),
    "heads: uniform": Layer(Rope(100.0), heads=(HeadEdit((1,), Uniform()),)),
    # Those that follow the length cross it at 32 tokens.
    "longrope": Layer(Rope(100.0, scaling=LongRope((1.0, 1.1, 1.2, 1.3), (1.5, 2.0, 3.0, 4.0), 32, factor=4.0))),
    "dynamic_ntk": Layer(Rope(100.0, scaling=DynamicNTK(32))),
    "dynamic_yarn": Layer(Rope(100.0, scaling=DynamicYarn(32))),
    "beta": Layer(Rope(100.0), logit_scale=Beta(0.4, 32)),
    "dynamic in one layer": [Layer(Rope(100.0)), Layer(Rope(100.0, scaling=DynamicNTK(32)))],
    "dynamic in one head": [
        Layer(NoPE()),
        Layer(Rope(100.0), heads=(HeadEdit((1,), Rope(100.0, scaling=DynamicNTK(32))),)),
    ],
}  # fmt: skip


def marked(names, slow):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


@pytest.mark.parametrize("name", marked(SCHEMES, {"dynamic in one layer", "dynamic in one head", "longrope"}))
def test_every_step_is_that_of_a_full_pass(name, seen):
    """All through one program."""
    schedules = schedules_of(TINY, SCHEMES[name], heads="split", slopes=True)
    assert_equals_full_passes(seen, TINY, schedules, prompts_of(TINY, 24), 16)


@pytest.mark.parametrize("name", marked(["rope", "longrope"], {"longrope"}))
def test_layers_that_share_a_table(name, seen):
    """As the schedules are built, not generalized: other programs, keys of as few heads as there are."""
    assert_equals_full_passes(seen, TINY, schedules_of(TINY, SCHEMES[name]), prompts_of(TINY, 24), 12)


@dataclasses.dataclass(frozen=True)
class Sharper(Encoding):
    """A function of logits without parameters."""

    def logits(self, params, q, logits):
        return jnp.where(logits < -1e29, logits, 1.5 * logits)


GROUPED = Layer(Rope(100.0), heads=(HeadEdit((2, 3), NoPE()),))  # the second group of two
STRUCTURES = {
    "grouped heads": [GROUPED, Layer(Rope(100.0))],
    "nope": Layer(NoPE()),
    "noise": Layer(Rope(100.0), heads=(HeadEdit((1,), Gaussian(7)),)),
    "noise that follows the length": Layer(
        Rope(100.0, scaling=DynamicNTK(32)), heads=(HeadEdit((1,), Gaussian(7)), HeadEdit((2,), NoPE()))
    ),
    "functions of logits that follow the length": Layer(Rope(100.0, scaling=DynamicNTK(32)), extras=(Sharper(),)),
    "the notebook's YaRN and bias": [Layer(NotebookYarn(100.0, 0.5, 2.0, 16, 4)), Layer(NotebookBias(1.5, 30))],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_their_own(name, seen):
    assert_equals_full_passes(seen, TINY, schedules_of(TINY, STRUCTURES[name]), prompts_of(TINY, 24), 12)


FAMILIES = {
    "gemma": dict(
        kv_heads=1, head_dim=16, norm="rms_plus_one", activation="gelu_tanh", embedding_multiplier=TINY.d_model**0.5
    ),
    "neox": dict(
        kv_heads=4,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        activation="gelu",
        gated_mlp=False,
        block="parallel",
        tie_embeddings=False,
    ),
    "qwen2": dict(attention_bias=True),
    "qwen3": dict(qk_norm="head", tie_embeddings=False),
    "flat": dict(qk_norm="flat"),
}  # fmt: skip


@pytest.mark.parametrize("name", marked(FAMILIES, {"gemma", "qwen2", "qwen3", "flat", "neox"}))
def test_families(name, seen):
    config = dataclasses.replace(TINY, **FAMILIES[name])
    schedules = schedules_of(config, Layer(PartialRope(100.0, 0.5)))
    assert_equals_full_passes(seen, config, schedules, prompts_of(config, 20), 8)


# --- batches, chunks, windows ---------------------------------------------------------------------------------

DEEP = dataclasses.replace(TINY, layers=5)
WINDOWS = {
    "rnope_swa, scanned": (layers(rnope_swa(12, 100.0), 5), True),
    "windows of 1 and 40": ([Layer(Rope(100.0), 1), Layer(Alibi(), 40)], False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_unequal_prompts_with_windows_that_texts_outgrow(name, seen):
    """Rings of 1, 12 and 40 slots under chunks of 32 tokens, in rows that end in different chunks."""
    described, scan = WINDOWS[name]
    config = dataclasses.replace(TINY, layers=len(described))
    schedules = schedules_of(config, described)
    assert_equals_full_passes(seen, config, schedules, prompts_of(config, 60, 3, 33, 64), 20, scan=scan)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_patterns_of_all_kinds(scan, seen):
    """A pattern that a scan repeats, and a layer of its own that follows the length; rows one by one."""
    described = [Layer(Rope(100.0), 12), Layer(NoPE())] * 2 + [Layer(Rope(100.0, scaling=DynamicNTK(32)))]
    assert_equals_full_passes(seen, DEEP, schedules_of(DEEP, described), prompts_of(DEEP, 26, 3), 10, scan=scan)


SHALLOW = dataclasses.replace(TINY, layers=1)  # where what is tested is not the depth


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch(seen):
    schedules = schedules_of(SHALLOW, SCHEMES["rope"])
    prompts = prompts_of(SHALLOW, 40, 1, 7)
    made = decoder(SHALLOW)
    weights = made.prepare(parameters(SHALLOW))

    def ids(prompts, **settings):
        request = GenerationRequest(max_new_tokens=24, **settings)
        return [ending.ids for ending in made.generate(weights, prompts, schedules, request)]

    together = ids(prompts)
    assert together == [ids([prompt])[0] for prompt in prompts]
    drawing = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
    drawn = ids(prompts, sampling=drawing)
    assert drawn[0] == ids(prompts[:1], sampling=drawing)[0] == ids([prompts[0], *prompts[:2]], sampling=drawing)[0]
    assert drawn == ids(prompts, sampling=drawing) != together
    assert drawn != ids(prompts, sampling=dataclasses.replace(drawing, seed=4))
    twins = ids([prompts[0]] * 3, sampling=drawing)
    assert twins[0] != twins[1]  # rows draw their own


@pytest.mark.parametrize(
    "length", [1, 16, 17, 31, 32, 33, 100, 128, 129, 192, 193, 256, 257, 500, 512, 600, 1000, 2047]
)
def test_chunks_cover_a_prompt_within_its_capacity(length):
    found = chunks(length)
    ends = [start + size for start, size in found]
    assert [start for start, _ in found] == [0, *ends[:-1]] and ends[-2:-1] < [length] <= ends[-1:]
    assert all(start % size == 0 for start, size in found)
    assert ends[-1] <= max(256, 1 << (length - 1).bit_length()) and ends[-1] < 2 * length + 32


@pytest.mark.slow
def test_a_prompt_in_chunks_is_the_prompt_at_once(seen):
    """The cache after 600 tokens, in chunks of 512 + 128 and in one pass."""
    schedules = schedules_of(TINY, SCHEMES["rope"])
    assert chunks(600) == [(0, 512), (512, 128)]
    assert_equals_full_passes(seen, TINY, schedules, prompts_of(TINY, 600), 3)


@pytest.mark.slow
def test_one_compilation_per_bucket(seen):
    made = Decoder(SHALLOW)
    weights = made.prepare(parameters(SHALLOW))
    schedules = schedules_of(SHALLOW, SCHEMES["rope"])
    for length in (5, 9, 30, 31, 70, 33, 100, 12):
        made.generate(weights, prompts_of(SHALLOW, length), schedules, GenerationRequest(max_new_tokens=3))
        # Other settings of the same kind, another schedule of the same structure: the same programs.
        other = schedules_of(SHALLOW, SCHEMES["pi"])
        made.generate(weights, prompts_of(SHALLOW, length), other, GenerationRequest(max_new_tokens=7, eos_ids=(3,)))
    kinds = {("prefill", 1, 32, 256), ("prefill", 1, 128, 256), ("decode", 1, 1, 256), ("choose", 1, "greedy")}
    assert set(made.traces) == kinds and set(made.traces.values()) == {1}
    drawn = [Sampling(0.5, 3, 0.9, 1), Sampling(2.0, 0, 0.5, 2), Sampling(1.0, 7, 1.0, 3)]
    for sampling in drawn:
        made.generate(
            weights, prompts_of(SHALLOW, 20), schedules, GenerationRequest(max_new_tokens=3, sampling=sampling)
        )
    assert made.traces["decode", 1, 1, 256] == 2 and made.traces["choose", 1, "filtered"] == 1
    made.generate(weights, prompts_of(SHALLOW, 20), schedules, GenerationRequest(max_new_tokens=3, cache_length=300))
    assert made.traces["decode", 1, 1, 512] == 1


def test_a_cache_that_does_not_fit_memory_is_refused_with_an_estimate():
    made, prompts = decoder(SHALLOW), prompts_of(SHALLOW, 5, 7)
    size = 2 * 2**30 * SHALLOW.layers * 2 * SHALLOW.kv_heads * SHALLOW.head_dim * 4 / 2**30
    expected = f"The KV cache of 2 sequences of 1,073,741,824 tokens needs at least {size:,.1f} GiB"
    with pytest.raises(UserError, match=expected):
        made.generate(
            made.prepare(parameters(SHALLOW)), prompts, schedules_of(SHALLOW, SCHEMES["rope"]), GenerationRequest(10**9)
        )


def test_a_traced_program_is_compiled_once(caplog):
    """JAX compiles again, without a trace, where an argument is on its device by name in one call only."""
    made = Decoder(dataclasses.replace(SHALLOW, d_ff=40))  # a shape of its own: nothing of it is compiled yet
    weights = made.prepare(parameters(made.model.config))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        prompt = prompts_of(SHALLOW, 33)  # two chunks of 32
        made.generate(weights, prompt, schedules_of(SHALLOW, SCHEMES["rope"]), GenerationRequest(max_new_tokens=5))
    compiled = [r.getMessage().split()[1] for r in caplog.records if r.getMessage().startswith("Compiling jit(_")]
    assert sorted(name for name in compiled if name in ("jit(_step)", "jit(_prefill)", "jit(_choose)")) == [
        "jit(_choose)",
        "jit(_prefill)",
        "jit(_step)",
    ]


@pytest.mark.slow
def test_bfloat16_weights_are_cast_once_and_norms_are_not(seen):
    config = dataclasses.replace(TINY, dtype="bfloat16", qk_norm="head", norm="layer")
    weights = Decoder(config).prepare(parameters(config)).params
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        norm = "norm" in jax.tree_util.keystr(path)
        assert leaf.dtype == (jnp.float32 if norm else jnp.bfloat16), path
    schedules = schedules_of(config, SCHEMES["rope"])
    made = decoder(config)
    prompt = prompts_of(config, 24)
    seen.clear()
    ids = made.generate(made.prepare(parameters(config)), prompt, schedules, GenerationRequest(max_new_tokens=8))[
        0
    ].result()
    jax.effects_barrier()
    full = reference(config, np.concatenate([prompt[0], ids])[:-1], schedules, 24)
    ours = np.concatenate([logits for logits, _ in seen])
    assert np.abs(ours - full).max() < 0.05 * np.ptp(full)
    # Float32 weights are not copied: on a CPU, the layers' are views of the stacked ones.
    single = decoder(TINY)
    params = parameters(TINY)
    weights = single.prepare(params)
    assert weights.params["layers"]["mlp"]["up"] is params["layers"]["mlp"]["up"]


# --- schedules that follow the length -------------------------------------------------------------------------


def counted(described, new=24, prompt=24, refresh=1):
    made, statistics = decoder(TINY), GenerationStatistics()
    made.generate(
        made.prepare(parameters(TINY)),
        prompts_of(TINY, prompt),
        schedules_of(TINY, described, heads="split", slopes=True),
        GenerationRequest(max_new_tokens=new, refresh=refresh),
        statistics=statistics,
    )
    return statistics.refreshes


@pytest.mark.slow
def test_a_text_is_read_again_only_when_its_schedule_is_another(seen):
    assert counted(SCHEMES["longrope"]) == 1  # on crossing, once
    assert counted(SCHEMES["longrope"], prompt=40) == 0
    assert counted(SCHEMES["rope"]) == 0
    assert counted(SCHEMES["dynamic_ntk"], new=9) == 0  # sequences of 24 to 32 tokens
    # 24 new tokens are 23 steps, which read sequences of 25 to 47 tokens: 15 of them are longer than 32.
    assert counted(SCHEMES["dynamic_ntk"]) == 15
    assert counted(SCHEMES["dynamic_ntk"], refresh=4) == 3
    assert counted(SCHEMES["dynamic_ntk"], refresh=0) == 0


@pytest.fixture(scope="module")
def differences(seen):
    """How far logits after 33 to 47 tokens are from full passes, relative to their spread, by way of decoding."""
    config = dataclasses.replace(TINY, layers=3)
    schedules, prompt = schedules_of(config, Layer(Rope(100.0, scaling=DynamicNTK(32)))), prompts_of(config, 30)[0]
    made = decoder(config)
    weights = made.prepare(parameters(config))
    text = np.concatenate(
        [prompt, made.generate(weights, [prompt], schedules, GenerationRequest(max_new_tokens=18))[0].result()]
    )  # fmt: skip
    full = reference(config, text[:-1], schedules, 30)

    def relative(refresh: int) -> np.ndarray:
        seen.clear()
        Decoder(config, scan=False).generate(
            weights, [prompt], schedules, GenerationRequest(max_new_tokens=18, refresh=refresh)
        )  # fmt: skip
        jax.effects_barrier()
        return np.abs(np.concatenate([logits for logits, _ in seen]) - full).max(-1) / full.std()

    FORCED.append(text)
    try:
        found = {"exact": relative(1), "every 4": relative(4), "never": relative(0)}
        with pytest.MonkeyPatch.context() as patch:
            # Keys are cached rotated by the schedule of their step, as in transformers.
            rotated = lambda config, structure, _, *rest, **how: plan(config, structure, [False] * 3, *rest, **how)  # noqa: E731
            patch.setattr(pe_lab.model.programs, "plan", rotated)
            found["rotated keys"] = relative(0)
    finally:
        FORCED.clear()
    return found


@pytest.mark.slow
def test_without_reading_again_unrotated_keys_are_an_approximation_and_rotated_ones_a_worse_one(differences):
    for way in differences.values():
        assert way[:3].max() < 1e-5  # up to 32 tokens, the cache is exact
    assert differences["exact"].max() < 1e-5
    assert 1e-4 < differences["every 4"][3:].mean() < differences["never"][3:].mean()
    assert differences["never"][3:].mean() < differences["rotated keys"][3:].mean()


# --- on a mesh ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_on_a_mesh_tokens_are_the_same_and_the_cache_is_cut(scan, seen):
    """Two devices for rows, two for heads: the cache holds half the rows and half the heads on each."""
    config = TINY
    schedules = schedules_of(config, [Layer(Rope(100.0), 12), Layer(NoPE())])
    prompts = prompts_of(config, 30, 3, 40)
    request = GenerationRequest(max_new_tokens=10)
    alone = decoder(config)
    expected = alone.generate(alone.prepare(parameters(config)), prompts, schedules, request)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    model = Model(config)
    params = jax.device_put(parameters(config), parameter_shardings(model, mesh, AxisRules()))
    made = Decoder(config, mesh, scan=scan)
    weights = made.prepare(params)
    ended = made.generate(weights, prompts, schedules, request)
    assert [one.ids for one in ended] == [one.ids for one in expected]
    assert {rows for what, rows, *_ in made.traces if what != "choose"} == {4}  # three, filled up to a multiple of two
    layout = plan(config, schedules.at(1).structure, schedules.follows, 256, scan)
    with made.on_mesh():
        cache = made.allocate(layout, 4)
        params = made.arranged(weights, layout)
        tokens, lengths = np.zeros((4, 32), np.int32), np.full(4, 32, np.int32)
        last = jnp.zeros((4, config.d_model))
        _, after = made.prefill(params, cache, last, tokens, np.int32(0), lengths, schedules.at(1))
    for leaf in jax.tree.leaves(after):
        assert leaf.sharding.shard_shape(leaf.shape) == (1, 2, 1, *leaf.shape[3:])
        assert len(leaf.sharding.device_set) == 4
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        if "norm" not in jax.tree_util.keystr(path):
            assert not leaf.is_fully_replicated, path


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "settings", "says"),
    [
        ([[]], {}, "The prompt is empty"),
        ([[1], []], {}, "Prompt 1 is empty"),
        ([[1, 64]], {}, "ids from 1 to 64; the vocabulary has 64"),
        ([[-1, 6]], {}, "ids from -1 to 6"),
        ([[1, 2]], {"stop": ("a",)}, "Stop strings need a tokenizer"),
        ([[1] * 60], {"cache_length": 64, "max_new_tokens": 5}, "60 tokens and 5 new ones do not fit a cache of 64"),
        ([[1]], {"stop": ("",)}, "at least one character"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"refresh": -1}, "refresh is -1"),
    ],
)
def test_bad_input(prompts, settings, says):
    made = decoder(TINY)
    rows = [np.asarray(prompt, np.int32) for prompt in prompts]
    with pytest.raises(UserError, match=says):
        made.generate(
            made.prepare(parameters(TINY)), rows, schedules_of(TINY, SCHEMES["rope"]), GenerationRequest(**settings)
        )  # fmt: skip


def test_a_prompt_that_just_fits(seen):
    made = decoder(TINY)
    request = GenerationRequest(max_new_tokens=16, cache_length=256)
    ended = made.generate(
        made.prepare(parameters(TINY)), prompts_of(TINY, 240), schedules_of(TINY, SCHEMES["rope"]), request
    )  # fmt: skip
    assert len(ended[0].ids) == 16 and ("decode", 1, 1, 256) in made.traces


def test_no_prompts_no_work():
    made = decoder(TINY)
    assert (
        made.generate(made.prepare(parameters(TINY)), [], schedules_of(TINY, SCHEMES["rope"]), GenerationRequest())
        == []
    )

"""The choice of an implementation, the refusals, and their messages."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hooked import FEATURE_OF, Function, Sink, Table, hooked

from pe_lab.attention import IMPLEMENTATIONS, LayerEncoding, attention, dispatch
from pe_lab.attention.bias import PositionBias
from pe_lab.attention.capabilities import FEATURES, AttentionRequest, Capabilities, refusals
from pe_lab.attention.dispatch import choose, layer_request
from pe_lab.attention.kernels import external
from pe_lab.attention.key_block import AttentionInputs
from pe_lab.attention.preferences import PREFERENCES, preference
from pe_lab.errors import UnsupportedError, UserError
from pe_lab.positional import LayerStructure

T, K = 21, 16


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture
def plain(monkeypatch):
    """An implementation that honours only causality and segments, like an external kernel."""
    bare = dataclasses.replace(IMPLEMENTATIONS["dense"], capabilities=Capabilities(frozenset({"segments"})))
    monkeypatch.setitem(IMPLEMENTATIONS, "plain", bare)
    return bare


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("row", "arrays", "what"),
    [
        (LayerEncoding(slope=jnp.ones(4)), {}, "slopes"),
        (hooked(Sink()), {"x": jnp.ones((1, T, 8))}, "sinks"),
        (LayerEncoding(), {"window": 5}, "windows"),
        (LayerEncoding(slope=jnp.ones(4)), {"window": 5}, "slopes and no windows"),
    ],
)
def test_an_implementation_refuses_a_feature_that_it_does_not_honour(row, arrays, what):
    q, k, v = (draw(1, T, 4, K, seed=i) for i in range(3))
    others = "auto, reference, dense, chunked"
    with pytest.raises(UserError, match=f"'plain' has no {what}, which this layer needs. Choose one of {others}"):
        attention(q, k, v, row, implementation="plain", **arrays)
    # A feature that it honours is served.
    segments = jnp.zeros((1, T), jnp.int32)
    out = attention(q, k, v, LayerEncoding(), implementation="plain", segments=segments)
    np.testing.assert_array_equal(out, attention(q, k, v, LayerEncoding(), implementation="dense", segments=segments))


def test_auto_skips_implementations_that_cannot_serve_the_request(monkeypatch):
    bare = dataclasses.replace(IMPLEMENTATIONS["dense"], capabilities=Capabilities(frozenset()))
    asked = AttentionRequest(length=8, dtype="float32")
    monkeypatch.setitem(IMPLEMENTATIONS, "dense", bare)
    assert choose("auto", asked, 8) == "dense"
    assert choose("auto", asked._replace(needs=frozenset({"slopes"})), 8) == "chunked"
    for name in ("chunked", "reference"):
        monkeypatch.setitem(IMPLEMENTATIONS, name, bare)
    both = asked._replace(needs=frozenset({"slopes", "windows"}))
    with pytest.raises(UserError, match="no implementation serves this layer on cpu: 'dense' has no slopes and no win"):
        choose("auto", both, 8)


TPU = AttentionRequest(platform="tpu", length=8192)
GPU = AttentionRequest(platform="gpu", length=8192, capability=9.0)
A100 = GPU._replace(capability=8.0)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (TPU, "splash"),
        (TPU._replace(backward=True), "splash"),
        (TPU._replace(needs=frozenset({"segments", "windows"})), "splash"),
        (TPU._replace(needs=frozenset({"slopes"})), "pallas_tpu"),
        (TPU._replace(needs=frozenset({"slopes", "key bias", "sinks"}), backward=True), "pallas_tpu"),
        (TPU._replace(needs=frozenset({"distance bias", "segments"}), backward=True), "pallas_tpu"),
        (TPU._replace(needs=frozenset({"position bias"})), "chunked"),
        (TPU._replace(length=2**20), "pallas_tpu"),
        (TPU._replace(split_heads=True), "pallas_tpu"),
        (TPU._replace(partial=True), "pallas_tpu"),
        (TPU._replace(partial=True, backward=True), "pallas_tpu"),
        (TPU._replace(length=128), "dense"),
        (TPU._replace(length=128, needs=frozenset({"segments"})), "dense"),
        (GPU, "cudnn"),
        (GPU._replace(backward=True, needs=frozenset({"windows"})), "cudnn"),
        (GPU._replace(dtype="float32"), "pallas_gpu"),
        (GPU._replace(head_dim=256), "cudnn"),
        (A100._replace(head_dim=256), "pallas_gpu"),
        (GPU._replace(length=1000, sequences=1), "pallas_gpu"),
        (GPU._replace(length=1000, sequences=128), "cudnn"),
        (GPU._replace(length=1000), "cudnn"),
        (GPU._replace(needs=frozenset({"segments"})), "tokamax"),
        (GPU._replace(needs=frozenset({"segments"}), backward=True), "tokamax"),
        (A100._replace(needs=frozenset({"segments"}), backward=True), "pallas_gpu"),
        (GPU._replace(needs=frozenset({"slopes"})), "tokamax"),
        (GPU._replace(needs=frozenset({"slopes"}), length=2**18), "pallas_gpu"),
        (GPU._replace(needs=frozenset({"slopes"}), backward=True), "pallas_gpu"),
        (GPU._replace(needs=frozenset({"soft cap"}), backward=True), "tokamax"),
        (GPU._replace(needs=frozenset({"soft cap", "slopes"})), "pallas_hopper"),
        (A100._replace(needs=frozenset({"soft cap"})), "chunked"),
        (GPU._replace(needs=frozenset({"distance bias"}), backward=True), "pallas_gpu"),
        (GPU._replace(split_heads=True), "cudnn"),
        (GPU._replace(split_heads=True, length=2**20), "pallas_gpu"),
        (GPU._replace(head_dim=20), "tokamax"),
        (A100._replace(head_dim=20), "chunked"),
        (AttentionRequest(length=8192), "chunked"),
        (AttentionRequest(length=512), "dense"),
    ],
)
def test_auto_takes_the_fastest_that_can(asked, chosen):
    assert choose("auto", asked) == chosen


@pytest.mark.parametrize("installed", [None, "0.0.12", "0.0.17"])
def test_auto_takes_what_this_machine_has(installed, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda name: installed)
    monkeypatch.setattr(external.importlib.metadata, "version", lambda name: installed)
    asked = GPU._replace(needs=frozenset({"segments"}))
    assert choose("auto", asked) == ("tokamax" if installed == "0.0.17" else "pallas_gpu")
    if installed != "0.0.17":
        with pytest.raises(UserError, match="'tokamax' is not installed|'tokamax' 0.0.12 is too old"):
            choose("tokamax", asked)
    monkeypatch.setattr(dispatch.jax, "__version_info__", (0, 10, 2))
    with pytest.raises(UserError, match="'pallas_hopper' needs JAX 0.11 or later"):
        choose("pallas_hopper", asked)


# Requests that together need every row of the table.
REACHING = [
    one._replace(length=length, split_heads=split)
    for one in (AttentionRequest(), TPU, GPU, GPU._replace(sequences=1))
    for length in (100, 1000, 10_000, 10**6)
    for split in (False, True)
]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
PARTS = {"forward": "forward", "gradient": "forward and backward"}


def measured() -> dict[tuple[str, str, bool], tuple[AttentionRequest, dict[str, float]]]:
    """TFLOP/s of the implementations that served the same request, by file, case and whether heads rotate apart."""
    found = {}
    for path in sorted(RESULTS.glob("h*00/attention.json")):
        result = json.loads(path.read_text())
        capability = {"NVIDIA H100 80GB HBM3": 9.0, "NVIDIA H200": 9.0}[result["machine"]["device"]]
        for part, name in PARTS.items():
            for one in result.get(part, []):
                case, numbers = one["case"], one["numbers"]
                asked = AttentionRequest(
                    platform="gpu", capability=capability, head_dim=case["K"], dtype=case["dtype"], length=case["T"],
                    backward=part != "forward", sequences=case["B"],
                )  # fmt: skip
                for apart, ending in ((False, ""), (True, ", heads rotate differently")):
                    speeds = {i: numbers[i + ending] for i in IMPLEMENTATIONS if numbers.get(i + ending)}
                    if speeds:
                        label = f"{name}, {case['T']:,} tokens{ending}"
                        source = str(path.relative_to(RESULTS))
                        found[source, label, apart] = asked._replace(split_heads=apart), speeds
    return found


def test_auto_follows_the_measurements():
    assert len(measured()) >= 9
    for case, (asked, speeds) in measured().items():
        assert speeds[choose("auto", asked)] >= 0.98 * max(speeds.values()), case


def test_the_table_has_the_measured_numbers():
    everything = {(source, label): speeds for (source, label, _), (_, speeds) in measured().items()}
    for row in PREFERENCES:
        assert bool(row.source) == bool(row.measured)
        for label, speeds in row.measured.items():
            assert speeds == {name: pytest.approx(x, abs=0.06) for name, x in everything[row.source, label].items()}


def test_every_platform_has_an_order_of_its_implementations():
    for platform in ("cpu", "gpu", "tpu"):
        here = {name for name, one in IMPLEMENTATIONS.items() if platform in one.capabilities.platforms}
        for split, length in itertools.product((False, True), (100, 1000, 10_000, 10**6)):
            row = preference(AttentionRequest(platform=platform, split_heads=split, length=length))
            assert sorted(row.order) == sorted(here)
    assert {row.requests for row in PREFERENCES} == {row.requests for row in map(preference, REACHING)}


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (
            "splash",
            AttentionRequest(),
            "'splash' runs on tpu, and this is for cpu. Choose one of auto, reference, dense, chunked",
        ),
        ("cudnn", GPU._replace(head_dim=20), "'cudnn' takes heads of .*, and these have 20. Choose one of auto, ref"),
        (
            "cudnn",
            A100._replace(head_dim=256),
            "takes heads of multiples of 8 up to 128 .*256 from compute capability 9",
        ),
        ("pallas_hopper", A100, "'pallas_hopper' needs compute capability 9.0 .H100, H200., and this GPU has 8.0"),
        ("pallas_hopper", GPU._replace(capability=10.0), "and this GPU has 10.0"),
        ("tokamax", GPU._replace(needs=frozenset({"slopes"}), backward=True), "'tokamax' has no gradient with slopes"),
        ("tokamax", GPU._replace(needs=frozenset({"soft cap", "key bias"})), "adds biases before a soft cap"),
        ("tokamax", GPU._replace(needs=frozenset({"slopes"}), length=10**6), "slopes for at most 131,072 tokens"),
        ("pallas_gpu", GPU._replace(head_dim=20), "takes heads of 32 to 256, in steps of 16 channels, and these have"),
        ("cudnn", GPU._replace(dtype="float32"), "'cudnn' computes in .*, and this is float32"),
        ("pallas_tpu", TPU._replace(needs=frozenset({"position bias"})), "'pallas_tpu' has no position bias, which"),
        ("splash", TPU._replace(partial=True), "'splash' gives no partial results, from which KV caches and seq"),
        ("splash", TPU._replace(length=2**20), "'splash' reads at most [0-9,]+ tokens, and these are 1,048,576"),
        (
            "chunked",
            AttentionRequest(partial=True, needs=frozenset({"logit functions"})),
            "no logit functions for a sequence on several",
        ),
    ],
)
def test_a_refusal_lists_reasons_and_alternatives(name, asked, message):
    with pytest.raises(UserError, match=message):
        choose(name, asked)


@pytest.mark.parametrize("name", [n for n, one in IMPLEMENTATIONS.items() if "cpu" in one.capabilities.platforms])
@pytest.mark.parametrize("feature", FEATURES)
def test_implementations_honour_the_features_in_the_table(name, feature):
    q, k, v = (draw(1, T, 4, K, seed=i) for i in range(3))
    settings = {
        "slopes": dict(encoding=LayerEncoding(slope=jnp.linspace(0.1, 1, 4))),
        "segments": dict(encoding=LayerEncoding(), segments=jnp.asarray([[1] * 9 + [2] * 12])),
        "windows": dict(encoding=LayerEncoding(), window=4),
        "soft cap": dict(encoding=LayerEncoding(soft_cap=0.3)),
        **{of: dict(encoding=hooked(one), x=draw(1, T, 8, seed=9)) for one, of in FEATURE_OF.items()},
    }[feature]
    if feature not in IMPLEMENTATIONS[name].capabilities.honours:
        assert name == "dense" and feature in ("logit functions", "soft cap")
        with pytest.raises(UnsupportedError, match=f"'dense' has no {feature}"):
            attention(q, k, v, implementation=name, **settings)
        return
    out = attention(q, k, v, implementation=name, chunk=8, **settings)
    np.testing.assert_allclose(out, attention(q, k, v, implementation="reference", **settings), atol=2e-6)
    assert np.abs(out - attention(q, k, v, LayerEncoding(), implementation=name, chunk=8)).max() > 0.05


def test_a_kernel_refuses_a_function_itself():
    one, bias = draw(1, T, 4, K), AttentionInputs(bias=PositionBias((), ()))
    with pytest.raises(UnsupportedError, match="no function of logits"):
        IMPLEMENTATIONS["pallas_tpu"].run(one, one, one, bias)


@pytest.mark.parametrize(
    ("structure", "features"),
    [
        (LayerStructure(), {}),
        (LayerStructure(slopes=True, window=5), dict(needs={"slopes", "windows"})),
        (LayerStructure(rotates=True, heads="split"), dict(split_heads=True)),
        (
            LayerStructure(rotates=True, heads="grouped", hooks=hooked(Table()).hooks.hooks),
            dict(needs={"distance bias"}),
        ),
        (LayerStructure(hooks=hooked(Function(), Sink()).hooks.hooks), dict(needs={"position bias", "sinks"})),
    ],
)
def test_the_request_of_a_layer(structure, features):
    request = layer_request(structure, (4, 2, K), "float32", T, backward=True)
    needs = frozenset(features.pop("needs", ()))
    wanted = AttentionRequest(needs, "cpu", head_dim=K, dtype="float32", length=T, backward=True)
    assert request == wanted._replace(**features)


def test_capabilities_name_features_that_exist():
    for name, one in IMPLEMENTATIONS.items():
        assert one.capabilities.honours <= set(FEATURES), name
        assert one.capabilities.platforms and set(one.capabilities.platforms) <= {"cpu", "gpu", "tpu"}, name
        assert refusals(one.capabilities, AttentionRequest(needs=frozenset(FEATURES), platform="none")), name

"""The checks of what an encoding says of itself: each finds an encoding that says what does not hold."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import REPOSITORY

from pe_lab import analyze
from pe_lab.analysis.check import HEADER, MARKERS, default_layers, failures, row
from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError, UnsupportedError, is_external
from pe_lab.model import encoding_check
from pe_lab.model.encoding_check import (
    CONFIG,
    LENGTH,
    TOLERANCE,
    TinyModel,
    cached,
    check,
    content,
    context_parallel,
    learned,
    packed,
    relative,
)
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import HOOKS, Encoding, Layer, Parameter, has, label, layers, register
from pe_lab.positional.registry import ENCODINGS

ONE_LAYER = dataclasses.replace(CONFIG, layers=1)


@register("says_all")
@dataclass(frozen=True)
class SaysAll(Encoding):
    """Says that it is relative, static and exact under a cache, whatever it does."""

    relative = True

    def encode(self, params, q, k, positions, x):
        return q, k


@register("by_thousands")
@dataclass(frozen=True)
class ByThousands(SaysAll):
    """Queries that grow with every 8,192 positions, as in Llama 4: equal at all positions of a short sequence."""

    def encode(self, params, q, k, positions, x):
        return q * (1 + 0.1 * jnp.log1p(positions // 8192))[:, :, None, None], k


@register("by_content")
@dataclass(frozen=True)
class ByContent(SaysAll):
    """Queries that depend on the hidden states."""

    def encode(self, params, q, k, positions, x):
        return q * (1 + x[..., :1, None]), k


@register("key_before")
@dataclass(frozen=True)
class KeyBefore(SaysAll):
    """Keys with a part of the token before: another document's, or one that a chunk or a shard does not have."""

    def encode(self, params, q, k, positions, x):
        return q, k + jnp.pad(k, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


@register("key_after")
@dataclass(frozen=True)
class KeyAfter(SaysAll):
    """Keys with a part of the token after."""

    def encode(self, params, q, k, positions, x):
        return q, k + jnp.pad(k, ((0, 0), (0, 1), (0, 0), (0, 0)))[:, 1:]


@register("root_of_zero")
@dataclass(frozen=True)
class RootOfZero(SaysAll):
    """Finite outputs, and gradients of 0 * inf, of later tokens too."""

    def encode(self, params, q, k, positions, x):
        return q + jnp.sqrt(q - q), k


@register("root_of_content")
@dataclass(frozen=True)
class RootOfContent(SaysAll):
    """Queries that are NaN where a hidden state is negative."""

    def encode(self, params, q, k, positions, x):
        return q + 0 * jnp.sqrt(x[..., :1, None]), k


@register("sum_before")
@dataclass(frozen=True)
class SumBefore(SaysAll):
    """A running sum whose terms are of the token before, by padding and not by `earlier`."""

    content = True
    exact_cache = False

    def running_sum(self, params, x, earlier):
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1, :4]

    def encode(self, params, q, k, positions, x):
        return q * jnp.cos(x)[..., None], k


@register("never_moves")
@dataclass(frozen=True)
class NeverMoves(SaysAll):
    """Two parameters, one without a gradient; and a third that is not trained."""

    stopped: bool = True

    def init(self, key, shape):
        one = jnp.ones(shape.num_heads)
        return {
            "scale": Parameter(one, ("heads",)),
            "factor": Parameter(one, ("heads",)),
            "fixed": Parameter(one, ("heads",), learning_rate=0.0),
        }

    def encode(self, params, q, k, positions, x):
        factor = jax.lax.stop_gradient(params["factor"]) if self.stopped else params["factor"]
        return q * (params["scale"] * factor * jax.lax.stop_gradient(params["fixed"]))[:, None], k


@register("penalized_alone")
@dataclass(frozen=True)
class PenalizedAlone(SaysAll):
    """A parameter that a penalty moves, and that no output depends on."""

    def init(self, key, shape):
        return {"factor": Parameter(jnp.ones(shape.num_heads), ("heads",))}

    def penalty(self, params):
        return (params["factor"] ** 2).sum()


@pytest.mark.slow
def test_a_penalty_is_no_gradient_of_the_outputs():
    """3 s."""
    found = learned(TinyModel(layers("rope/with=penalized_alone", 1)[0], ONE_LAYER))
    assert found.fails and found.detail == "a gradient of zero of 'factor'"
    assert not learned(TinyModel(layers("gated_rope", 1)[0], ONE_LAYER)).fails


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_found():
    """2 s."""
    found = learned(TinyModel(layers("never_moves", 1)[0]))
    assert found.fails and found.detail == "a gradient of zero of 'factor'"


@pytest.mark.slow
def test_a_failed_check_is_status_1(tmp_path, monkeypatch, capsys):
    """3 s, with one check."""
    monkeypatch.setattr(encoding_check, "CHECKS", (learned,))
    monkeypatch.setattr("pe_lab.analysis.check.row", lambda *_: ("",) * len(HEADER))
    for text, status in (("never_moves", 1), ("never_moves:stopped=false", 0)):
        assert analyze.main(["check", f"--positional={text}", f"--out={tmp_path}"]) == status
        assert ("FAILS: it must be, and the check finds a gradient of zero" in capsys.readouterr().out) == bool(status)


def test_every_encoding_has_a_row_or_is_named():
    """Those that need the length of training get one, and a function is that of a paper."""
    found, left = default_layers()
    names = {label(layer).partition("(")[0] for layer in found}
    assert {"clipped_rope", "fope", "rope", "cope", "forgetting", "function"} <= names
    assert names.isdisjoint(left) and len(names) + len(left) == len(ENCODINGS)


@pytest.mark.slow
def test_a_temperature_by_thousands_is_not_relative():
    """3 s."""
    found = relative(TinyModel(layers("by_thousands", 1)[0]))
    assert found.claimed and found.found is False and found.fails


@pytest.mark.slow
def test_a_sharded_pass_is_compared_with_one_device():
    """4 s. Alone, as the first of the checks: nothing is compiled yet."""
    assert context_parallel(TinyModel(layers("key_before", 1)[0], ONE_LAYER)).fails


def passes(subject, *outputs):
    """The subject with hidden states that are numbers, one for each pass, and no gradients."""
    left = iter(outputs)
    subject.pulled = lambda *_: (jnp.full((2, LENGTH, 1), next(left)), {})
    return subject


@pytest.mark.slow
def test_a_failure_is_found_among_equal_details(monkeypatch):
    """1 s. 1.6e-4 and 2.4e-4 are both 0.0002, and the tolerance is between them."""
    subject = TinyModel(layers("rope", 1)[0])
    assert packed(passes(subject, 0.0, 1.6e-4, 0.0, 1.6e-4)).found
    assert packed(passes(subject, 0.0, 1.6e-4, 0.0, 2.4e-4)).fails
    monkeypatch.setattr(encoding_check, "jit", lambda _: lambda *_: (jnp.zeros((2, LENGTH, 1)), {}))
    assert context_parallel(passes(subject, 1.6e-4, 1.6e-4)).found
    assert context_parallel(passes(subject, 1.6e-4, 2.4e-4)).fails


@pytest.mark.slow
def test_nan_equals_no_number(monkeypatch):
    """2 s. A cached pass of NaN alone, and a bias of NaN for some hidden states."""
    subject = TinyModel(layers("rope", 1)[0])
    subject.hidden = lambda *_: jnp.zeros((2, LENGTH, 1))
    monkeypatch.setattr(encoding_check.ChunkedForward, "hidden", lambda *_: jnp.full((2, LENGTH, 1), jnp.nan))
    assert cached(subject).fails
    assert content(TinyModel(layers("root_of_content", 1)[0])).fails


def test_a_cache_that_an_encoding_refuses_is_not_measured():
    """1 s."""
    found = cached(TinyModel(layers("sum_before", 1)[0], ONE_LAYER))
    assert found.found is None and not found.fails and found.detail == "exact_cache is False"


def test_too_few_devices_are_named():
    subject = TinyModel(layers("rope", 1)[0])
    assert context_parallel(subject, devices=99).detail == f"{len(jax.devices())} of 99 devices"


def test_only_a_refusal_leaves_the_sharded_pass_unmeasured(monkeypatch):
    """1 s. Anything else that is raised is an error of the encoding or of ours."""
    subject = passes(TinyModel(layers("rope", 1)[0]), *[0.0] * 6)

    def raises(error):
        def fail(*arguments):
            raise error

        monkeypatch.setattr(encoding_check, "use_mesh", fail)
        return context_parallel(subject)

    refused = raises(UnsupportedError("'cope' cannot be sharded over context.\nUse ..."))
    assert refused.found is None and not refused.fails and refused.detail == "'cope' cannot be sharded over context."
    assert raises(ConfigError("A sequence of 1 tokens does not divide into 4 chunks")).fails
    with pytest.raises(TypeError, match="unexpected"):
        raises(TypeError("unexpected"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("says_all", set()),
        ("by_thousands", {"relative"}),
        ("by_content", {"static"}),
        ("key_before", {"cached", "packed", "sharded"}),
        ("key_after", {"causal", "cached", "packed", "sharded"}),
        ("sum_before", {"packed", "sharded"}),
        ("never_moves", {"learned"}),
        ("root_of_zero", {"bfloat16", "causal"}),
    ],
)
def test_what_does_not_hold_is_found(name, fails):
    """20 s each."""
    layer = layers(name, 1)[0]
    found = check(layer)
    assert {one.name for one in found if one.fails} == fails
    assert len(failures(layer, found)) == len(fails)
    cells = dict(zip(HEADER, row(layer, found, with_cost=False), strict=True))
    assert sum("!" in cell for cell in cells.values()) == len(fails)


def switched(layer):
    """A layer, and with each setting that chooses between ways of computing; not between initial values."""
    encoding, kinds = layer.encoding, typing.get_type_hints(type(layer.encoding))
    yield layer
    for field in dataclasses.fields(encoding):
        now, kind = getattr(encoding, field.name), kinds[field.name]
        others = [4] if field.name == "convolution" else [not now] if kind is bool else []
        if field.name in ("start", "initial", "trained"):
            continue
        others += [one for one in typing.get_args(kind) if typing.get_origin(kind) is typing.Literal and one != now]
        for other in others:
            yield dataclasses.replace(layer, encoding=dataclasses.replace(encoding, **{field.name: other}))


# Without the notebook's, which another test may have registered.
OWN = [
    layer
    for layer in default_layers()[0]
    if not is_external(type(layer.encoding)) and not type(layer.encoding).__module__.endswith(".notebook")
]
EVERY = [one for layer in OWN for one in switched(layer)]
EVERY = list({label(one): one for one in EVERY}.values())


def test_every_hook_is_one_of_a_registered_encoding():
    assert {hook for hook in HOOKS for layer in EVERY if has(layer.encoding, hook)} == set(HOOKS)
    assert Layer(dataclasses.replace(layers("selective_rope", 1)[0].encoding, convolution=4)) in EVERY


def test_the_documented_table_is_of_todays_checks():
    text = (REPOSITORY / "docs" / "encodings.md").read_text()
    table = text[text.index(MARKERS[0]) + len(MARKERS[0]) : text.index(MARKERS[1])]
    header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines())
    assert tuple(header) == HEADER
    assert {cells[0] for cells in rows} == {label(layer) for layer in OWN}
    assert not any("!" in cell for cells in rows for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("layer", EVERY, ids=label)
def test_rings_and_documents(layer):
    """10 s each. Outputs and gradients on a ring of four devices, and of documents alone and packed."""
    subject = TinyModel(layer)
    apart = packed(subject)
    assert apart.found, apart.detail
    ring = context_parallel(subject, devices=4)
    if has(layer.encoding, "logits"):
        assert ring.found is None and "logit functions" in ring.detail
        return
    assert ring.found, ring.detail
    # Positions that are the indices: relative biases become tables.
    whole = subject.hidden(subject.params, subject.tokens, None, None)
    with use_mesh(make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4]), AxisRules()):
        sharded = jax.jit(lambda: subject.model.hidden(subject.params, subject.tokens, None, None, subject.schedule))()
    assert np.abs(np.asarray(sharded) - np.asarray(whole)).max() < TOLERANCE

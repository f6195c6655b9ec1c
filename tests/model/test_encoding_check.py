"""The checks of what an encoding says of itself: each finds an encoding that says what does not hold."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from pe_lab.analysis.studies.check import HEADER, default_layers, failures, row
from pe_lab.errors import UserError
from pe_lab.model import encoding_check
from pe_lab.model.encoding_check import Subject, check, context_parallel, relative
from pe_lab.positional import Encoding, label, layers, register
from pe_lab.positional.registry import ENCODINGS


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


def test_every_encoding_has_a_row_or_is_named():
    """Those that need the length of training get one, and a function is that of a paper."""
    found, left = default_layers()
    names = {label(layer).partition("(")[0] for layer in found}
    assert {"clipped_rope", "fope", "rope", "cope", "forgetting", "function"} <= names
    assert names.isdisjoint(left) and len(found) + len(left) == len(ENCODINGS)


def test_a_temperature_by_thousands_is_not_relative():
    """3 s."""
    found = relative(Subject(layers("by_thousands", 1)[0]))
    assert found.claimed and found.found is False and found.fails


def test_only_a_refusal_leaves_the_sharded_pass_unmeasured(monkeypatch):
    """2 s. Anything else that is raised is an error of the encoding or of ours."""
    subject = Subject(layers("rope", 1)[0])

    def raises(error):
        def fail(*arguments):
            raise error

        monkeypatch.setattr(encoding_check, "use_mesh", fail)
        return context_parallel(subject)

    refused = raises(UserError("'cope' cannot be sharded over context.\nUse ..."))
    assert refused.found is None and not refused.fails and refused.detail == "'cope' cannot be sharded over context."
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

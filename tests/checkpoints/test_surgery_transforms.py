"""Surgery as pure functions: what changes, what stays, and the words for it."""

import dataclasses

import pytest

from pe_lab.checkpoints.surgery import change, check_same_shape
from pe_lab.config import LayerShape, ModelConfig
from pe_lab.errors import UserError
from pe_lab.positional import PI, Alibi, Layer, NoPE, Rope, drop

FOUR = (Layer(Rope()), Layer(Rope(), window=8, logit_scale=1.5), Layer(Alibi()), Layer(Rope()))


def test_drop_takes_encodings_away_and_nothing_else():
    dropped = drop().apply(FOUR)
    assert [layer.encoding for layer in dropped] == [NoPE()] * 4
    assert (dropped[1].window, dropped[1].logit_scale) == (8, 1.5)
    assert FOUR[0] == Layer(Rope())  # the source is as it was
    some = drop([1, 3]).apply(FOUR)
    assert [layer.encoding for layer in some] == [Rope(), NoPE(), Alibi(), NoPE()]
    assert drop([]).apply(FOUR) == FOUR


@pytest.mark.parametrize("layer", [-1, 4])
def test_there_is_no_such_layer(layer):
    with pytest.raises(UserError, match=f"there is no layer {layer}; the model has layers 0 to 3"):
        drop([0, layer]).apply(FOUR)


def test_a_change_in_words():
    rope, pi = Layer(Rope()), Layer(Rope(scaling=PI(factor=2.0)))
    assert change([rope] * 4, drop().apply([rope] * 4)) == "rope(base=10000) -> nope on layers 0-3"
    assert change([rope] * 4, drop([1]).apply([rope] * 4)) == "rope(base=10000) -> nope on layer 1"
    assert change([rope] * 4, drop([0, 1, 3]).apply([rope] * 4)) == (
        "rope(base=10000) -> nope on layers 0-1; rope(base=10000) -> nope on layer 3"
    )
    assert change([rope] * 2, [pi, rope]) == "rope(base=10000) -> rope(base=10000) + pi(factor=2) on layer 0"
    assert change([rope], [rope]) == "nothing changed"


def test_a_change_of_the_logit_scale_is_a_change_one_can_read():
    before, after = Layer(Rope()), Layer(Rope(), logit_scale=1.5)
    assert "1.5" in change([before], [after])


def test_every_field_that_differs_in_shape_is_named():
    model = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    check_same_shape(model, dataclasses.replace(model, dtype="float32", remat="full", scan=False), "It")
    other = dataclasses.replace(model, d_ff=64, qk_norm="head", vocab_size=256)
    with pytest.raises(UserError, match="vocab_size 128 -> 256, d_ff 32 -> 64, qk_norm none -> head"):
        check_same_shape(model, other, "The checkpoint")
    free = ("init_std", "mup_base_width", "mup_base_head_dim", "dtype", "remat", "scan", "attention")
    free += ("attention_chunk", "loss_chunks")
    for field in {f.name for f in dataclasses.fields(ModelConfig)} - {*free}:
        value = getattr(model, field)
        changed = not value if isinstance(value, bool) else f"not {value}" if isinstance(value, str) else None
        if changed is None:
            changed = (LayerShape("other", (1,)),) if field == "layer_shapes" else value + 1
        other = dataclasses.replace(model, **{field: changed})
        with pytest.raises(UserError, match=field):
            check_same_shape(model, other, "The checkpoint")


def test_the_qk_norm_may_differ_where_surgery_changes_it():
    model = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    normed = dataclasses.replace(model, qk_norm="head")
    check_same_shape(model, normed, "It", change_qk_norm=True)
    with pytest.raises(UserError, match="set the phase's own qk_norm"):
        check_same_shape(model, normed, "It")
    with pytest.raises(UserError, match="d_ff 32 -> 64"):
        check_same_shape(model, dataclasses.replace(normed, d_ff=64), "It", change_qk_norm=True)

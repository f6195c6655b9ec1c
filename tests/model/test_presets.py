"""Presets against transformers' own count of their parameters: preset_counts.json, by make_preset_counts.py."""

import dataclasses
import json
from pathlib import Path

import pytest

from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import UserError
from pe_lab.model import PRESETS, Model, complete, preset

COUNTS = json.loads((Path(__file__).parents[1] / "data" / "preset_counts.json").read_text())["counts"]


def test_every_preset_was_counted():
    assert COUNTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_transformers_counts(name):
    model = Model(from_dict(ModelConfig, preset(name)))
    assert model.config.vocab_size == COUNTS[name]["vocab_size"]
    assert model.num_parameters == COUNTS[name]["parameters"]
    assert complete(model.config) == model.config


def test_a_preset_can_be_changed_without_changing_it_for_others():
    before = preset("gemma_2b")
    changed = preset("gemma_2b", layers=2, qk_norm="head")
    assert changed == before | {"layers": 2, "qk_norm": "head"}
    changed["layers"] = 3
    assert preset("gemma_2b") == before == PRESETS["gemma_2b"]


def test_drope_trains_qwen2_without_its_bias():
    qwen, drope = (from_dict(ModelConfig, preset(name)) for name in ("qwen2_0_5b", "drope_494m"))
    assert dataclasses.replace(qwen, attention_bias=False) == drope != qwen


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="There is no preset 'gemma2b'. Did you mean 'gemma_2b'"):
        preset("gemma2b")
    with pytest.raises(UserError, match="There is no preset 'zzz'. Allowed: drope_494m, gemma_2b"):
        preset("zzz")
    with pytest.raises(UserError, match="preset 'gemma_2b' has no key 'layer'. Did you mean 'layers'"):
        preset("gemma_2b", layer=2)

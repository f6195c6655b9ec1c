"""What runtimes compute of every variant of tests/runtime_variants.py, against pe_lab and against their table.

The configurations take 5 s, the weights and pe_lab's logits of 270 variants two minutes, a server's half of that.
"""

import numpy as np
import pytest
from checkpoint_tables import LIMIT
from runtime_variants import VARIANTS, compute, measure, write
from transformers_environments import read_several

from pe_lab.checkpoints.runtimes import CONTENTS, LLAMA_CPP, SGLANG, TRANSFORMERS, VLLM, judge, kinds


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("variants")
    return [write(variant, scratch) for variant in VARIANTS]


@pytest.fixture(scope="module")
def computed(written, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("computed")
    return [compute(each, scratch / str(n)) for n, each in enumerate(written)]


def test_every_line_of_the_table_has_a_variant_that_is_not_right_by_it(written):
    for content in CONTENTS:
        having = [each.config for each in written if content.has(each.config)]
        assert having, content.name
        for runtime in content.not_right:
            assert any(content.reason(runtime, config) for config in having), (content.name, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [VLLM, SGLANG, LLAMA_CPP])
def test_a_runtime_computes_what_the_table_says(runtime, computed):
    measured = measure(runtime, computed)
    differ = {}
    for each, found in zip(computed, measured, strict=True):
        statements = judge(each.written.config)[runtime]
        if found != kinds(statements):
            differ[each.written.variant.title] = (sorted(found), statements)
    assert not differ


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.56", "5"])
def test_transformers_computes_every_variant(version, computed):
    there = [each for each in computed if version == "5" or not judge(each.written.config)[TRANSFORMERS]]
    theirs = read_several(version, [(each.directory, each.tokens[None]) for each in there], timeout=1800)
    differences = {
        each.written.variant.title: np.abs(logits[0] - each.logits[len(each.tokens)]).max()
        for each, logits in zip(there, theirs, strict=True)
    }
    assert max(differences.values()) < LIMIT, {title: x for title, x in differences.items() if not x < LIMIT}

"""Suites on live parameters: the records are those of a checkpoint, and the second call compiles nothing."""

import jax
import numpy as np
import pytest
import tiny

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import MeshConfig
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.live import LiveEvaluation
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan
from pe_lab.evaluation.suites import parse_suites
from pe_lab.evaluation.variants import Subject
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh, put
from pe_lab.positional import Rope, layers

LENGTHS = (16, 32)
VARIANTS = ("as trained", "cropped", "YaRN")
OF_A_STEP = ("versions", "checkpoint", "checkpoint_id", "step", "phase", "tokens_trained", "run", "seconds")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def compiled():
    """The programs that are compiled, by the seconds that each took."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def live(data, suites="perplexity,needles", **options):
    options = {"lengths": LENGTHS, "variants": VARIANTS, "options": tiny.SETTINGS.options, "phase": "one"} | options
    described = layers(Rope(), tiny.MODEL.layers)
    return LiveEvaluation(tiny.MODEL, described, tiny.LENGTH, data, parse_suites(suites), **options)


def of_checkpoint(data, directory, seed=0):
    """The records of the same measurements of a checkpoint."""
    subject = Subject(tiny.language_model(tiny.checkpoint(Rope(), data, seed=seed)), "tiny", "pretrain/checkpoints/3")
    plan = EvaluationPlan(LENGTHS, ("perplexity", "needles"), VARIANTS, options=tiny.SETTINGS.options)
    return Evaluation([subject], data, plan, directory, tiny.one_device()).run()


def numbers(records):
    return [{name: value for name, value in one.items() if name not in OF_A_STEP} for one in records]


@pytest.mark.slow  # 7 s
def test_the_records_are_those_of_a_checkpoint_and_the_second_call_compiles_nothing(data, tmp_path, compiled, capsys):
    made, mesh = [], make_mesh(MeshConfig(), tiny.one_device())
    inside = live(data, mesh=mesh)
    assert inside.cost() == len(VARIANTS) * (2 * 512 + 16 * sum(LENGTHS))
    for step in (3, 6):
        compiled.clear()
        made.append(inside.measure(tiny.parameters(seed=step // 3 - 1), step, tokens=160 * step))
        assert bool(compiled) == (step == 3)
    assert capsys.readouterr().out == ""
    for seed, records in enumerate(made):
        assert numbers(records) == numbers(of_checkpoint(data, tmp_path / str(seed), seed))
    assert {(one["phase"], one["step"], one["tokens_trained"]) for one in made[1]} == {("one", 6, 960)}
    assert made[0][0]["nll"] != made[1][0]["nll"]


@pytest.mark.slow
def test_parameters_on_the_mesh_of_a_run_stay_there(data, tmp_path, compiled):
    """Sharded over fsdp and tensor, as training has them: no device gets all of them."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    model = Model(tiny.MODEL)
    params = jax.tree.map(put, tiny.parameters(), parameter_shardings(model, mesh, AxisRules()))
    inside = live(data, mesh=mesh)
    inside.measure(params, 3)
    compiled.clear()
    records = inside.measure(params, 6)
    assert not compiled
    alone = of_checkpoint(data, tmp_path)
    for one, other in zip(records, alone, strict=True):
        assert (one["suite"], one["variant"], one["length"]) == (other["suite"], other["variant"], other["length"])
        name = "nll" if "nll" in one else "accuracy"
        np.testing.assert_allclose(one[name], other[name], atol=2e-5)


def test_prompts_are_asked_of_live_parameters(data, compiled):
    options = tiny.SETTINGS.options | {"haystack": "noise", "samples": 2}
    more = {"tokenizer": ByteTokenizer(), "lengths": (640,), "variants": ("as trained", "YaRN"), "options": options}
    inside = live(data, "niah:standard", **more)
    (plain, scaled) = inside.measure(tiny.parameters(), 3)
    compiled.clear()
    inside.measure(tiny.parameters(seed=1), 6)
    assert not compiled
    assert (plain["suite"], plain["source"], plain["samples"], plain["length"]) == ("niah", "standard", 2, 640)
    assert scaled["variant"] == "YaRN"


def test_a_suite_that_reads_files_of_its_own_is_refused(data):
    with pytest.raises(UserError, match="lm_eval is not measured in training"):
        live(data, "lm_eval:arc_easy")

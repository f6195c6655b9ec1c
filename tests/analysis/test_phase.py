"""Rotary phases: against decimal arithmetic, every distance of a sequence, and numbers rounded one by one."""

import decimal
import json
import math
from pathlib import Path

import dense
import ml_dtypes
import numpy as np
import pytest
from dense import language_model

from pe_lab.analysis import phase
from pe_lab.analysis.phase import outside, rotations
from pe_lab.analysis.schedule import DescribedModel
from pe_lab.analyze import main
from pe_lab.checkpoints.store import Store
from pe_lab.positional import Alibi, HeadEdit, Layer, NoPE, Rope, frequencies

ROOT = Path(__file__).parents[2]
NUMBERS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def spectrum(base: float = 1e4, d: int = 64) -> np.ndarray:
    return base ** (-2.0 * np.arange(d // 2) / d)


def decimal_angles(inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """n w modulo 2 pi, in [0, 2 pi), with 50 digits; pi by Machin's formula."""
    with decimal.localcontext() as context:
        context.prec = 50

        def arctan_of_inverse(n: int) -> decimal.Decimal:
            return sum(decimal.Decimal((-1) ** k) / ((2 * k + 1) * n ** (2 * k + 1)) for k in range(40))

        cycle = 8 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
        return np.array([[float(int(n) * decimal.Decimal(float(w)) % cycle) for w in inv_freq] for n in positions])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs((a - b + math.pi) % (2 * math.pi) - math.pi)


# ---------------------------------------------------------------------------------------------------------------------
# Rounding


def test_rounding_errors_are_those_of_decimal_arithmetic():
    w, positions = spectrum()[1::5], np.array([0, 1, 255, 257, 32_001, 999_999, 2**20, 2**31 - 1])
    exact = decimal_angles(w, positions)
    assert distance(phase.exact_angles(w, positions), exact).max() < 1e-14
    errors = phase.rounding_errors(w, positions)
    assert list(errors) == list(phase.COMPUTED)
    product, rounded, fixed = errors.values()
    assert fixed.max() < 5e-7
    # One number after another, as a program would.
    for p, n in enumerate(positions):
        close = 1e-15 * max(int(n), 1000)  # 2 pi, which reduces the products, is a float64
        for r, frequency in enumerate(w):
            one = float(np.float32(n) * np.float32(frequency))
            assert product[p, r] == pytest.approx(distance(one, exact[p, r]), abs=close)
            other = float(np.float32(ml_dtypes.bfloat16(n)) * np.float32(frequency))
            assert rounded[p, r] == pytest.approx(distance(other, exact[p, r]), abs=close)
        if 0 < n <= 2**24:
            assert (product[p] <= phase.product_bound(w, int(n))).all()
    assert product[6].max() > 1e-3 and product[1].max() < 1e-7 and (product[0] == 0).all()
    assert rounded[3].max() > 0.5 > 1e-4 > rounded[2].max()  # bfloat16 cannot count past 256


@pytest.mark.parametrize(("name", "bits"), phase.PRECISIONS.items())
def test_a_precision_cannot_tell_slower_rotations_from_none(name, bits):
    number, exact = NUMBERS[name], np.longdouble if name == "float32" else np.float64
    cosine, sine = phase.slowest_cosine(bits), phase.slowest_sine(bits)
    assert cosine == pytest.approx(2 ** (-bits / 2), rel=1e-3)
    for factor in (0.1, 0.5, 0.9999, 1.0001, 2):
        assert (number(np.cos(exact(factor * cosine))) == 1) == (factor < 1)
        assert (number(1 + np.sin(exact(factor * sine))) == 1) == (factor < 1)
    for length in (1, 32_000):
        base = phase.largest_base(cosine, 64, length)
        assert (spectrum(0.999 * base)[-1] * length > cosine) and not (spectrum(1.001 * base)[-1] * length > cosine)
    assert phase.largest_base(cosine, 2) == math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Range


def unseen(trained: float, scaled: float, length: int, target: int) -> bool:
    """Whether a distance up to `target` has a phase further than one step from all phases of training, in (0, wL]."""
    seen = np.arange(0, length + 1e-9, 0.01) * trained % (2 * math.pi)
    return any(distance(seen, scaled * d).min() > 1e-9 + 0.0051 * trained for d in np.arange(0.01, target, 0.97))


@pytest.mark.parametrize("factor", [1, 0.5, 0.45, 0.6])
def test_phases_outside_the_trained_range_are_those_that_no_distance_had(factor):
    w, length, target = spectrum(100.0, 16), 40, 80
    expected = [unseen(one, factor * one, length, target) for one in w]
    assert outside(w, factor * w, length, target).tolist() == expected
    assert any(expected) == (factor > 0.5) and not all(expected)


def test_layers_and_heads_of_one_rotation_are_one():
    half = HeadEdit((1, 3), Rope(100.0))
    layers = (
        Layer(Rope()),
        Layer(NoPE()),
        Layer(Rope()),
        Layer(Rope(), heads=(half,)),
        Layer(Rope(), window=8),
        Layer(Alibi()),
    )
    found = list(rotations(DescribedModel("toy", layers, 64, dense.CONFIG), (64, (128,)), ("as trained", "PI")))
    places = [one.where for one in found]
    assert places == ["layers 0,2", "layer 1", "layer 3, heads 0,2", "layer 3, heads 1,3", "layer 4", "layer 5"]
    for n, base in ((0, 1e4), (2, 1e4), (3, 100.0)):
        np.testing.assert_allclose(found[n].trained, spectrum(base, dense.K), rtol=1e-12)
    np.testing.assert_allclose(found[0].targets[128, "PI"], spectrum(1e4, dense.K) / 2, rtol=1e-12)
    # In a window, no distance is new.
    assert found[0].outside(128, "as trained").sum() == 2 and not found[4].outside(128, "as trained").any()
    assert not found[0].outside(128, "PI").any() and found[0].gamma(128, "PI") == pytest.approx(0.5)
    assert [one.rotating for one in found] == [4, 0, 4, 4, 4, 0]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def written(out: Path) -> tuple[dict, dict]:
    return json.loads((out / "analysis.json").read_text()), dict(np.load(out / "analysis.npz"))


def test_two_pairs_complete_no_cycle_where_the_paper_states_five(tmp_path, capsys):
    arguments = [
        "--positional=rope:base=10000",
        "--length=32000",
        "--target=2x,1m",
        f"--out={tmp_path}",
        "--format=svg",
    ]
    assert main(["phase", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 of 32 rotating pairs complete no cycle in 32,000 tokens" in out
    assert "at least 5 pairs" in out and "counted, there are 2" in out
    # In cycles, by hand: 32000 / (2 pi) * 10^(-m/8) is 1.208, 0.906 and 0.679 for the pairs 29, 30 and 31.
    analysis, numbers = written(tmp_path)
    assert (numbers["figures/phase_range/0.0.y"] < 1).sum() == 2
    assert numbers["figures/phase_range/0.0.y"][29:] == pytest.approx([1.208, 0.906, 0.679], abs=1e-3)
    cells = {(row[1], row[2]): row[3:5] for row in analysis["tables"][1]["rows"]}
    assert cells["as trained", "64,000"] == ["2 (6%)", "0.5"] and cells["PI", "64,000"][0] == "0 (0%)"
    # NTK slows pair 30 by 2^(-60/62) = 0.511, which is not enough; pair 31 by 1/2.
    assert cells["NTK", "64,000"] == ["1 (3%)", "0.5"] and cells["YaRN", "1,048,576"][0] == "0 (0%)"
    assert numbers["numbers/rounding_1048576"].shape == (3, 32)
    assert {figure["name"] for figure in analysis["figures"]} == {"phase_range", "phase_rounding"}
    assert analysis["about"]["source"].startswith("DroPE, section 4.1")


@pytest.mark.slow
def test_a_recipe_is_as_the_analysis_of_schedules_reads_it(tmp_path):
    recipe = f"--config={ROOT}/configs/drope_laptop.py"
    assert main(["phase", recipe, f"--out={tmp_path}", "--variants=pi", "--target=2x"]) == 0
    analysis, numbers = written(tmp_path)
    assert [one["title"].split(",")[0] for one in analysis["metadata"]["rotations"]] == ["pretrain", "half"]
    length = analysis["metadata"]["rotations"][0]["length"]
    assert f"numbers/inv_freq_PI_{2 * length}_1" in numbers


@pytest.mark.slow
def test_a_checkpoint_is_analyzed_beside_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    found = language_model((Layer(Rope(100.0)), Layer(NoPE()))).checkpoint
    store = Store(run / "pretrain" / "checkpoints")
    store.save(found.step, found.params, None, found.metadata)
    store.wait()
    store.close()
    (run / "run.json").write_text('{"name": "toy"}')
    assert main(["phase", "--from=run", "--variants=ntk"]) == 0
    analysis, numbers = written(run / "analysis" / "phase")
    assert analysis["metadata"]["rotations"] == [{"title": "toy pretrain, layer 0 (rope(base=100))", "length": 64}]
    np.testing.assert_allclose(numbers["numbers/inv_freq"], frequencies(Rope(100.0), dense.K)[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of them"),
        (["--positional=rope", "--config=configs/table1.py"], "give one of them"),
        (["--positional=rope"], "does not tell the training length. Give --length=TOKENS"),
        (["--positional=nope", "--length=1k"], "no layer of drope_494m rotates. Name layers with RoPE"),
        (["--positional=rope", "--length=many"], "--length: 'many' is no length"),
        (["--positional=rope", "--length=1k", "--target=1x"], "give lengths above the training length of 1,024 tokens"),
        (["--positional=rope", "--length=1k", "--target=3m,1e10"], "from 2 to 2^31 - 1"),
        (["--positional=rope", "--length=1k", "--target=,"], "give lengths above"),
        (["--positional=rope", "--length=1k", "--variants=dropped"], "--variants=dropped changes no frequency"),
        (["--positional=rope", "--length=1k", "--variants=yran"], "no variant is called 'yran'"),
        (["--positional=rpoe", "--length=1k"], "Did you mean 'rope'?"),
        (["--from=nowhere"], "nowhere"),
        (["--positional=rope", "--length=1k", "--config.model.layers=2"], "there is no --config here"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["phase", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []

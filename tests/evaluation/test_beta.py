import math

import numpy as np
import pytest
import tiny

from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.evaluation.suites import logit_scale as betas
from pe_lab.evaluation.variants import layers_under
from pe_lab.model import Model
from pe_lab.positional import NoPE, layers


@pytest.mark.parametrize("planted", [0.7, 1.0, 1.31, 2.4])
def test_a_planted_minimum_is_found(planted):
    fit = betas.fit_beta(lambda beta: 3 + math.log(beta / planted) ** 2, 8.0)
    assert fit.beta == pytest.approx(planted, abs=0.02)
    assert fit.nll_before == pytest.approx(3 + math.log(planted) ** 2)
    assert fit.nll_after <= fit.nll_before and fit.evaluations <= 25


def test_no_more_scales_are_tried_than_asked_for():
    fits = [betas.fit_beta(lambda beta: 3 + math.log(beta / 1.31) ** 2, 8.0, most=most) for most in (3, 4, 6)]
    assert [fit.evaluations for fit in fits] == [3, 4, 6]
    assert fits[2].nll_after <= fits[1].nll_after <= fits[0].nll_after and fits[2].beta == pytest.approx(1.31, abs=0.1)


def test_the_scale_stays_1_where_nothing_is_better():
    fit = betas.fit_beta(lambda beta: abs(beta - 1), 4.0)
    assert fit.beta == 1 and fit.nll_after == fit.nll_before == 0


@pytest.mark.slow
def test_the_fit_is_the_best_of_a_fine_grid_on_a_model():
    """Targets drawn from a model whose logits are scaled by 1.5: no other scale predicts them better."""
    described = layers(NoPE(), tiny.MODEL.layers)
    forward = Forward(Model(tiny.MODEL).config, devices=tiny.one_device())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (64, 32)).astype(np.int32)
    schedule = forward.schedule(layers_under("beta", described, 32, 16, 1.5), 32)
    logits = np.asarray(tiny.apply(tiny.parameters(), tokens, schedule), np.float64)
    targets = (logits + rng.gumbel(size=logits.shape)).argmax(-1).astype(np.int32)

    def loss(beta):
        batch = {"tokens": tokens, "targets": targets}
        return float(forward.losses(tiny.parameters(), batch, layers_under("beta", described, 32, 16, beta)).mean())

    fit = betas.fit_beta(loss, 2.0)
    grid = np.linspace(*betas.search_range(2.0), 35)
    best = min(loss(float(beta)) for beta in grid)
    assert fit.nll_after <= best + 1e-4
    assert fit.beta == pytest.approx(1.5, abs=0.2)
    assert forward.traces == {("losses", 32): 1}


def test_coefficients():
    assert betas.coefficient(1 + 0.412 * math.log(4), 4.0) == pytest.approx(0.412)
    assert betas.coefficient(1.0, 1.0) is None
    factors = [2.0, 4.0, 8.0]
    scales = [1 + 0.2 * math.log(s) for s in factors]
    assert betas.common_coefficient(scales, factors) == pytest.approx(0.2)
    assert betas.common_coefficient([1.0], [1.0]) is None
    assert betas.common_coefficient([], []) is None
    # Least squares: no other c comes closer to scales that no c fits.
    scales = [1.3, 1.2, 1.9]
    c = betas.common_coefficient(scales, factors)

    def error(c):
        return sum((1 + c * math.log(s) - b) ** 2 for s, b in zip(factors, scales, strict=True))

    assert error(c) < min(error(c + 1e-3), error(c - 1e-3))

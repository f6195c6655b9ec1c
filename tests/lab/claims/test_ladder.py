"""What the ladder's claims make of their numbers: a prediction, its test, and the effects of the factorial; 4 s."""

import json
import math

import pytest

from pe_lab.errors import DataError
from pe_lab.lab.claims.claim import load_claim


def rung_values(width, gap, seeds=(0, 1, 2)):
    """The numbers of a rung whose gaps lie around `gap`, and whose NoPE never reaches its onset."""
    losses = {"rewarmed": 3.0, "dropped": 3.0 + gap, "nope": 3.5, "nope_longer": 3.4}
    return {
        f"ladder{width}_{arm}": {"validation": {seed: loss + 0.01 * gap * seed for seed in seeds}}
        for arm, loss in losses.items()
    }


def published(tmp_path, monkeypatch, later):
    """The result of the first rungs, whose gaps are N ** -0.2, where the claims of the later rungs look for it."""
    first = load_claim("ladder")
    values = {}
    for width in (64, 96, 128):
        values |= rung_values(width, (80 * width**2) ** -0.2)
    listed = {arm: {name: list(of.values()) for name, of in metrics.items()} for arm, metrics in values.items()}
    result = {"seeds": [0, 1, 2], "values": listed, "fits": dict(first.fits(values))}
    (tmp_path / "ladder.json").write_text(json.dumps(result))
    monkeypatch.setitem(later.fits.__globals__, "results_directory", lambda: tmp_path)
    return result


def test_a_later_rung_is_compared_with_what_was_published(tmp_path, monkeypatch):
    claim = load_claim("ladder_192")
    result = published(tmp_path, monkeypatch, claim)
    (ends,) = (reference for name, reference in claim.references.items() if name.startswith("published"))
    interval = result["fits"]["power law"]["gaps"]["192"]
    assert ends.measure(None) == {"lowest": interval["low"], "highest": interval["high"]}
    N = 80 * 192**2
    assert claim.fits(rung_values(192, N**-0.2))["power law"]["the gap lies inside"]
    assert not claim.fits(rung_values(192, 0.3))["power law"]["the gap lies inside"]
    (tmp_path / "ladder.json").unlink()
    with pytest.raises(DataError, match="pe_lab.claims ladder"):
        claim.fits(rung_values(192, N**-0.2))


def test_the_onsets_of_smaller_widths_are_those_of_longer_runs():
    """Widths 96 and 128 give T = 6e6 (N / 1e6) ** -0.5; NoPE of width 64 has none, and T is that of the line."""
    claim = load_claim("ladder")
    values = {}
    for width in (64, 96, 128):
        values |= rung_values(width, 0.4)
    values["ladder96_nope"]["onset"] = {0: 1.0}  # not what is read
    for arm, width, seeds in (("nope_longer", 96, (0,)), ("nope", 128, (0, 1, 2))):
        values[f"ladder{width}_{arm}"]["onset"] = dict.fromkeys(seeds, 6e6 * (80 * width**2 / 1e6) ** -0.5)
    assert claim.fits(values)["onset law"]["exponent of the onset"]["middle"] == pytest.approx(-0.5)


@pytest.mark.parametrize("gap_192", [None, 0.3])
def test_the_papers_size_is_extrapolated_to_if_both_later_rungs_lie_inside(tmp_path, monkeypatch, gap_192):
    claim = load_claim("ladder_256")
    published(tmp_path, monkeypatch, claim)
    smaller = load_claim("ladder_192")
    monkeypatch.setitem(smaller.fits.__globals__, "results_directory", lambda: tmp_path)
    values = rung_values(192, gap_192 or (80 * 192**2) ** -0.2)
    listed = {arm: {name: list(of.values()) for name, of in metrics.items()} for arm, metrics in values.items()}
    result = {"seeds": [0, 1, 2], "values": listed, "fits": dict(smaller.fits(values))}
    (tmp_path / "ladder_192.json").write_text(json.dumps(result))
    found = claim.fits(rung_values(256, (80 * 256**2) ** -0.2))
    if gap_192:
        assert "not extrapolated" in found["at 494M"] and "of all rungs" not in found
    else:
        law = found["of all rungs"]["power law"]
        assert law["exponent"]["middle"] == pytest.approx(-0.2, abs=0.005)
        assert law["gaps"]["494M"]["middle"] == pytest.approx(357_826_560**-0.2, rel=0.05)


def test_the_factorial_finds_the_effects_that_its_numbers_have():
    """ln G falls by 0.7 with a larger share and by 0.3 with depth; NoPE comes 0.2 nats closer with more tokens."""
    claim = load_claim("ladder_factorial")
    rows, cells = (claim.fits.__globals__[name] for name in ("ROWS", "CELLS"))
    values = {}
    for n, (layers, tokens, share, _, _) in enumerate(rows):
        gap = 0.1 * math.exp(-0.35 * share + 0.15 * layers)
        for arm, loss in {"rewarmed": 3.0, "dropped": 3.0 + gap, "nope": 3.5 - 0.1 * tokens, "rope": 3.0}.items():
            values[cells[n][arm].name] = {"validation": {0: loss}}
        values[f"trigram{n}"] = {"validation": {0: 3.4}}
    found = claim.fits(values)
    assert len(found["gaps short of the onset"]) == 8 and not found["gaps beyond the onset"]
    gap, short = found["effects on ln gap"], found["effects on NoPE over the table"]
    assert gap["share after the drop"] == pytest.approx(-0.7) and gap["layers"] == pytest.approx(0.3)
    assert short["tokens per parameter"] == pytest.approx(-0.2) and short["layers"] == pytest.approx(0, abs=1e-9)
    assert "effects on ln onset" not in found and found["cells"][0]["onset"] is None

"""Partial RoPE: how few channels have to rotate, and whether training is calmer with them."""

from pe_lab.analysis.runs import read_runs
from pe_lab.studies import Criterion, Study, losses, together

from .arms import NOPE, ROPE, trained

LOSS = "validation prose"
PARTIAL = trained("partial_rope_10", "method=partial_rope_10")
# Short runs at three times the rate of the others.
HIGH = {
    method: trained(f"{name}_high_rate", f"method={method},rate=1e-2,steps=1000")
    for method, name in {"rope": "rope", "partial_rope_10": "partial_rope_10", "nope": "nope"}.items()
}


def spikes(directory) -> dict[str, float]:
    """Steps whose loss or gradient norm lies 6 deviations above those before it (config.stability)."""
    (run,) = read_runs([directory])
    return {"spikes": float(sum(len(phase.events) for phase in run.phases))}


STUDY = Study(
    claim="Rotating a tenth of the channels is as good as rotating all, better than rotating none, and training has "
    "fewer spikes than without positions.",
    paper="Partial RoPE, Figures 2 to 5 and Table 4",
    arms=(ROPE, PARTIAL, NOPE, *HIGH.values()),
    criteria=(
        Criterion("as good as RoPE", f"partial_rope_10: {LOSS}", (f"rope: {LOSS}",), lower=True, tolerance=0.02),
        Criterion("better than NoPE", f"partial_rope_10: {LOSS}", (f"nope: {LOSS}",), lower=True, by=0.01),
        Criterion(
            "at a high rate, fewer spikes than NoPE",
            "partial_rope_10_high_rate: spikes",
            ("nope_high_rate: spikes",),
            lower=True,
            by=1.0,
        ),
    ),
    evaluation=None,
    measure=together(losses, spikes),
    recipes={
        f"{arm}{'_high_rate' if rate else ''}": f"configs/partial_rope.py:model=pythia_1b,percent={percent}{rate}"
        for arm, percent in {"rope": 100, "partial_rope_10": 10, "nope": 0}.items()
        for rate in ("", ",rate=4e-3")
    },
    curves={
        "loss on prose, nats": {
            "RoPE": f"rope: {LOSS}",
            "a tenth": f"partial_rope_10: {LOSS}",
            "NoPE": f"nope: {LOSS}",
        },
        "spikes at a high rate": {
            "RoPE": "rope_high_rate: spikes",
            "a tenth": "partial_rope_10_high_rate: spikes",
            "NoPE": "nope_high_rate: spikes",
        },
    },
)

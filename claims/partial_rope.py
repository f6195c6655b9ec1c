"""Partial RoPE: how few channels have to rotate, and whether training is calmer with them."""

from pe_lab.lab.claims import (
    Claim,
    Criterion,
    Precondition,
    Reference,
    losses,
    previous_token_bias,
    shape,
    spikes,
    together,
)

from .arms import LOSS, NATS, NOPE, ROPE, TRIGRAM, beats_trigram, learned_order, lower_loss, trained

PARTIAL = trained("partial_rope_10", "method=partial_rope_10")
# Short runs at three times the rate of the others.
HIGH = {
    method: trained(f"{name}_high_rate", f"method={method},rate=1e-2,steps=1000")
    for method, name in {"rope": "rope", "partial_rope_10": "partial_rope_10", "nope": "nope"}.items()
}


CLAIM = Claim(
    sentence="Rotating a tenth of the channels is as good as rotating all, better than rotating none, and the loss "
    "jumps and stays above less often than without positions.",
    quote="(1) applying RoPE to only a small fraction of dimensions (around 10%) achieves convergence comparable to "
    "using full RoPE; [...] and (3) some models trained with NoPE (No Positional Encoding) showcase unstable "
    "learning trajectories, which can be alleviated through minimal RoPE application or QK-Norm which converges to a "
    "higher loss.",
    paper="Partial RoPE, abstract, on Figures 2 to 5",
    arms=(ROPE, PARTIAL, NOPE, *HIGH.values()),
    criteria=(
        lower_loss("as good as RoPE", "partial_rope_10", "rope", tolerance=0.02),
        lower_loss("better than NoPE", "partial_rope_10", "nope", by=0.01),
        Criterion(
            "at a high rate, the loss jumps and stays less often than with NoPE",
            "partial_rope_10_high_rate: loss spikes",
            ("nope_high_rate: loss spikes",),
            lower=True,
            by=0.5,
            unit="spikes",
        ),
        Criterion(
            "at a high rate, it rises less above its lowest than with NoPE",
            "partial_rope_10_high_rate: loss excess",
            ("nope_high_rate: loss excess",),
            lower=True,
            by=0.1,
            unit=NATS,
        ),
    ),
    preconditions=(
        Precondition(
            "a tenth of a head's channels is at least 3 pairs (3, 6 or 13 in the paper)",
            "partial_shape: rotated pairs",
            least=3,
        ),
        beats_trigram("rope", "RoPE"),
        *learned_order("nope", "NoPE"),
    ),
    references=TRIGRAM | {"partial_shape": Reference("partial_rope_10", shape)},
    evaluation=None,
    measure=together(losses, spikes, previous_token_bias),
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
        "largest rise of the loss at a high rate, nats": {
            "RoPE": "rope_high_rate: loss excess",
            "a tenth": "partial_rope_10_high_rate: loss excess",
            "NoPE": "nope_high_rate: loss excess",
        },
    },
    tried="The first rule counted steps whose loss or gradient norm lies 6 deviations above those before, of which a "
    "stable run with RoPE has 31 to 43. The paper's spikes are losses that jump and stay; no log of these runs was "
    "kept that could be counted again.",
)

"""How soon the loss is back after a drop."""

from pe_lab.studies import Criterion, Study, losses

from .arms import DROPE, NOPE, RECALIBRATE, ROPE, STEPS, child

LOSS = "validation prose"
PAPER_STEPS = 16_000  # of the pretraining, at the paper's size
BY_STEPS = {
    steps: child(f"drope_{steps}", ROPE, f"method=nope,qk_norm=head,steps={steps}")
    for steps in (STEPS // 16, STEPS // 8, STEPS // 2, STEPS)
} | {RECALIBRATE: DROPE}

STUDY = Study(
    claim="After a drop, a small share of the pretraining's tokens brings the loss at the training length back to "
    "that of the model with RoPE.",
    paper="DroPE, Figure 10 and Table 5, whose measure is multiple choice",
    arms=(ROPE, *BY_STEPS.values(), NOPE),
    criteria=(
        Criterion(
            "a fifth of the tokens brings the loss within 0.05 nats of RoPE's",
            f"drope: {LOSS}",
            (f"rope: {LOSS}",),
            lower=True,
            tolerance=0.05,
        ),
        Criterion("and below that of NoPE from scratch", f"drope: {LOSS}", (f"nope: {LOSS}",), lower=True, by=0.01),
    ),
    evaluation=None,
    measure=losses,
    recipes={
        "rope": f"configs/drope_16b.py:drop={PAPER_STEPS}",
        "nope": "configs/drope_16b.py:drop=0",
        **{
            arm.name: f"configs/drope_16b.py:drop={PAPER_STEPS},more={PAPER_STEPS * steps // STEPS},from={{parent}}"
            for steps, arm in BY_STEPS.items()
        },
    },
    curves={
        "loss on prose, nats": {
            "RoPE": f"rope: {LOSS}",
            **{f"after {100 * n / STEPS:.3g}% more": f"{BY_STEPS[n].name}: {LOSS}" for n in sorted(BY_STEPS)},
            "NoPE": f"nope: {LOSS}",
        },
    },
)

"""The gap after a drop against the depth of the model: NoPE builds its positions over layers."""

from pe_lab.lab.claims import Claim, Criterion, losses, previous_token_bias, scores, together

from .arms import DROPE, LOSS, NATS, ROPE, TRIGRAM, child, learned_order, trained

DEPTHS = (2, 4, 16)  # and 8, the other claims' model
ROPES = {d: trained(f"rope_{d}_layers", f"method=rope,layers={d}") for d in DEPTHS} | {8: ROPE}
DROPES = {d: child(f"drope_{d}_layers", ROPES[d], f"method=nope,qk_norm=head,layers={d}") for d in DEPTHS} | {8: DROPE}
ORDER = sorted(ROPES)


def gap(layers: int) -> str:
    """The loss that dropping costs, after recalibration."""
    return f"{DROPES[layers].name}: {LOSS} - {ROPES[layers].name}: {LOSS}"


CLAIM = Claim(
    sentence="The deeper the model, the less its loss grows at the training length by dropping and recalibrating.",
    paper="ours: DroPE's models have 24 and 32 layers",
    arms=tuple(arm for d in ORDER for arm in (ROPES[d], DROPES[d])),
    criteria=tuple(
        Criterion(
            f"the gap of {deeper} layers is below that of {d}",
            gap(deeper),
            (gap(d),),
            lower=True,
            by=0.01,
            unit=NATS,
        )
        for d, deeper in zip(ORDER, ORDER[1:], strict=False)
    ),
    preconditions=tuple(
        one for d in reversed(ORDER) for one in learned_order(DROPES[d].name, f"the dropped model of {d} layers")
    ),
    references=TRIGRAM,
    evaluation=("--lengths=4x",),
    measure=together(scores, losses, previous_token_bias),
    curves={
        "gap after the drop on prose, nats": {f"{d} layers": gap(d) for d in ORDER},
        "text at 4x, dropped minus YaRN, nats": {
            f"{d} layers": f"{DROPES[d].name}: text 4x - {ROPES[d].name}: text 4x YaRN" for d in ORDER
        },
        "needles at 4x, dropped minus YaRN": {
            f"{d} layers": f"{DROPES[d].name}: needles 4x - {ROPES[d].name}: needles 4x YaRN" for d in ORDER
        },
    },
)

"""The gradient of the positional bias at initialization, with and without rotation, on the same weights.

What is measured are initial weights. At --size=paper, where no other claim shares the runs, one step is enough:
--config.phases.0.steps=1 --config.phases.0.optimizer.warmup_steps=0.
"""

import numpy as np

import pe_lab
from pe_lab.analysis import positional_bias
from pe_lab.config import Config, from_dict
from pe_lab.data.held_out import validation_batches
from pe_lab.lab.claims import Claim, Criterion
from pe_lab.positional import drop

from .arms import ROPE

UNIT = "log10 of a ratio"


def gradients(directory) -> dict[str, float]:
    """log10 of RoPE's gradient norm over NoPE's, by pattern and layer, of the run's shape under its seed."""
    trained = pe_lab.load(directory)
    config = from_dict(Config, trained.checkpoint.metadata["config"])
    lm = trained.initialized(config.seed)
    length = config.phases[-1].sequence_length
    batches = validation_batches(config.data, sequence_length=length, batch_size=8, count=1)
    tokens = next(iter(batches.values()))[0]["tokens"]  # of the first source, which is text
    rotated = positional_bias.measure(lm, tokens)
    bare = positional_bias.measure(lm.with_positional(drop().apply(lm.layers)), tokens)
    ratio = np.log10(rotated.query_gradient.mean((0, 2)) / bare.query_gradient.mean((0, 2)))  # [L, P]
    found = {
        f"ratio {name} {n}": float(ratio[n, p])
        for p, name in enumerate(positional_bias.PATTERNS)
        for n in range(len(ratio))
    }
    for p, name in enumerate(positional_bias.PATTERNS):
        found |= {f"ratio {name} first": float(ratio[0, p]), f"ratio {name} last": float(ratio[-1, p])}
        found[f"ratio {name}"] = float(ratio[:, p].mean())
    return found


CLAIM = Claim(
    sentence="At initialization the gradient of the positional bias is smaller in NoPE than in RoPE, the more so in "
    "deeper layers.",
    quote="As illustrated in Figure 4, the gradient magnitudes of NoPE transformers are far lower than those of RoPE "
    "transformers, with the gap between the two growing in deeper layers.",
    paper="DroPE, section 3 on Figure 4",
    arms=(ROPE,),
    criteria=tuple(
        criterion
        for name in positional_bias.PATTERNS
        for criterion in (
            Criterion(f"{name} heads: RoPE's is larger", f"rope: ratio {name}", by=0.1, unit=UNIT),
            Criterion(
                f"{name} heads: the ratio is larger in the last layer than in the first",
                f"rope: ratio {name} last",
                (f"rope: ratio {name} first",),
                by=0.05,
                unit=UNIT,
            ),
        )
    ),
    evaluation=None,
    recipes={"rope": "configs/table1.py:method=rope"},
    measure=gradients,
    curves={
        "log10 of RoPE's over NoPE's gradient, by layer": {
            name: f"rope: ratio {name} {{x}}" for name in positional_bias.PATTERNS
        }
    },
)

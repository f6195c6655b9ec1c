"""DroPE from scratch: 14K steps with RoPE, then 2K steps without positional encoding.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix C.1,
Table 4 (left column) and Table 6. Reproduces the row DroPE of Table 1 and all of Table 6. Model, data, optimizer
and everything that the paper leaves open are those of configs/table1.py:method=drope, which this recipe loads;
it changes only the step of the drop.

Arguments: drop=14000 (or 0, 8000, 16000: the step of the drop, of 16K), from=CHECKPOINT, more=STEPS (after
drop=16000: so many steps follow without encoding, which is not in the paper).

Train (prepare the data as in configs/table1.py):
  python -m pe_lab.train --config=configs/drope_16b.py
  python -m pe_lab.train --config=configs/drope_16b.py:drop=0
  python -m pe_lab.train --config=configs/drope_16b.py:drop=8000
  python -m pe_lab.train --config=configs/drope_16b.py:drop=16000
or only the steps after a drop, from the checkpoints that the RoPE run of configs/table1.py keeps:
  python -m pe_lab.train --config=configs/drope_16b.py:from=runs/table1_rope/pretrain/checkpoints/14000
  python -m pe_lab.train --config=configs/drope_16b.py:drop=8000,from=runs/table1_rope/pretrain/checkpoints/8000
  python -m pe_lab.train --config=configs/drope_16b.py:drop=16000,more=1000,from=runs/table1_rope

Cost: 16.8B tokens, 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours;
from 14K on 24 v5e chip-hours, from 8K on 95, 12 for each 1,000 steps more. A v5e chip has 4 windows of a batch and
needs 6.6 of its 16 GiB. A GPU of 8 has 128 windows, in as many micro-batches as its memory needs. On fewer than 8
chips: --config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/drope_16b.py --topology=v5e:16x16

Expected (Table 1): needles at twice the training length, multi-query / multi-key / multi-value, 28.0 / 41.6 /
23.3 (logits scaled by 1 + 0.412 ln 2). Validation perplexity (Table 6):
  dropped at                0 (NoPE)   8000   14000   16000 (RoPE)
  validation perplexity        23.77  22.42   21.73          21.72

The paper leaves open whether all runs are recalibrated as the one dropped at 14K (here: yes), and whether the
steps before the drop have a cosine of their own (here: yes; with `from=`, they are the first ones of a cosine of
16K).
"""

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.recipes import recipe_arguments

from .table1 import get_config as table1

PERPLEXITY = {14_000: "21.73", 0: "23.77", 8_000: "22.42", 16_000: "21.72"}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: drop=STEP; with from=CHECKPOINT only the phase after the drop, from a RoPE checkpoint of that step.

    drop=16000,more=STEPS has so many steps after the drop.
    """
    arguments = recipe_arguments(arg, drop=tuple(map(str, PERPLEXITY)), more="0", **{"from": ""})
    drop, checkpoint = int(arguments["drop"]), arguments["from"]
    more = int(arguments["more"]) if arguments["more"].isdecimal() else -1
    if more < 0 or (more and drop != 16_000):
        raise ConfigError(f"more={arguments['more']}: steps after drop=16000, such as drop=16000,more=1000.")
    if checkpoint and not more and drop in (0, 16_000):
        raise ConfigError(f"from={checkpoint} starts after a drop, and drop={drop} has no phase after a drop.")

    config = table1("method=" + {0: "nope", 16_000: "drope" if more else "rope"}.get(drop, "drope"))
    config.name = "drope_16b" + (f"_drop{drop}" if drop != 14_000 else "") + (f"_more{more}" if more else "")
    config.name += "_branch" if checkpoint else ""
    if len(config.phases) == 2:
        config.phases[0].steps = drop
        config.phases[1].steps = more or 16_000 - drop
    if checkpoint:
        config.phases = config.phases[1:]
        config.phases[0].init_from = checkpoint
        config.data.seed = 1  # the RoPE run has read the windows that come first with seed 0

    # 190.7 is table1's cost of 16,000 steps before it is rounded.
    hours = round(190.7 * ((0 if checkpoint else drop) + (more or 16_000 - drop)) / 16_000)
    needles = "; needles at 2x 28.0 / 41.6 / 23.3 (multi-query / key / value)" if drop == 14_000 else ""
    config.notes.update(
        paper="DroPE, Tables 1, 4 and 6: 494M, RoPE dropped "
        + (f"for {more:,} steps after 16,000" if more else f"at step {drop:,} of 16,000"),
        command="python -m pe_lab.train --config=configs/drope_16b.py" + (f":{arg}" if arg else ""),
        cost=f"{hours} v5e chip-hours at 40% MFU",
        expected="not in the paper" if more else f"validation perplexity {PERPLEXITY[drop]}{needles}",
    )
    return config

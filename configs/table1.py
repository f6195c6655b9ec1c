"""DroPE's comparison from scratch: nine positional encodings with one model and one budget.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix
C.1 and the left column of Table 4: a 494M decoder in the shape of Qwen2-0.5B (without attention bias) on
16.8B tokens of FineWeb, T = 1024, batch 1024. Reproduces Table 1, and the ends of Table 6. p-RoPE, partial
RoPE, SWAN and SSMax are not in the paper; they have the same budget.

Arguments: method=rope (or nope, alibi, rnope_swa, swan, ssmax, p_rope, partial_rope, drope), size=494m (or laptop).

Prepare (30M documents are about 20B tokens; the tokenizer is Qwen2's, huggingface.co/Qwen/Qwen2-0.5B):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:qwen2/tokenizer.json --limit-documents=30000000 --out=data/fineweb-qwen2

Train:
  python -m pe_lab.train --config=configs/table1.py:method=rope
  python -m pe_lab.train --config=configs/table1.py:method=nope
  python -m pe_lab.train --config=configs/table1.py:method=alibi
  python -m pe_lab.train --config=configs/table1.py:method=rnope_swa
  python -m pe_lab.train --config=configs/table1.py:method=swan
  python -m pe_lab.train --config=configs/table1.py:method=ssmax
  python -m pe_lab.train --config=configs/table1.py:method=p_rope
  python -m pe_lab.train --config=configs/table1.py:method=partial_rope
  python -m pe_lab.train --config=configs/table1.py:method=drope
configs/drope_16b.py is the last one with other steps of the drop (Table 6). It can start from the checkpoints 8000
and 14000 of method=rope, which are kept.

Cost of each: 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours. A v5e chip
has 4 windows of a batch. A GPU of 8 has 128, in as many micro-batches as its memory needs. On fewer than 8 chips:
--config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/table1.py:method=rope --topology=v5e:16x16

Expected (Tables 1 and 6), needles at twice the training length, and validation perplexity:
  method            multi-query   multi-key   multi-value   perplexity
  rope                      0.0         0.0           0.0        21.72
  rope, PI                  0.0         0.0           0.0
  rope, RoPE-NTK           21.1        19.4          16.5
  rope, YaRN               17.8         0.5          14.6
  alibi                     5.2         0.0           1.1
  nope                      9.2        36.2          21.4        23.77
  rnope_swa                 5.2        25.6          20.6
  drope                    28.0        41.6          23.3        21.73
PI, RoPE-NTK and YaRN are variants of method=rope in pe_lab.evaluate.

size=laptop is the same comparison on two CPU cores, about 6 minutes each: the model and data of drope_laptop with
a fourth layer, and nothing to prepare. No number of the paper applies to it. In one run of method=drope the drop
took perplexity from 9.4 to 18.5: an eighth of the steps is little for so small a model. Needles, with three seeds and
a logit scale that is fitted on text: docs/claims.md (drop_needles), of configs/claims.py.
  python -m pe_lab.train --config=configs/table1.py:method=rope,size=laptop
  python -m pe_lab.train --config=configs/table1.py:method=drope,size=laptop

Table 4's initializer range is 0.02 for all weights, so scaled_residual_init is False.
The paper leaves open, and decided here: the window of RNoPE-SWA (256 of 1024 tokens; Cohere's 4096 would be no
window here; every fourth layer has full attention and no encoding) and its base (as RoPE's), ALiBi's slopes for 14
heads (8 + 6, as in ALiBi's own code), whether DroPE's 14K steps had a cosine of their own (yes), where the cosine
ends (0), the rate after the drop (C.1, Table 4: 1e-3; D.3: 3e-4 is "our default setting for all experiments except
the longer SmolLM-360M recalibration phases"), gradient clipping (1.0), which part of FineWeb (any), the norm's
epsilon (Qwen2's 1e-6), p-RoPE's fraction (the 75% highest frequencies, the best of its paper), partial RoPE's (25%
of the channels, as Pythia). The paper's code appends EOS to a document and lets attention cross it, as here
(segments=False).
"""

from typing import Any

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import Alibi, NoPE, PartialRope, Rope, rnope_swa, swan
from pe_lab.recipes import AUTO, phase, recipe_arguments

from .drope_laptop import get_config as drope_laptop

EXPECTED = {
    "rope": "validation perplexity 21.72; needles at 2x 0 / 0 / 0 (multi-query / key / value)",
    "nope": "validation perplexity 23.77; needles at 2x 9.2 / 36.2 / 21.4 (multi-query / key / value)",
    "alibi": "needles at 2x 5.2 / 0.0 / 1.1 (multi-query / key / value); no perplexity in the paper",
    "rnope_swa": "needles at 2x 5.2 / 25.6 / 20.6 (multi-query / key / value); no perplexity in the paper",
    "swan": "not in the paper",
    "ssmax": "not in the paper",
    "p_rope": "not in the paper",
    "partial_rope": "not in the paper",
    "drope": "validation perplexity 21.73; needles at 2x 28.0 / 41.6 / 23.3 (multi-query / key / value)",
}


def encoding(method: str, base: float, length: int) -> Any:
    """The `positional` of a method's first phase."""
    window = length // 4
    return {
        "rope": Rope(base=base),
        "nope": NoPE(),
        "alibi": Alibi(),
        "rnope_swa": rnope_swa(window, base=base),
        "swan": swan(window, length, base=base),
        "ssmax": f"rope:base={base:g}/with=ssmax",
        "p_rope": Rope(base=base, fraction=0.75),
        "partial_rope": PartialRope(base=base, fraction=0.25),
        "drope": Rope(base=base),
    }[method]


def drope_494m() -> ConfigDict:
    """DroPE at 494M: 14.7B tokens with RoPE and 2.1B without."""
    config = ConfigDict()
    config.model = preset("drope_494m", scaled_residual_init=False, **AUTO)
    config.data = dict(prepared="data/fineweb-qwen2", segments=False, seed=0)
    config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^7 * 7
    adamw = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    first = dict(learning_rate=3e-4, warmup_steps=520, **adamw)
    second = dict(learning_rate=1e-3, warmup_steps=70, **adamw)
    window = dict(sequence_length=1024, batch_size=1024, accumulate="auto")
    config.phases = [
        phase(name="pretrain", steps=14_000, positional=Rope(base=1_000_000.0), optimizer=first, **window),
        phase(name="recalibrate", steps=2_000, positional=NoPE(), optimizer=second, **window),
    ]
    config.checkpoint = dict(every_steps=2000, milestones=[8000, 14000])  # drope_16b starts from these two
    config.log = dict(every_steps=10)
    config.evaluation = dict(options=dict(tokens=2**20, fit_tokens=2**18))
    return config


def drope_laptop_4_layers() -> ConfigDict:
    """The experiment of drope_laptop with the shares of the steps that DroPE has at 494M."""
    config = drope_laptop()
    config.model.layers = 4  # the fourth is the first of RNoPE-SWA without an encoding
    config.phases = [config.phases[0], config.phases[-1]]  # all pairs are dropped at once, as in the paper
    for one, steps in zip(config.phases, (5250, 750), strict=True):
        one.steps, one.optimizer.warmup_steps = steps, 10
    return config


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: method=rope,size=494m, or others of the docstring's."""
    arguments = recipe_arguments(arg, method=tuple(EXPECTED), size=("494m", "laptop"))
    method, laptop = arguments["method"], arguments["size"] == "laptop"

    config = drope_laptop_4_layers() if laptop else drope_494m()
    config.name = f"table1_{method}" + ("_laptop" if laptop else "")
    pretrain, recalibrate = config.phases
    pretrain.positional = encoding(method, pretrain.positional.base, pretrain.sequence_length)
    if method != "drope":
        pretrain.steps += recalibrate.steps
        config.phases = [pretrain]

    paper = "DroPE, Table 1, at the scale of a laptop" if laptop else "DroPE, Tables 1, 4 and 6: 494M on 16.8B tokens"
    config.notes = dict(
        paper=f"{paper}, {method}",
        command="python -m pe_lab.train --config=configs/table1.py" + (f":{arg}" if arg else ""),
        cost="about 6 minutes on 2 CPU cores" if laptop else "191 v5e chip-hours at 40% MFU",
        expected="no number of the paper applies at this size" if laptop else EXPECTED[method],
    )
    return config

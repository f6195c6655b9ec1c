"""DroPE's comparison from scratch: one model and one budget, seven ways with positions.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix
C.1 and the left column of Table 4: a 494M decoder in the shape of Qwen2-0.5B (without attention bias) on
16.8B tokens of FineWeb, T = 1024, batch 1024. Reproduces Table 1, and the ends of Table 6. p-RoPE and partial
RoPE are ours, on the same budget: the paper compares with neither.

Arguments: method=rope (or nope, alibi, rnope_swa, p_rope, partial_rope, drope), size=494m (or laptop).

Prepare (30M documents are about 20B tokens; the tokenizer is Qwen2's, huggingface.co/Qwen/Qwen2-0.5B):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:qwen2/tokenizer.json --limit-documents=30000000 --out=data/fineweb-qwen2

Train:
  python -m pe_lab.train --config=configs/table1.py:method=rope
  python -m pe_lab.train --config=configs/table1.py:method=nope
  python -m pe_lab.train --config=configs/table1.py:method=alibi
  python -m pe_lab.train --config=configs/table1.py:method=rnope_swa
  python -m pe_lab.train --config=configs/table1.py:method=p_rope
  python -m pe_lab.train --config=configs/table1.py:method=partial_rope
  python -m pe_lab.train --config=configs/table1.py:method=drope
The last one is drope_16b, which can also start from the checkpoint 14000 that method=rope keeps.

Cost of each: 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours. There
a chip takes 4 windows of a batch. 8 GPUs would take 128 each: cut the batch up with
--config.phases.0.accumulate=16. On fewer than 8 chips, also --config.mesh.fsdp=1. Does it fit?
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
PI, RoPE-NTK and YaRN are what pe_lab.evaluate does with method=rope.

size=laptop is the same comparison on two CPU cores, about 6 minutes each and nothing to prepare: four layers of
width 64 on windows of 64 tokens, half needles and half the standard library's source, as in drope_laptop. No
number of the paper applies to it. One run of method=drope found 100% of the needles at 1x to 32x with the paper's
logit scale (RoPE 100 / 66 / 24 / 11 / 7%, YaRN 100 to 95%), at perplexity 18.5 against 9.4 before the drop: an
eighth of the steps is little for so small a model.
  python -m pe_lab.train --config=configs/table1.py:method=rope,size=laptop
  python -m pe_lab.train --config=configs/table1.py:method=drope,size=laptop

The paper leaves open, and decided here: the window of RNoPE-SWA (256 of 1024 tokens; Cohere's 4096 would be no
window here; every fourth layer is full and has no encoding) and its base (as RoPE's), ALiBi's slopes for 14
heads (8 + 6, as in ALiBi's own code), whether DroPE's 14K steps had a cosine of their own (yes), where the
cosine ends (0), gradient clipping (1.0), which part of FineWeb (any), the norm's epsilon (Qwen2's 1e-6). Its
code appends EOS to a document and lets attention cross it: so do we (segments=False). Ours alone: the output
projections start smaller, by 1 / sqrt(2 x layers); p-RoPE turns the 75% highest frequencies, the best of
its paper, and partial RoPE 25% of the channels, as Pythia does.
"""

from typing import Any

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import Alibi, NoPE, PartialRope, Rope, rnope_swa
from pe_lab.recipes import recipe_arguments

EXPECTED = {
    "rope": "validation perplexity 21.72; needles at 2x 0 / 0 / 0 (multi-query / key / value)",
    "nope": "validation perplexity 23.77; needles at 2x 9.2 / 36.2 / 21.4 (multi-query / key / value)",
    "alibi": "needles at 2x 5.2 / 0.0 / 1.1 (multi-query / key / value); no perplexity in the paper",
    "rnope_swa": "needles at 2x 5.2 / 25.6 / 20.6 (multi-query / key / value); no perplexity in the paper",
    "p_rope": "not in the paper",
    "partial_rope": "not in the paper",
    "drope": "validation perplexity 21.73; needles at 2x 28.0 / 41.6 / 23.3 (multi-query / key / value)",
}


def encoding(method: str, base: float, window: int) -> Any:
    """What a phase's `positional` is under each method, before anything is dropped."""
    return {
        "rope": Rope(base=base),
        "nope": NoPE(),
        "alibi": Alibi(),
        "rnope_swa": rnope_swa(window, base=base),
        "p_rope": Rope(base=base, fraction=0.75),
        "partial_rope": PartialRope(base=base, fraction=0.25),
        "drope": Rope(base=base),
    }[method]


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: method=rope,size=494m, or others of the docstring's."""
    arguments = recipe_arguments(arg, method=tuple(EXPECTED), size=("494m", "laptop"))
    method = arguments["method"]

    config = ConfigDict()
    config.seed = 0
    if arguments["size"] == "494m":
        config.name = f"table1_{method}"
        config.model = preset("drope_494m", remat="dots", loss_chunks=8)
        config.data = dict(prepared="data/fineweb-qwen2", segments=False, seed=0)
        config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^7 * 7
        adamw = dict(b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0, schedule="cosine")
        pretrain = dict(
            name="pretrain",
            steps=14_000 if method == "drope" else 16_000,  # 14.7B or 16.8B tokens
            positional=encoding(method, base=1_000_000.0, window=256),
            sequence_length=1024,
            batch_size=1024,
            optimizer=dict(learning_rate=3e-4, warmup_steps=520, **adamw),
        )
        recalibrate = dict(
            name="recalibrate",
            steps=2_000,  # 2.1B tokens
            positional=NoPE(),
            sequence_length=1024,
            batch_size=1024,
            optimizer=dict(learning_rate=1e-3, warmup_steps=70, **adamw),
        )
        config.checkpoint = dict(every_steps=2000, keep=2)  # 14000, for drope_16b, and 16000 remain
        config.log = dict(every_steps=10, validate_every_steps=500, validation_batches=8)
        config.evaluation = dict(tokens=2**20, fit_tokens=2**18)
        paper = "DroPE, Tables 1, 4 and 6: 494M on 16.8B tokens"
        cost, expected = "191 v5e chip-hours at 40% MFU", EXPECTED[method]
    else:
        config.name = f"table1_{method}_laptop"
        config.model = dict(
            layers=4,  # the fourth is RNoPE-SWA's first without an encoding
            d_model=64,
            d_ff=256,
            heads=4,
            kv_heads=4,
            qk_norm="head",
            init_std=0.1,
            dtype="float32",
            scan=False,
        )
        needles = dict(
            facts="symbol",
            pairs=8,
            queries=4,
            keys=16,
            values=16,
            filler_symbols=16,
            answer_weight=8.0,
            filler_weight=0.02,
        )
        config.data = dict(
            sources=[
                dict(source="stdlib", weight=0.5),
                dict(source="needles", weight=0.5, options=needles),
            ],
            tokenizer="sentencepiece:train:512",
            validation_fraction=0.04,
        )
        adamw = dict(learning_rate=3e-3, warmup_steps=10, weight_decay=0.05)
        window = dict(sequence_length=64, batch_size=32, optimizer=adamw)
        pretrain = dict(
            name="pretrain",
            steps=5250 if method == "drope" else 6000,
            positional=encoding(method, base=200.0, window=16),
            **window,
        )
        recalibrate = dict(name="recalibrate", steps=750, positional=NoPE(), **window)
        config.log = dict(every_steps=10, validate_every_steps=250, validation_batches=8)
        config.checkpoint = dict(every_steps=500)
        config.evaluation = dict(factors=[1, 2, 4, 8, 32])
        paper = "DroPE, Table 1, at the scale of a laptop"
        cost, expected = "about 6 minutes on 2 CPU cores", "no number of the paper applies at this size"

    config.phases = [pretrain, recalibrate] if method == "drope" else [pretrain]
    config.notes = dict(
        paper=f"{paper}, {method}",
        command="python -m pe_lab.train --config=configs/table1.py" + (f":{arg}" if arg else ""),
        cost=cost,
        expected=expected,
    )
    return config

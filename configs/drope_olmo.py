"""OLMo without its positional encoding: OLMo 2 1B, and the layers of OLMo 3 7B that see all tokens.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), section 5. It has no
OLMo: this is its recipe on models whose data, code and intermediate checkpoints are public.

Arguments: model=olmo2_1b (or olmo3_7b), tokens=20b (or 5b, 40b), drop=all (or full: the layers without a window alone,
the default of olmo3_7b, which has such layers), rate=3e-4, from=CHECKPOINT, data=SOURCE (a directory of pe_lab.prepare,
or as in configs/finetune.py).

Prepare (models and tokenizers are huggingface.co/allenai/OLMo-2-0425-1B and Olmo-3-1025-7B; 23M documents are about 23B
tokens; tokens=40b takes 46M):
  python -m pe_lab.convert --from=hf:OLMo-2-0425-1B --to=runs/olmo2_1b
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=hf:OLMo-2-0425-1B/tokenizer.json --limit-documents=23000000 --out=data/fineweb-edu-olmo
and likewise for runs/olmo3_7b, which has the same tokenizer and data.

Train:
  python -m pe_lab.train --config=configs/drope_olmo.py
  python -m pe_lab.train --config=configs/drope_olmo.py:tokens=5b,rate=1e-3
  python -m pe_lab.train --config=configs/drope_olmo.py:tokens=40b
  python -m pe_lab.train --config=configs/drope_olmo.py:from=runs/olmo2_1b,data=data/fineweb-edu-olmo
  python -m pe_lab.train --config=configs/drope_olmo.py:model=olmo3_7b
  python -m pe_lab.train --config=configs/drope_olmo.py:model=olmo3_7b,drop=all
  python -m pe_lab.train --config=configs/drope_olmo.py:model=olmo3_7b,tokens=5b
  python -m pe_lab.train --config=configs/drope_olmo.py:model=olmo3_7b,tokens=40b

Cost at 40% MFU, in v5e chip-hours:
  model      5b tokens   20b tokens   40b tokens
  olmo2_1b         164          655         1309
  olmo3_7b         955         3822         7643
v5e:16x16 takes a 256th of these hours. Does it fit?
  python -m pe_lab.plan --config=configs/drope_olmo.py --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/drope_olmo.py:model=olmo3_7b --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/drope_olmo.py:model=olmo3_7b --topology=v5p:4x4x4
A node of 8 H200: --config.mesh.fsdp=8.

Expected: not in the paper. After 20B tokens its SmolLM-1.7B has the multiple choice of before the drop (Table 5), and
more of LongBench than with YaRN (Table 3). The same here is a success: compare multiple choice and perplexity with
those of runs/olmo2_1b, and needles at 8k, 16k and 32k with --positional=yarn:factor=8 on it.

From the paper: the drop at the model's own length, batches of 512 windows in the 1B (Table 4), AdamW's constants, the
cosine, FineWeb-Edu, and the rate of appendix D.3, 3e-4. OLMo 2 has a flat QK-norm of its own, from its first step, so
none is added. The paper takes the norm from OLMo 2, for rates as high as 1e-3 (Table 11: without it they diverge).
Decided here: 20B tokens, as for SmolLM-1.7B, though that has read 1T tokens and OLMo 2 1B 4T; warm-up in 3% of the
steps; a cosine that ends at 0; gradient clipping at 1.0. The code appends EOS to a document and lets attention cross
it, as here (segments=False).
OLMo 3 has windows of 4096 tokens in three layers of four. Within one, no two tokens are further apart than in training,
however long the sequence, so its rotation extrapolates; and it is the rotation of the full layers that its authors
scale (YaRN) for 65,536 tokens. So drop=full drops that alone, which is the arrangement of Cohere 2 (RNoPE-SWA);
drop=all is the paper's, with the windows as they are. Both are recalibrated at 8192 tokens, the length before YaRN, and
256 windows a step, for as many tokens a step as the 1B.
"""

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.model import preset
from pe_lab.positional import Layer, NoPE, pattern, rnope_swa
from pe_lab.recipes import AUTO, corpus, number, phase, recipe_arguments

STEPS = {"20b": 9_537, "5b": 2_384, "40b": 19_073}  # of 2.1M tokens
WINDOW = 4096
ENCODINGS = {
    ("olmo2_1b", "all"): NoPE(),
    ("olmo3_7b", "full"): rnope_swa(WINDOW, base=500_000.0),
    ("olmo3_7b", "all"): pattern([Layer(NoPE(), WINDOW)] * 3 + [Layer(NoPE())]),
}
# v5e chip-hours at 40% MFU
CHIP_HOURS = {
    "olmo2_1b": {"5b": "164", "20b": "655", "40b": "1309"},
    "olmo3_7b": {"5b": "955", "20b": "3822", "40b": "7643"},
}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: model=olmo2_1b,tokens=20b, or others of the docstring's."""
    free = {"from": "", "data": "data/fineweb-edu-olmo", "rate": "3e-4"}
    arguments = recipe_arguments(arg, model=tuple(CHIP_HOURS), tokens=tuple(STEPS), drop=("", "all", "full"), **free)
    model, tokens, rate = (arguments[key] for key in ("model", "tokens", "rate"))
    large = model == "olmo3_7b"
    drop = arguments["drop"] or ("full" if large else "all")
    if (model, drop) not in ENCODINGS:
        raise ConfigError(f"drop={drop}: all layers of {model} see all tokens; give drop=all.")
    steps = STEPS[tokens]

    config = ConfigDict()
    config.name = f"drope_{model}_{tokens}" + ("_all" if large and drop == "all" else "")
    config.name += f"_{rate}" if rate != "3e-4" else ""
    config.model = preset(model, **AUTO)
    config.data = dict(corpus(arguments["data"]), segments=False)
    config.mesh = dict(data=-1, fsdp=64 if large else 16)
    adamw = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="recalibrate",
            steps=steps,
            positional=ENCODINGS[model, drop],
            init_from=arguments["from"] or f"runs/{model}",
            sequence_length=8192 if large else 4096,
            batch_size=256 if large else 512,
            accumulate="auto",
            optimizer=dict(learning_rate=number(arguments, "rate"), warmup_steps=steps * 3 // 100, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=500)
    config.log = dict(every_steps=10)
    config.evaluation = dict(factors=[1, 2, 4], options=dict(tokens=2**20, fit_tokens=2**18))

    layers = "layers without a window" if drop == "full" else "all layers"
    config.notes = dict(
        paper=f"none: DroPE's recipe on {model}, {layers} recalibrated on {tokens} tokens",
        command="python -m pe_lab.train --config=configs/drope_olmo.py" + (f":{arg}" if arg else ""),
        cost=f"{CHIP_HOURS[model][tokens]} v5e chip-hours at 40% MFU",
        expected="not in the paper",
    )
    return config

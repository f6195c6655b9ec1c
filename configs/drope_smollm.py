"""SmolLM, or any other checkpoint, without its positional encoding: dropped, and recalibrated at its own length.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), section 5,
appendix C.1 and the right column of Table 4. Reproduces SmolLM-360M-DroPE in three budgets (Figures 9 and 10,
Tables 2, 5, 7 to 10) and SmolLM-1.7B-DroPE (Tables 3 and 5). SmolLM2-135M is not in the paper; it fits one GPU.

Arguments: model=360m (or 1.7b, 135m), tokens=30b (or 60b, 120b; model=1.7b has 20b, model=135m 210m or 1b),
qk_norm=head (or flat, query_head, query_flat, none, the default of model=1.7b), from=CHECKPOINT, data=SOURCE (a
directory of pe_lab.prepare, or as in configs/finetune.py), distill=none (or logits, hidden: logits and hidden states):
the model before the drop is its teacher, which is not in the paper.
With model=own, from=CHECKPOINT gives the shape, the tokenizer and the training length: any family that pe_lab reads
(docs/checkpoints.md). Then steps=1000, batch=512, length (0: the checkpoint's), rate=3e-4; without qk_norm, a norm that
the model has stays. Rotations, ALiBi's slopes and learned positions are dropped; windows and sinks stay.

Prepare (models and tokenizers are huggingface.co/HuggingFaceTB/SmolLM-360M, SmolLM-1.7B and SmolLM2-135M; 36M
documents are about 36B tokens; tokens=60b takes 70M, and tokens=120b 140M out of sample/350BT):
  python -m pe_lab.convert --from=hf:SmolLM-360M --to=runs/smollm_360m
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=hf:SmolLM-360M/tokenizer.json --limit-documents=36000000 --out=data/fineweb-edu-smollm
and likewise for runs/smollm_1_7b, which has the same data, or for runs/smollm2_135m and data/fineweb-edu-smollm2
with --limit-documents=1500000.

Train:
  python -m pe_lab.train --config=configs/drope_smollm.py:model=360m,tokens=30b
  python -m pe_lab.train --config=configs/drope_smollm.py:model=360m,tokens=60b
  python -m pe_lab.train --config=configs/drope_smollm.py:model=360m,tokens=120b
  python -m pe_lab.train --config=configs/drope_smollm.py:model=1.7b
  python -m pe_lab.train --config=configs/drope_smollm.py:model=135m
  python -m pe_lab.train --config=configs/drope_smollm.py:model=135m,distill=hidden
  python -m pe_lab.train --config=configs/drope_smollm.py:model=135m,tokens=1b
  python -m pe_lab.train --config=configs/drope_smollm.py:model=135m,from=runs/smollm2_135m,data=data/my-text
and another model:
  python -m pe_lab.train --config=configs/drope_smollm.py:model=own,from=runs/qwen3_0_6b,data=data/my-text
  python -m pe_lab.train --config=configs/drope_smollm.py:model=own,from=runs/mine,data=prose,steps=50,batch=8

Cost at 40% MFU, in v5e chip-hours:
  model   tokens               chip-hours   on v5e:16x16
  360m    30b (30K steps)             324   76 minutes
  360m    60b (60K steps)             649   2.5 hours
  360m    120b (120K steps)          1298   5.1 hours
  1.7b    20b (19,073 steps)          809   3.2 hours
  135m    210m (400 steps)            1.9   21 minutes on an H100, 31 with a teacher (speed of 136 steps)
  135m    1b (2K steps)               9.3
A teacher costs a third more. A chip of 256 has 2 windows of a batch, and one of 8 GPUs 64, in as many micro-batches as
its memory needs. On fewer than 8 chips: --config.mesh.fsdp=1 (the default of model=own, whose cost the plan of its
checkpoint gives). Does it fit?
  python -m pe_lab.plan --config=configs/drope_smollm.py:model=360m --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/drope_smollm.py:model=1.7b --topology=v5e:16x16
  python -m pe_lab.plan --config=configs/drope_smollm.py:model=135m --topology=h100:1

Expected. Needles at 2x / 4x / 8x (Table 10): 74.92 / 55.0 / 52.2, against 48.25 / 25.62 / 12.18 for YaRN on
SmolLM-360M as it is and 29.84 / 14.37 / 7.19 for RoPE-NTK, logits scaled by 1 + 0.103 ln s. LongRoPE2 has 44.20 / 26.20
/ 16.45 there; the paper does not give its tables. A search finds tables for each length:
  python -m pe_lab.surgery --from=runs/smollm_360m --to=runs/smollm_360m_4x --search --length=4x
  python -m pe_lab.evaluate --from=runs/smollm_360m_4x --lengths=4x --suite=niah:multi_query,multi_key,multi_value
LongBench:
                      MultiFieldQA   MuSiQue   GovReport   LCC
  SmolLM-360M                 4.03      0.40        4.48    5.99
  SmolLM-360M, YaRN          20.78      4.77       15.03   10.87
  SmolLM-360M-DroPE          29.33      7.93       21.87   18.56   (Table 2)
  SmolLM-1.7B                 4.12      0.50        4.70
  SmolLM-1.7B, YaRN          27.60      3.90       17.19
  SmolLM-1.7B-DroPE          32.18      7.53       24.77           (Table 3)
For Figure 10, which follows the 360M through its recalibration, the checkpoints 2000, 4000, 8000, ... are kept.
Multiple choice, average of six (Table 5): 53.1 -> 53.4 for the 360M, 60.25 -> 60.62 for the 1.7B.
SmolLM2-135M is still 2.5 nats behind RoPE after 4.5M tokens (docs/claims.md). Of model=own nothing is known.

The 360M has Table 4's settings: learning rate 1e-3 after 490 steps, QK-norm from the drop on. In the paper's code
the norm is flat, over all heads at once (qk_norm=flat), and its scale starts at 1. The scale starts at 1 here too
(qk_norm_init=ones); per head is the default kind, since Hugging Face models can have it. SmolLM2-135M, which is not in
the paper, starts where the logits are closest to those before (qk_norm_init=matched), as in the runs that were
measured.
Of the 1.7B the paper gives 20B tokens, and that QK-norm was for the 360M only. Decided here: its own length of
2048 and 3e-4 after 600 steps, as the public code has for this model and appendix D.3 calls the default (the
code's run has 120K steps and holds the rate for 80% of them; here it is a cosine, as elsewhere). Llama2's 4096 and
1e-4 are another run of that code: configs/drope_llama2.py.
model=own has the rate of D.3, the warm-up of the 360M (3.5% of the steps), and batches of 512 windows, whatever their
length, as the paper has for 2048 and 4096 tokens. A norm that is added starts as for SmolLM2-135M; then try rate=1e-3.
Left open, and decided here: where the cosine ends (0), gradient clipping (1.0), which part of FineWeb-Edu
(any). The code appends EOS to a document and lets attention cross it, as here (segments=False).
"""

from typing import Any

from ml_collections import ConfigDict

from pe_lab.errors import ConfigError
from pe_lab.model import preset
from pe_lab.positional import NoPE, drop
from pe_lab.recipes import AUTO, corpus, name_of, number, phase, recipe_arguments

# model -> {tokens: (steps, v5e chip-hours at 40% MFU)}, the first the default
BUDGETS = {
    "360m": {"30b": (30_000, "324"), "60b": (60_000, "649"), "120b": (120_000, "1298")},
    "1.7b": {"20b": (19_073, "809")},
    "135m": {"210m": (400, "1.9"), "1b": (2_000, "9.3")},
}
EXPECTED = {
    "360m": "needles at 2x / 4x / 8x 74.92 / 55.0 / 52.2; LongBench MultiFieldQA 29.33, MuSiQue 7.93",
    "1.7b": "LongBench MultiFieldQA / MuSiQue / GovReport 32.18 / 7.53 / 24.77",
    "135m": "not in the paper",
}
ADAMW = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: model=360m,tokens=30b, or model=own,from=CHECKPOINT,data=SOURCE, or others of the docstring's."""
    kinds = ("", "head", "flat", "query_head", "query_flat", "none")
    sizes = ("", *(tokens for budget in BUDGETS.values() for tokens in budget))
    free = {"data": "", "from": "", "steps": "", "batch": "", "length": "", "rate": ""}
    teachers, models = ("none", "logits", "hidden"), (*BUDGETS, "own")
    arguments = recipe_arguments(arg, model=models, tokens=sizes, qk_norm=kinds, distill=teachers, **free)
    size = arguments["model"]
    if size == "own":
        return _own(arg, arguments)
    if given := [key for key in ("steps", "batch", "length", "rate") if arguments[key]]:
        raise ConfigError(f"{' and '.join(given)}: for model=own; the settings of model={size} are those of its runs.")
    tokens = arguments["tokens"] or next(iter(BUDGETS[size]))
    if tokens not in BUDGETS[size]:
        raise ConfigError(f"model={size} is recalibrated on {' or '.join(BUDGETS[size])} tokens, not {tokens}.")
    steps, hours = BUDGETS[size][tokens]
    kind = arguments["qk_norm"] or ("none" if size == "1.7b" else "head")

    config = ConfigDict()
    config.name = f"drope_smollm_{size.replace('.', '_')}_{tokens}_{kind}"
    fsdp, start, text = 8, "runs/smollm_360m", "data/fineweb-edu-smollm"  # fsdp divides d_model = 2^6 * 15
    window = dict(sequence_length=2048, batch_size=512)
    optimizer = dict(learning_rate=1e-3, warmup_steps=490)
    if size == "360m":
        config.model = preset("smollm_360m", **AUTO)
    elif size == "1.7b":
        config.model = preset("smollm_1_7b", **AUTO)
        start, optimizer = "runs/smollm_1_7b", dict(learning_rate=3e-4, warmup_steps=600)
    else:
        config.model = preset("smollm2_135m", **AUTO)
        fsdp, start, text = 1, "runs/smollm2_135m", "data/fineweb-edu-smollm2"
        window = dict(sequence_length=8192, batch_size=64)
        optimizer["warmup_steps"] = max(20, steps * 7 // 200)
    config.mesh = dict(data=-1, fsdp=fsdp)
    config.data = dict(corpus(arguments["data"] or text), segments=False)
    config.phases = [
        phase(
            name="recalibrate",
            steps=steps,
            positional=NoPE(),
            qk_norm=kind,
            qk_norm_init="matched" if kind == "none" or size == "135m" else "ones",
            init_from=arguments["from"] or start,
            accumulate="auto",
            optimizer=dict(**optimizer, **ADAMW),
            **window,
        )
    ]
    if arguments["distill"] != "none":
        config.name += f"_{arguments['distill']}"
        hours = f"{float(hours) * 4 / 3:.1f}"  # the teacher's forward pass
        config.phases[0].distill = _teacher(arguments)
    milestones = [2000 * 2**n for n in range(6)] if size == "360m" else []  # 2.1B to 67B tokens
    config.checkpoint = dict(every_steps=500 if size == "135m" else 2000, milestones=milestones)
    config.log = dict(every_steps=10)
    config.evaluation = dict(options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper=f"DroPE, Tables 2 to 5 and 10: SmolLM-{size} recalibrated on {tokens} tokens",
        command="python -m pe_lab.train --config=configs/drope_smollm.py" + (f":{arg}" if arg else ""),
        cost=f"{hours} v5e chip-hours at 40% MFU",
        expected=EXPECTED[size],
    )
    return config


def _own(arg: str, arguments: dict[str, str]) -> ConfigDict:
    """The recipe of any checkpoint, from which comes what is not set here."""
    start, source = arguments["from"], arguments["data"]
    if arguments["tokens"] or not (start and source):
        raise ConfigError("model=own takes from=CHECKPOINT and data=SOURCE, and steps=N in the place of tokens.")
    values = {"steps": "1000", "batch": "512", "length": "0", "rate": "3e-4"}
    values |= {key: arguments[key] for key in values if arguments[key]}
    steps, batch, length = (number(values, key, int) for key in ("steps", "batch", "length"))

    config = ConfigDict()
    config.name = f"drope_{name_of(start)}"
    config.model = dict(AUTO)
    config.data = dict(corpus(source), segments=False)
    recalibrate = phase(
        name="recalibrate",
        steps=steps,
        positional=drop(),
        init_from=start,
        batch_size=batch,
        accumulate="auto",
        optimizer=dict(learning_rate=number(values, "rate"), warmup_steps=steps * 7 // 200, **ADAMW),
    )
    if length:
        recalibrate.sequence_length = length
    if arguments["qk_norm"]:
        recalibrate.qk_norm = arguments["qk_norm"]
    if arguments["distill"] != "none":
        config.name += f"_{arguments['distill']}"
        recalibrate.distill = _teacher(arguments)
    config.phases = [recalibrate]
    every = max(1, min(500, steps // 2))
    config.checkpoint = dict(every_steps=every)
    config.log = dict(every_steps=10 if steps > 100 else 1, validate_every_steps=every)
    config.evaluation = dict(options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper=f"DroPE's recipe on {start}, which is not in the paper",
        command="python -m pe_lab.train --config=configs/drope_smollm.py" + (f":{arg}" if arg else ""),
        cost="that of its checkpoint's shape: python -m pe_lab.plan",
        expected="not in the paper",
    )
    return config


def _teacher(arguments: dict[str, str]) -> dict[str, Any]:
    return dict(teacher="init", logits=1.0, hidden=float(arguments["distill"] == "hidden"))

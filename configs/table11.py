"""Recalibrating SmolLM-360M with and without QK-norm, at three learning rates.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix D.3
and the right column of Table 4. Reproduces Table 11 and Figure 12: without QK-norm a learning rate of 1e-3
diverges, with it that rate is the best.

Arguments: qk_norm=head (or flat, query_head, query_flat, none; also yes = head and no = none), lr=1e-3 (or
3e-4, 3e-5), from=runs/smollm_360m (the checkpoint to start from), data=data/fineweb-edu-smollm.

Prepare (36M documents are about 36B tokens; model and tokenizer are huggingface.co/HuggingFaceTB/SmolLM-360M):
  python -m pe_lab.convert --from=hf:SmolLM-360M --to=runs/smollm_360m
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=hf:SmolLM-360M/tokenizer.json --limit-documents=36000000 --out=data/fineweb-edu-smollm

Train:
  python -m pe_lab.train --config=configs/table11.py:qk_norm=yes,lr=1e-3
  python -m pe_lab.train --config=configs/table11.py:qk_norm=yes,lr=3e-4
  python -m pe_lab.train --config=configs/table11.py:qk_norm=yes,lr=3e-5
  python -m pe_lab.train --config=configs/table11.py:qk_norm=no,lr=1e-3
  python -m pe_lab.train --config=configs/table11.py:qk_norm=no,lr=3e-4
  python -m pe_lab.train --config=configs/table11.py:qk_norm=no,lr=3e-5
and the kind of norm in the paper's code, or the one that learned faster (appendix C.1: queries alone):
  python -m pe_lab.train --config=configs/table11.py:qk_norm=flat
  python -m pe_lab.train --config=configs/table11.py:qk_norm=query_head

Cost of each: 9.20e19 FLOPs; 324 v5e chip-hours at 40% MFU (76 minutes of v5e:16x16), or 65 H100-hours. A batch is
divided into as many micro-batches as the memory needs. On fewer than 8 chips: --config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/table11.py:qk_norm=yes --topology=v5e:16x16

Expected (Table 11), final loss:
  learning rate   with QK-norm   without
  1e-3                   2.496     6.334
  3e-4                   2.555     2.530
  3e-5                   3.102     2.713

The paper leaves open, and decided here: how long these six ran (its shortest recalibration, 30K steps or 31.5B
tokens), their warm-up (490 steps, as its recalibrations), where the cosine ends (0), gradient clipping (1.0).
In its code the norm is flat, over all heads at once, and its scale starts at 1. The scale starts at 1 here too
(qk_norm_init=ones); per head is the default kind, since Hugging Face models can have it. The code appends EOS to a
document and lets attention cross it, as here (segments=False).
"""

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import NoPE
from pe_lab.recipes import AUTO, phase, recipe_arguments

# (with QK-norm, without)
LOSSES = {"1e-3": ("2.496", "6.334"), "3e-4": ("2.555", "2.530"), "3e-5": ("3.102", "2.713")}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: qk_norm=yes,lr=1e-3, or others of the docstring's."""
    arguments = recipe_arguments(
        arg,
        qk_norm=("head", "flat", "query_head", "query_flat", "none", "yes", "no"),
        lr=tuple(LOSSES),
        data="data/fineweb-edu-smollm",
        **{"from": "runs/smollm_360m"},
    )
    kind = {"yes": "head", "no": "none"}.get(arguments["qk_norm"], arguments["qk_norm"])
    rate = arguments["lr"]

    config = ConfigDict()
    config.name = f"table11_{kind}_{rate}"
    config.model = preset("smollm_360m", **AUTO)
    config.data = dict(prepared=arguments["data"], segments=False)
    config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^6 * 15
    adamw = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="recalibrate",
            steps=30_000,  # 31.5B tokens
            positional=NoPE(),
            qk_norm=kind,
            qk_norm_init="matched" if kind == "none" else "ones",
            init_from=arguments["from"],
            sequence_length=2048,
            batch_size=512,
            accumulate="auto",
            optimizer=dict(learning_rate=float(rate), warmup_steps=490, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=2000)
    config.log = dict(every_steps=10)
    config.evaluation = dict(options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper="DroPE, Table 11: SmolLM-360M recalibrated with and without QK-norm",
        command="python -m pe_lab.train --config=configs/table11.py" + (f":{arg}" if arg else ""),
        cost="324 v5e chip-hours at 40% MFU",
        expected=f"final loss {LOSSES[rate][kind == 'none']}",
    )
    return config

"""Llama2-7B without its positional encoding: dropped, and recalibrated on 20B tokens.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), section 5.
Reproduces the rows of Llama2-7B in Table 3.

Arguments: from=runs/llama2_7b (the checkpoint to start from), data=data/fineweb-edu-llama2.

Prepare (23M documents are about 25B tokens; model and tokenizer are huggingface.co/meta-llama/Llama-2-7b-hf):
  python -m pe_lab.convert --from=hf:Llama-2-7b-hf --to=runs/llama2_7b
  python -m pe_lab.prepare --source=parquet:'fineweb-edu/sample/100BT/*.parquet' \\
      --tokenizer=sentencepiece:Llama-2-7b-hf/tokenizer.model --limit-documents=23000000 \\
      --out=data/fineweb-edu-llama2

Train:
  python -m pe_lab.train --config=configs/drope_llama2.py
  python -m pe_lab.train --config=configs/drope_llama2.py:from=runs/llama2_7b,data=data/fineweb-edu-llama2

Cost: 9.22e20 FLOPs; 3249 v5e chip-hours at 40% MFU (13 hours of v5e:16x16), or 647 H100-hours. A v5e
chip has 2 windows of a batch. A node of 8 H200: --config.mesh.fsdp=8. Does it fit?
  python -m pe_lab.plan --config=configs/drope_llama2.py --topology=v5e:16x16

Expected (Table 3), LongBench:
  Llama2-7B     MultiFieldQA   MuSiQue   GovReport   average
  RoPE                 17.26     10.43       32.41     20.03
  RoPE-NTK             21.81     10.91       32.91     21.88
  YaRN                 23.13      7.65       26.65     19.14
  DroPE                25.90     12.88       39.47     26.08

The paper gives only the 20B tokens. The settings are those of a run of 5,000 steps in its public code, without
QK-norm: T = 4096, batch 512, learning rate 1e-4 after 100 steps of warm-up, cosine, FineWeb-Edu; here 9,537 steps,
for 20B tokens. (Appendix D.3 calls 3e-4 the default of such runs; the code has that rate with QK-norm.) Left open,
and decided here: where the cosine ends (0), AdamW's constants (Table 4's), gradient clipping (1.0). The code appends
EOS to a document and lets attention cross it, as here (segments=False).
"""

from ml_collections import ConfigDict

from pe_lab.model import preset
from pe_lab.positional import NoPE
from pe_lab.recipes import AUTO, phase, recipe_arguments


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: from=CHECKPOINT,data=DIR."""
    arguments = recipe_arguments(arg, data="data/fineweb-edu-llama2", **{"from": "runs/llama2_7b"})

    config = ConfigDict()
    config.name = "drope_llama2"
    config.model = preset("llama2_7b", **AUTO)
    config.data = dict(prepared=arguments["data"], segments=False)
    config.mesh = dict(data=-1, fsdp=64)
    adamw = dict(schedule="cosine", b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.phases = [
        phase(
            name="recalibrate",
            steps=9_537,  # 20.0B tokens
            positional=NoPE(),
            init_from=arguments["from"],
            sequence_length=4096,
            batch_size=512,
            accumulate="auto",
            optimizer=dict(learning_rate=1e-4, warmup_steps=100, **adamw),
        )
    ]
    config.checkpoint = dict(every_steps=500)
    config.log = dict(every_steps=10)
    config.evaluation = dict(factors=[1, 2, 4], options=dict(tokens=2**20, fit_tokens=2**18))

    config.notes = dict(
        paper="DroPE, Table 3: Llama2-7B recalibrated on 20B tokens",
        command="python -m pe_lab.train --config=configs/drope_llama2.py" + (f":{arg}" if arg else ""),
        cost="3249 v5e chip-hours at 40% MFU",
        expected="LongBench MultiFieldQA / MuSiQue / GovReport 25.90 / 12.88 / 39.47",
    )
    return config

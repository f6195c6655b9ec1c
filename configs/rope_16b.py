"""RoPE from scratch, 16K steps: the baseline that DroPE must match in context and beat beyond it.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix
C.1 and the left column of Table 4: a 494M decoder in the shape of Qwen2-0.5B (without attention bias) on
16.8B tokens of FineWeb, T = 1024, batch 1024. Reproduces the row RoPE of Tables 1 and 6, and with
pe_lab.evaluate those of PI, RoPE-NTK and YaRN.

Prepare (30M documents are about 20B tokens; the tokenizer is Qwen2's, huggingface.co/Qwen/Qwen2-0.5B):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:qwen2/tokenizer.json --limit-documents=30000000 --out=data/fineweb-qwen2

Train:
  python -m pe_lab.train --config=configs/rope_16b.py
Checkpoints 14000 and 16000 remain: drope_16b can start from the first (`:from=`).

Cost: 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours. There a chip
takes 4 windows of a batch. 8 GPUs would take 128 each: cut the batch up with
--config.phases.0.accumulate=16. On fewer than 8 chips, also --config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/rope_16b.py --topology=v5e:16x16

Expected (Tables 1 and 6): validation perplexity 21.72; needles at twice the training length, multi-query /
multi-key / multi-value: 0 / 0 / 0, PI 0 / 0 / 0, RoPE-NTK 21.1 / 19.4 / 16.5, YaRN 17.8 / 0.5 / 14.6.

The paper leaves open, and decided here: where the cosine ends (0), gradient clipping (1.0), which part of
FineWeb (any), the norm's epsilon (Qwen2's 1e-6). Its code appends EOS to a document and lets attention
cross it: so do we (segments=False). Ours alone: the output projections start smaller, by 1 / sqrt(2 x
layers).
"""

from ml_collections import ConfigDict

from pe_lab.config import UserError
from pe_lab.positional import Rope


def get_config(arg: str = "") -> ConfigDict:
    """Takes no argument."""
    if arg:
        raise UserError(f"configs/rope_16b.py takes no argument, and got '{arg}'.")

    config = ConfigDict()
    config.name = "rope_16b"
    config.seed = 0
    config.model = dict(
        vocab_size=151936,  # Qwen2's 151,646 tokens, padded
        layers=24,
        d_model=896,
        d_ff=4864,
        heads=14,
        kv_heads=2,
        head_dim=64,
        qk_norm=False,
        attention_bias=False,
        tie_embeddings=True,
        norm_epsilon=1e-6,
        dtype="bfloat16",
        remat="dots",
        loss_chunks=8,  # 1 saves 9% of the arithmetic where 2.5 GB a chip are to spare
    )
    config.data = dict(prepared="data/fineweb-qwen2", segments=False)
    config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^7 * 7

    pretrain = dict(
        name="pretrain",
        steps=16_000,  # 16.8B tokens
        positional=Rope(base=1_000_000.0),
        sequence_length=1024,
        batch_size=1024,
        optimizer=dict(
            learning_rate=3e-4,
            warmup_steps=520,
            schedule="cosine",
            b1=0.9,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
    )
    config.phases = [pretrain]
    config.checkpoint = dict(every_steps=2000, keep=2)  # 14000, for drope_16b, and 16000 remain
    config.log = dict(every_steps=10, validate_every_steps=500, validation_batches=8)
    config.evaluation = dict(tokens=2**20, fit_tokens=2**18)

    config.notes = dict(
        paper="DroPE, Tables 1, 4 and 6: 494M, 16K steps of RoPE",
        command="python -m pe_lab.train --config=configs/rope_16b.py",
        cost="191 v5e chip-hours at 40% MFU",
        expected="validation perplexity 21.72; needles at 2x 0 / 0 / 0 (multi-query / key / value)",
    )
    return config

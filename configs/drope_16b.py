"""DroPE from scratch: 14K steps with RoPE, then 2K without any positional encoding, at no extra cost.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix
C.1 and the left column of Table 4: a 494M decoder in the shape of Qwen2-0.5B (without attention bias) on
16.8B tokens of FineWeb, T = 1024, batch 1024. Reproduces the rows DroPE of Table 1 and DroPE @ 14K of Table
6. rope_16b, nope_16b and alibi_16b are its baselines, on the same budget.

Prepare (30M documents are about 20B tokens; the tokenizer is Qwen2's, huggingface.co/Qwen/Qwen2-0.5B):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:qwen2/tokenizer.json --limit-documents=30000000 --out=data/fineweb-qwen2

Train, whole, or from step 14K of a finished rope_16b:
  python -m pe_lab.train --config=configs/drope_16b.py
  python -m pe_lab.train --config=configs/drope_16b.py:from=runs/rope_16b/pretrain/checkpoints/14000

Cost: 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours. There a chip
takes 4 windows of a batch and needs 3.8 of its 16 GiB. 8 GPUs would take 128 each: cut the batch up with
--config.phases.0.accumulate=16 --config.phases.1.accumulate=16. On fewer than 8 chips, also
--config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/drope_16b.py --topology=v5e:16x16

Expected (Tables 1 and 6): validation perplexity 21.73, against 21.72 for RoPE and 23.77 for NoPE; needles
at twice the training length, multi-query / multi-key / multi-value, 28.0 / 41.6 / 23.3 (logits scaled by 1
+ 0.412 ln 2).

The paper leaves open, and decided here: whether the 14K steps had a cosine of their own (yes; `from=` takes
them out of a cosine of 16K), where the cosine ends (0), gradient clipping (1.0), which part of FineWeb
(any), the norm's epsilon (Qwen2's 1e-6). Its code appends EOS to a document and lets attention cross it: so
do we (segments=False). Ours alone: the output projections start smaller, by 1 / sqrt(2 x layers).
"""

from ml_collections import ConfigDict

from pe_lab.config import UserError
from pe_lab.positional import NoPE, Rope


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: "" for both phases, `from=CHECKPOINT` for the second alone, from a RoPE checkpoint."""
    key, _, checkpoint = arg.partition("=")
    if arg and (key != "from" or not checkpoint):
        raise UserError(f"configs/drope_16b.py knows no '{arg}'; it takes from=CHECKPOINT, or nothing.")

    config = ConfigDict()
    config.name = "drope_16b_branch" if checkpoint else "drope_16b"
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
    # A branch reads on in another order: rope_16b has read the beginning of this one.
    config.data = dict(prepared="data/fineweb-qwen2", segments=False, seed=1 if checkpoint else 0)
    config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^7 * 7

    adamw = dict(b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0, schedule="cosine")
    pretrain = dict(
        name="pretrain",
        steps=14_000,  # 14.7B tokens
        positional=Rope(base=1_000_000.0),
        sequence_length=1024,
        batch_size=1024,
        optimizer=dict(learning_rate=3e-4, warmup_steps=520, **adamw),
    )
    recalibrate = dict(
        name="recalibrate",
        steps=2_000,  # 2.1B tokens
        positional=NoPE(),
        init_from=checkpoint,
        sequence_length=1024,
        batch_size=1024,
        optimizer=dict(learning_rate=1e-3, warmup_steps=70, **adamw),
    )
    config.phases = [recalibrate] if checkpoint else [pretrain, recalibrate]
    config.checkpoint = dict(every_steps=2000, keep=2)
    config.log = dict(every_steps=10, validate_every_steps=500, validation_batches=8)
    config.evaluation = dict(tokens=2**20, fit_tokens=2**18)

    branch = f":from={checkpoint}" if checkpoint else ""
    config.notes = dict(
        paper="DroPE, Tables 1, 4 and 6: 494M, 14K steps of RoPE and 2K without",
        command=f"python -m pe_lab.train --config=configs/drope_16b.py{branch}",
        cost="24 v5e chip-hours at 40% MFU" if checkpoint else "191 v5e chip-hours at 40% MFU",
        expected="validation perplexity 21.73; needles at 2x 28.0 / 41.6 / 23.3 (multi-query / key / value)",
    )
    return config

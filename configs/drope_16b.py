"""DroPE from scratch: 14K steps with RoPE, then 2K without any positional encoding, at no extra cost.

Paper: "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (DroPE), appendix
C.1 and the left column of Table 4: a 494M decoder in the shape of Qwen2-0.5B (without attention bias) on
16.8B tokens of FineWeb, T = 1024, batch 1024. Reproduces the row DroPE of Table 1 and all of Table 6. The
other rows of Table 1 are configs/table1.py, on the same budget.

Arguments: drop=14000 (or 0, 8000, 16000: the step at which the encoding goes, of 16K), from=CHECKPOINT.

Prepare (30M documents are about 20B tokens; the tokenizer is Qwen2's, huggingface.co/Qwen/Qwen2-0.5B):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/100BT/*.parquet' \\
      --tokenizer=hf:qwen2/tokenizer.json --limit-documents=30000000 --out=data/fineweb-qwen2

Train, whole, or from step 14K of a finished RoPE run; and the other three columns of Table 6:
  python -m pe_lab.train --config=configs/drope_16b.py
  python -m pe_lab.train --config=configs/drope_16b.py:from=runs/table1_rope/pretrain/checkpoints/14000
  python -m pe_lab.train --config=configs/drope_16b.py:drop=0
  python -m pe_lab.train --config=configs/drope_16b.py:drop=8000
  python -m pe_lab.train --config=configs/drope_16b.py:drop=16000

Cost: 5.42e19 FLOPs; 191 v5e chip-hours at 40% MFU (45 minutes of v5e:16x16), or 38 H100-hours; from 14K on,
24 v5e chip-hours, and from 8K on, 95. There a chip takes 4 windows of a batch and needs 3.8 of its 16 GiB. 8
GPUs would take 128 each: cut the batch up with --config.phases.0.accumulate=16
--config.phases.1.accumulate=16. On fewer than 8 chips, also --config.mesh.fsdp=1. Does it fit?
  python -m pe_lab.plan --config=configs/drope_16b.py --topology=v5e:16x16

Expected (Table 1): needles at twice the training length, multi-query / multi-key / multi-value, 28.0 / 41.6 /
23.3 (logits scaled by 1 + 0.412 ln 2). Validation perplexity (Table 6):
  dropped at                0 (NoPE)   8000   14000   16000 (RoPE)
  validation perplexity        23.77  22.42   21.73          21.72

The paper leaves open, and decided here: whether the steps before the drop had a cosine of their own (yes;
`from=` takes them out of a cosine of 16K), whether all that follow a drop were trained as those after 14K
were (yes), where the cosine ends (0), gradient clipping (1.0), which part of FineWeb (any), the norm's
epsilon (Qwen2's 1e-6). Its code appends EOS to a document and lets attention cross it: so do we
(segments=False). Ours alone: the output projections start smaller, by 1 / sqrt(2 x layers).
"""

from ml_collections import ConfigDict

from pe_lab.errors import UserError
from pe_lab.positional import NoPE, Rope
from pe_lab.recipes import recipe_arguments

PERPLEXITY = {14_000: "21.73", 0: "23.77", 8_000: "22.42", 16_000: "21.72"}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: drop=STEP; with from=CHECKPOINT only what follows the drop, from a RoPE checkpoint of that step."""
    arguments = recipe_arguments(arg, drop=tuple(map(str, PERPLEXITY)), **{"from": ""})
    drop, checkpoint = int(arguments["drop"]), arguments["from"]
    if checkpoint and drop in (0, 16_000):
        raise UserError(f"from={checkpoint} is what follows a drop, and drop={drop} drops nothing on the way.")

    config = ConfigDict()
    config.name = "drope_16b" + (f"_drop{drop}" if drop != 14_000 else "") + ("_branch" if checkpoint else "")
    config.seed = 0
    config.model = dict(
        vocab_size=151936,  # Qwen2's 151,646 tokens, padded
        layers=24,
        d_model=896,
        d_ff=4864,
        heads=14,
        kv_heads=2,
        head_dim=64,
        qk_norm="none",
        attention_bias=False,
        tie_embeddings=True,
        norm_epsilon=1e-6,
        dtype="bfloat16",
        remat="dots",
        loss_chunks=8,  # 1 saves 9% of the arithmetic where 2.5 GB a chip are to spare
    )
    # A branch reads on in another order: the RoPE run has read the beginning of this one.
    config.data = dict(prepared="data/fineweb-qwen2", segments=False, seed=1 if checkpoint else 0)
    config.mesh = dict(data=-1, fsdp=8)  # fsdp divides d_model = 2^7 * 7

    adamw = dict(b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0, schedule="cosine")
    pretrain = dict(
        name="pretrain",
        steps=drop or 16_000,  # 14.7B tokens
        positional=Rope(base=1_000_000.0) if drop else NoPE(),
        sequence_length=1024,
        batch_size=1024,
        optimizer=dict(learning_rate=3e-4, warmup_steps=520, **adamw),
    )
    recalibrate = dict(
        name="recalibrate",
        steps=16_000 - drop,  # 2.1B tokens
        positional=NoPE(),
        init_from=checkpoint,
        sequence_length=1024,
        batch_size=1024,
        optimizer=dict(learning_rate=1e-3, warmup_steps=70, **adamw),
    )
    if drop in (0, 16_000):
        config.phases = [pretrain]
    else:
        config.phases = [recalibrate] if checkpoint else [pretrain, recalibrate]
    config.checkpoint = dict(every_steps=2000, keep=2)
    config.log = dict(every_steps=10, validate_every_steps=500, validation_batches=8)
    config.evaluation = dict(tokens=2**20, fit_tokens=2**18)

    hours = {14_000: 24, 8_000: 95}[drop] if checkpoint else 191
    needles = "; needles at 2x 28.0 / 41.6 / 23.3 (multi-query / key / value)" if drop == 14_000 else ""
    config.notes = dict(
        paper=f"DroPE, Tables 1, 4 and 6: 494M, RoPE dropped at step {drop:,} of 16,000",
        command="python -m pe_lab.train --config=configs/drope_16b.py" + (f":{arg}" if arg else ""),
        cost=f"{hours} v5e chip-hours at 40% MFU",
        expected=f"validation perplexity {PERPLEXITY[drop]}{needles}",
    )
    return config

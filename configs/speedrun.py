"""GPT-2 small (124M active parameters) to a validation loss of 3.28 on FineWeb, with Muon or AdamW.

Paper: none; the task of modded-nanogpt (github.com/KellerJordan/modded-nanogpt, commit f411b3d) after llm.c's
reproduction of GPT-2. The settings are those of its benchmark of optimizers, records/track_3_optimization, whose
baseline is this model but for the parts below: 512 windows of 1,024 tokens a step, Muon at 0.025 with weight decay
0.05, AdamW for the rest, no warm-up, linear decay over the last 70% of the steps. Muon: Jordan et al. 2024
(kellerjordan.github.io/posts/muon); its coefficients: Polar Express (arXiv:2505.16932).

Arguments: optimizer=muon (or adamw), positional=rope (or nope, p_rope, partial_rope, alibi, rnope_swa), size=124m
(or laptop), data=DIR.

Prepare (GPT-2's tokenizer is in huggingface.co/openai-community/gpt2; 6M documents are about 4B tokens):
  python -m pe_lab.prepare --source=parquet:'fineweb/sample/10BT/*.parquet' \\
      --tokenizer=hf:gpt2/tokenizer.json --limit-documents=6000000 --out=data/fineweb-gpt2

Train:
  python -m pe_lab.train --config=configs/speedrun.py
  python -m pe_lab.train --config=configs/speedrun.py:positional=nope
  python -m pe_lab.train --config=configs/speedrun.py:positional=p_rope
  python -m pe_lab.train --config=configs/speedrun.py:optimizer=adamw
  python -m pe_lab.train --config=configs/speedrun.py:optimizer=muon,size=laptop
  python -m pe_lab.train --config=configs/speedrun.py:optimizer=adamw,size=laptop

Cost at 40% MFU (2.0B tokens with Muon, 3.3B with AdamW):
  optimizer   steps   tokens   v5e chip-hours     8 x H100
  muon        3,750     2.0B              5.9    9 minutes
  adamw       6,250     3.3B              9.9   15 minutes
1.68e18 FLOPs with Muon, of which its Newton-Schulz iteration is 0.3%. Does it fit?
  python -m pe_lab.plan --config=configs/speedrun.py --topology=h100:8
  python -m pe_lab.plan --config=configs/speedrun.py --topology=v5e:4x4

Expected: 3.28, which is the definition of the task. The baseline needs 3,250 to 3,375 steps with Muon, and 5,625
with an AdamW that its authors call undertuned. Nobody has trained this recipe yet: the steps here are those and
11 to 15% for the parts that it lacks.

Taken: QK-norm, RMSNorm, RoPE, ReLU squared without a gate, heads of 128 channels, an untied head, GPT-2's tokenizer
padded to 50,304, trapezoidal schedule, momentum that rises from 0.85 to 0.95 in 300 steps, AdamW's betas (0.8, 0.95)
beside Muon, one matrix per head of queries, keys and values (the record of today takes pairs of heads for queries and
keys). positional=partial_rope is the baseline's own encoding: half of the channels, base 1024.
Not taken: biases of all projections and of the head, RMSNorm after the embedding (embedding_multiplier stands in for
it, at the same rate in units of the stream), output projections that start at 0 (scaled_residual_init), logit soft-cap,
a softmax scale of 0.12 (queries and keys have learned scales here), a weight decay of 0.001 on what AdamW has beside
Muon; and of the main track: value embeddings, skip connections, per-layer scalars, windows that grow (FlexAttention),
FP8, NorMuon, batch and length schedules, multi-token prediction.
AdamW has the settings in the log of that benchmark's result 2 (5,625 steps): 0.0015, weight decay 0.1 and betas (0.9,
0.95) for matrices, 0.3, 1/320 and 0.01 without decay for embedding, head and vectors, 250 steps of warm-up; but for the
betas (0.8, 0.95) of the latter. The clipping at a norm of 1 of both is pe_lab's default.

size=laptop: 0.9M parameters on the standard library's source code, minutes on 2 CPU cores, at 0.005, the rate that
benchmarks/optimizers.py found for each optimizer. That script counts the steps to a fixed loss.
"""

from ml_collections import ConfigDict

from pe_lab.positional import Alibi, NoPE, PartialRope, Rope, rnope_swa
from pe_lab.recipes import AUTO, phase, recipe_arguments

STEPS = {"muon": 3750, "adamw": 6250}
HOURS = {"muon": "5.9", "adamw": "9.9"}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: optimizer=muon,positional=rope, or others of the docstring's."""
    positional = ("rope", "nope", "p_rope", "partial_rope", "alibi", "rnope_swa")
    arguments = recipe_arguments(
        arg, optimizer=("muon", "adamw"), positional=positional, size=("124m", "laptop"), data=""
    )
    name, encoding, laptop = arguments["optimizer"], arguments["positional"], arguments["size"] == "laptop"
    base, window = (200.0, 32) if laptop else (10_000.0, 256)

    config = ConfigDict()
    config.name = f"speedrun_{name}_{encoding}" + ("_laptop" if laptop else "")
    shape = dict(activation="relu2", gated_mlp=False, qk_norm="head", tie_embeddings=False)
    if laptop:
        small = dict(layers=4, d_model=128, d_ff=512, heads=4, kv_heads=4, init_std=0.05, dtype="float32", scan=False)
        config.model = small | shape | dict(embedding_multiplier=128**0.5)
        config.data = dict(
            sources=[dict(source="stdlib")], tokenizer="sentencepiece:train:512", validation_fraction=0.04
        )
        steps = 600
        optimizer = dict(name=name, learning_rate=0.005, warmup_steps=20, schedule="wsd", decay_fraction=0.5)
        optimizer["muon"] = dict(momentum_warmup_steps=50, dtype="float32")
        windows = dict(sequence_length=128, batch_size=16)
    else:
        large = dict(layers=12, d_model=768, d_ff=3072, heads=6, kv_heads=6, vocab_size=50_304)
        config.model = large | shape | AUTO | dict(embedding_multiplier=768**0.5)
        config.data = dict(prepared=arguments["data"] or "data/fineweb-gpt2", segments=False)
        steps = STEPS[name]
        optimizer = dict(name=name, schedule="wsd", decay_fraction=0.7, clip_norm=1.0)
        if name == "muon":
            # The baseline's rates: 0.7 for embeddings of size 1 (0.02 sqrt(768) = 0.55 here), 0.004, 0.015.
            optimizer |= dict(learning_rate=0.025, warmup_steps=0, weight_decay=0.05, decay_embeddings=False)
            optimizer |= dict(embedding_multiplier=0.56, head_multiplier=0.16, vector_multiplier=0.6)
            optimizer |= dict(b1=0.8, b2=0.95, epsilon=1e-10, muon=dict(scale="spectral"))
        else:
            # In the same units: 0.3 for embeddings of size 1, 1/320, 0.01.
            optimizer |= dict(learning_rate=0.0015, warmup_steps=250, weight_decay=0.1, decay_embeddings=False)
            optimizer |= dict(embedding_multiplier=4.0, head_multiplier=2.08, vector_multiplier=6.67)
            optimizer |= dict(b1=0.9, b2=0.95, epsilon=1e-10)
        windows = dict(sequence_length=1024, batch_size=512, accumulate="auto")
    config.mesh = dict(data=-1)
    config.phases = [
        phase(
            name="pretrain",
            steps=steps,
            positional={
                "rope": Rope(base=base),
                "nope": NoPE(),
                "p_rope": Rope(base=base, fraction=0.75),
                "partial_rope": PartialRope(base=base if laptop else 1024.0, fraction=0.5),
                "alibi": Alibi(),
                "rnope_swa": rnope_swa(window, base=base),
            }[encoding],
            optimizer=optimizer,
            **windows,
        )
    ]
    config.checkpoint = dict(every_steps=200 if laptop else 625)
    config.log = dict(every_steps=10, validate_every_steps=20 if laptop else 125, validation_batches=8)
    config.notes = dict(
        paper=f"modded-nanogpt, benchmark of optimizers: {name}, {encoding}" + (", small" if laptop else ""),
        command="python -m pe_lab.train --config=configs/speedrun.py" + (f":{arg}" if arg else ""),
        cost="about 2 minutes on 2 CPU cores" if laptop else f"{HOURS[name]} v5e chip-hours at 40% MFU",
        expected="docs/recipes.md, Optimizers" if laptop else "validation loss 3.28; not trained yet",
    )
    return config

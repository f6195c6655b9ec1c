"""A model of 0.5M parameters on English prose and needles, on which claims test the papers' claims in minutes.

Papers: DroPE (Gelberg et al. 2025), p-RoPE (Barbero et al. 2024), Partial RoPE (Khan et al. 2026), DoPE (Xiong et al.
2025). claims/ has the claims, docs/claims.md what came of them.

Train:
  python -m pe_lab.train --config=configs/claims.py:method=rope
  python -m pe_lab.train --config=configs/claims.py:method=nope,from=runs/claims_rope
  python -m pe_lab.claims drop_needles --jobs=2

Arguments: method=rope, or nope, alibi, rnope_swa, swan or another one of `encoding`; kept, the encodings of the
checkpoint; or a text as --positional of pe_lab.surgery takes it. from=RUN recalibrates a checkpoint, with at=STEP an
earlier one of its pretraining. layers=8, steps, rate, warmup, qk_norm=none,
qk_norm_init=matched (the paper's is ones: an added norm's scale starts at 1; the committed results have matched),
needles=0.25 (their share of the sequences). distill and transition are keys of the phase, joined by semicolons:
distill='logits=1;hidden=1'. size=laptop (or quick, which reads no prose).

Cost: 4.5 MFLOPs a token with 8 layers, 20 TFLOPs a pretraining: up to 25 minutes on one CPU core.
Expected: docs/claims.md.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from pe_lab.positional import Alibi, NoPE, PartialRope, Rope, rnope_swa, smollm3, swan
from pe_lab.recipes import phase, recipe_arguments

LENGTH = 256
# The share of pairs that rotate less than once in a window is the one that base 10,000 has at 2,048 tokens.
BASE = 500.0
PRETRAIN, RECALIBRATE = 4_000, 1_000
# Windows of 64 tokens first: in them needles are learned in 250 steps, where 8 layers at 128 tokens had found none
# after 1,500 (docs/log.md).
SHORT, SHORT_STEPS = 64, 500
TOKENS = 1024  # a step
WINDOW = 64  # of the layers with windows, in RNoPE-SWA and SWAN: a quarter, as 256 of 1,024


def encoding(method: str) -> Any:
    """The `positional` of a method, or of a text."""
    known = {
        "rope": Rope(base=BASE),
        "nope": NoPE(),
        "p_rope_75": Rope(base=BASE, fraction=0.75),
        "p_rope_25": Rope(base=BASE, fraction=0.25),
        "alibi": Alibi(),
        # 4 of 32 channels, which are 2 pairs: a tenth would be one. The paper's tenth is 3, 6 or 13 pairs.
        "partial_rope_10": PartialRope(base=BASE, fraction=0.125),
        "rnope_swa": rnope_swa(WINDOW, base=BASE),
        "swan": swan(WINDOW, LENGTH, base=BASE),
        "smollm3": smollm3(base=BASE),
        "ssmax": f"rope:base={BASE:g}/with=ssmax",
    }
    return known.get(method, method)


def keys_of(text: str) -> dict[str, Any]:
    """The keys of `a=1;b=x`."""
    pairs = (item.partition("=")[::2] for item in text.split(";") if item)
    return {key: float(value) if value.replace(".", "", 1).isdigit() else value for key, value in pairs}


def get_config(arg: str = "") -> ConfigDict:
    """`arg`: method=rope,layers=8, or others of the docstring's."""
    arguments = recipe_arguments(
        arg,
        method="rope",
        layers="8",
        steps="0",
        rate="3e-3",
        warmup="0",
        qk_norm=("", "none", "head"),
        qk_norm_init=("matched", "ones"),
        needles="0.25",
        distill="none",
        transition="none",
        at="",
        size=("laptop", "quick"),
        **{"from": "random"},
    )
    start, quick = arguments["from"], arguments["size"] == "quick"
    steps = int(arguments["steps"]) or (PRETRAIN if start == "random" else RECALIBRATE)
    steps = min(steps, 20) if quick else steps
    share = float(arguments["needles"])

    config = ConfigDict()
    config.name = f"claims_{''.join(c if c.isalnum() else '_' for c in arguments['method'])}"
    config.notes = dict(
        paper="the claims of docs/claims.md at the scale of a laptop",
        command="python -m pe_lab.train --config=configs/claims.py" + (f":{arg}" if arg else ""),
        cost="up to 25 minutes on a CPU core with 8 layers and 4,500 steps",
        expected="docs/claims.md",
    )
    # The usual init_std of 0.02 suits widths near 1000, where it is about 1 / sqrt(width).
    config.model = dict(
        layers=int(arguments["layers"]),
        d_model=64,
        d_ff=192,
        heads=2,
        kv_heads=2,
        scaled_residual_init=False,
        qk_norm="none",
        init_std=0.1,
        dtype="float32",
        scan=False,
    )
    needles = dict(facts="symbol", pairs=8, queries=8, keys=8, values=8, filler_symbols=16)
    needles |= dict(answer_weight=8.0, filler_weight=0.02)
    prose = "stdlib" if quick else "prose"
    config.data = dict(
        sources=[
            dict(source=prose, name="prose", weight=1 - share),
            dict(source="needles", weight=share, options=needles),
        ],
        tokenizer="sentencepiece:train:1024",
    )
    made = phase(
        name="pretrain" if start == "random" else "recalibrate",
        steps=steps,
        positional=encoding(arguments["method"]),
        init_from=f"{start}/pretrain/checkpoints/{arguments['at']}" if arguments["at"] and not quick else start,
        sequence_length=LENGTH,
        batch_size=TOKENS // LENGTH,
        qk_norm=arguments["qk_norm"],
        qk_norm_init=arguments["qk_norm_init"],
        optimizer=dict(
            learning_rate=float(arguments["rate"]),
            warmup_steps=int(arguments["warmup"]) or max(1, steps // 50),
            weight_decay=0.05,
        ),
    )
    if arguments["method"] == "kept":
        del made["positional"]
    for key in ("distill", "transition"):
        if arguments[key] != "none":
            made[key] = keys_of(arguments[key])
    config.mesh = dict(data=1)  # a run is one of many, on a device of its own
    config.phases = [made]
    if start == "random":
        made.init_from = ""
        short = phase(
            name="short",
            steps=min(SHORT_STEPS, steps),
            positional=encoding(arguments["method"]),
            weights={} if quick else {"prose": 0.5, "needles": 0.5},
            sequence_length=SHORT,
            batch_size=TOKENS // SHORT,
            optimizer=dict(
                learning_rate=float(arguments["rate"]), warmup_steps=10, schedule="constant", weight_decay=0.05
            ),
        )
        config.phases = [short, made]
    quarters = [steps * n // 4 for n in (1, 2, 3)] if start == "random" and not quick else []
    config.checkpoint = dict(every_steps=max(steps // 2, 1), milestones=quarters, keep=1)
    config.log = dict(every_steps=10, validate_every_steps=max(steps // 5, 1), validation_batches=32, trackers=[])
    config.evaluation = dict(factors=[1, 2, 4, 8], options=dict(tokens=32768, fit_tokens=8192, windows=64))
    if quick:
        config.log.validation_batches = 2
        config.evaluation = dict(factors=[1, 2, 4, 8], options=dict(tokens=512, fit_tokens=512, windows=2))
    return config

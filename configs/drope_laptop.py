"""DroPE on a laptop: pretrain with RoPE, drop it, recalibrate."""

from ml_collections import ConfigDict

from pe_lab.positional import NoPE, Rope


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.name = "drope_laptop"
    config.model = dict(
        layers=3, d_model=64, d_ff=256, heads=4, kv_heads=4, qk_norm=True, dtype="float32", scan=False,
        norm_epsilon=1e-6,
    )
    needles = dict(pairs=4, queries=4, keys=64, values=64)
    config.data = dict(
        sources=[dict(source="stdlib", weight=0.5), dict(source="needles", weight=0.5, options=needles)],
        tokenizer="sentencepiece:train:512",
        cache_dir="data",
    )
    adamw = dict(learning_rate=2e-3, warmup_steps=50, weight_decay=0.1)
    length = 64
    config.phases = [
        dict(name="pretrain", steps=300, positional=Rope(base=10000.0), sequence_length=length, batch_size=32, optimizer=adamw),
        dict(name="recalibrate", steps=100, positional=NoPE(), sequence_length=length, batch_size=32, optimizer=adamw),
    ]
    config.log = dict(every_steps=10, validate_every_steps=100, validation_batches=8)
    config.checkpoint = dict(every_steps=100)
    return config

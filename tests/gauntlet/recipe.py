"""The recipe of the gauntlet: 13,000 parameters, two phases of some dozens of steps, a checkpoint every five."""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.name = "gauntlet"
    config.model = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, qk_norm="head", dtype="float32")
    config.data = dict(prepared="data")
    common = dict(sequence_length=16, batch_size=8, optimizer=dict(learning_rate=1e-2, warmup_steps=2))
    config.phases = [
        dict(name="pretrain", steps=30, positional="rope", **common),
        dict(name="recalibrate", steps=20, positional="nope", **common),
    ]
    config.log = dict(every_steps=1, validate_every_steps=10, validation_batches=4)
    config.checkpoint = dict(every_steps=5, keep=3)
    return config

"""The decoder: init and pure functions of parameters, tokens and a schedule."""

from pe_lab.model.decoder import REMAT_POLICIES, Model, Params, complete
from pe_lab.model.flops import Flops, train_flops_per_token
from pe_lab.model.loss import cross_entropy
from pe_lab.model.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "REMAT_POLICIES",
    "Flops",
    "Model",
    "Params",
    "complete",
    "cross_entropy",
    "preset",
    "train_flops_per_token",
]

"""The decoder: init and pure functions of parameters, tokens and a schedule."""

from pe_lab.model.decoder import REMAT_POLICIES, Model, Params, complete
from pe_lab.model.flops import Flops, train_flops_per_token
from pe_lab.model.loss import cross_entropy

__all__ = ["REMAT_POLICIES", "Flops", "Model", "Params", "complete", "cross_entropy", "train_flops_per_token"]

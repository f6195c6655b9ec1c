"""A mixture of experts in the place of the MLP: `--config.model.feed_forward=experts`.

It returns its update, two losses that training adds, and a metric that the log shows. Every expert computes every
token, which is right and not fast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pe_lab.config import ModelConfig
from pe_lab.model import Auxiliary, normal, register_feed_forward

EXPERTS, CHOSEN = 4, 2


@register_feed_forward("experts")
class Experts(nnx.Module):
    """down(relu(up x)) of the two experts with the highest logits of a router, weighted by their softmax.

    `router_z` keeps the router's logits small (Zoph et al. 2022, eq. 5, times 0.001); `load_balance` is 0.01 where all
    experts get as many tokens, and more elsewhere (Fedus et al. 2021, eq. 4).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F, std = config.d_model, config.d_ff, config.init_std
        self.router = normal(rngs, (D, EXPERTS), std, ("embed", None))
        self.up = normal(rngs, (EXPERTS, D, F), std, (None, "embed", "mlp"))
        self.down = normal(rngs, (EXPERTS, F, D), std, (None, "mlp", "embed"))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Auxiliary]:
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), self.router[...])
        shares = jax.nn.softmax(logits)
        highest, chosen = jax.lax.top_k(shares, CHOSEN)
        of_expert = jax.nn.one_hot(chosen, EXPERTS)  # [B, T, CHOSEN, EXPERTS]
        gates = jnp.einsum("btc,btce->bte", highest / highest.sum(-1, keepdims=True), of_expert)
        hidden = jax.nn.relu(jnp.einsum("btd,edf->btef", x, self.up[...].astype(x.dtype)))
        update = jnp.einsum("btef,efd,bte->btd", hidden, self.down[...].astype(x.dtype), gates.astype(x.dtype))

        load = of_expert.sum(2).mean((0, 1)) / CHOSEN  # the share of the tokens that each expert gets
        losses = {
            "router_z": 1e-3 * jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(),
            "load_balance": 1e-2 * EXPERTS * (load * shares.mean((0, 1))).sum(),
        }
        return update, Auxiliary(losses, {"busiest_expert": load.max()})

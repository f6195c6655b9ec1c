"""What a head's logits become under a schedule, for the tests of head edits and of DoPE."""

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.positional import HeadEdit, Layer, Rope, build_schedule, rotate, rotation_tables

N, H, G, K = 4, 6, 3, 16  # groups of query heads: (0, 1), (2, 3), (4, 5)
R = K // 2


def schedule_of(described, length=None):
    return build_schedule(described, H, G, K, length)


def edited(heads, to, encoding=Rope()):  # noqa: B008
    """One layer, some of whose heads have something else."""
    return schedule_of([Layer(encoding, heads=(HeadEdit(tuple(heads), to),))])


@jax.jit
def head_scores(fixed_freq, gain, query, key, at):
    """[B, H]: logits of queries and keys [H, K], keys rotated per query head, at pairs of positions `at` [B, 2]."""
    cos, sin = rotation_tables(fixed_freq, gain, at)
    rotated = rotate(jnp.stack([query, key])[None].repeat(len(at), 0), cos, sin)
    return jnp.einsum("bhk,bhk->bh", rotated[:, 0], rotated[:, 1])


QUERY, KEY = np.random.default_rng(0).standard_normal((2, H, K)).astype(np.float32)
AT = np.array([[9, 2], [500, 0], [3, 3], [4096, 4000]], np.int32)


def scores_of(schedule, layer=0):
    return np.asarray(head_scores(schedule.fixed_freq[layer], schedule.gain[layer], QUERY, KEY, AT))

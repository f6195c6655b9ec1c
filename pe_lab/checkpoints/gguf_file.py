"""A GGUF file of the llama family as a source; the `gguf` package dequantizes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families import FAMILIES, TensorTable
from pe_lab.checkpoints.rope_parameters import Rotary, nope_if_unrotated
from pe_lab.checkpoints.source import TensorSource, check_finite, listing
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError, excerpt
from pe_lab.model import complete
from pe_lab.positional import PI, Layer, Layout, LongRope, Rope, Scaling, Yarn
from pe_lab.storage.gguf_format import open_gguf

# GGUF's llama family. Queries and keys have the interleaved layout: llama.cpp's converter permutes them.
GGUF_LLAMA = TensorTable(
    {
        "token_embd": "token_embedder.embedding",
        "output_norm": "token_embedder.final_norm.scale",
        "output": "token_embedder.unembedding",
        "blk.{n}.attn_norm": "layers.attention_norm.scale",
        "blk.{n}.attn_q": "layers.attention.query",
        "blk.{n}.attn_k": "layers.attention.key",
        "blk.{n}.attn_v": "layers.attention.value",
        "blk.{n}.attn_output": "layers.attention.out",
        "blk.{n}.ffn_norm": "layers.mlp_norm.scale",
        "blk.{n}.ffn_gate": "layers.mlp.gate",
        "blk.{n}.ffn_up": "layers.mlp.up",
        "blk.{n}.ffn_down": "layers.mlp.down",
    }
)

# One divisor for each pair, which llama.cpp's converter writes for Llama 3.1's scaling and for LongRoPE.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Metadata keys that change the computation and that pe_lab does not support.
_REFUSED = (
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
)


class GgufSource(TensorSource):
    """A GGUF file of the llama family; `CheckpointError` if it is damaged, `UnsupportedError` for another family."""

    def __init__(self, path: Path):
        self.path = path
        self.display_name = f"gguf:{path}"
        # The vocabulary is read by the tokenizer only.
        opened = open_gguf(path, CheckpointError, lambda key: not key.startswith("tokenizer."))
        if "tokenizer.ggml.tokens" in opened.keys:  # a file may have weights alone
            self.tokenizer = self.display_name
        fields = opened.fields
        architecture = fields.get("general.architecture")
        if architecture != "llama":
            raise UnsupportedError(
                f"{path}: the architecture is '{architecture}'; pe_lab reads llama from GGUF. Of Hugging Face "
                f"directories it reads {', '.join(FAMILIES)}."
            )
        self._stored = tensors = opened.tensors
        self.model = _model(fields, tensors, str(path))
        # llama.cpp's converter interleaves the pairs of queries and keys.
        self._layout = Layout("interleaved")
        encoding, self.training_length = self._rope(fields)
        self.layers = (Layer(encoding),) * self.model.layers
        shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in ROPE_FACTORS}
        leftover = self.match(GGUF_LLAMA, shapes, "llama", "its metadata")
        if leftover:
            raise CheckpointError(f"{path} has {listing(leftover)}, which pe_lab does not know.")
        # Quantized tensors become float32.
        kinds = {tensor.kind for tensor in tensors.values()} - {"F32"}
        plain = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}
        self.dtype = np.dtype(plain[kinds.pop()] if len(kinds) == 1 and kinds <= set(plain) else np.float32)

    def _rope(self, fields: Mapping[str, Any]) -> tuple[Rotary, int]:
        """The encoding, and the training length before any scaling."""
        model = self.model

        def number(key: str, default: float) -> float:
            return _number(fields, key, str(self.path), default)

        def tokens(key: str, default: int) -> int:
            if not 1 <= (found := number(key, default)) < 2**31:
                raise CheckpointError(f"{self.path}: llama.{key} is {found:g}; it must be a number of tokens.")
            return int(found)

        length = tokens("context_length", 2048)
        base = number("rope.freq_base", 10000.0)
        rotated = number("rope.dimension_count", model.head_dim)
        if rotated != model.head_dim:
            raise UnsupportedError(f"{self.path}: {rotated} of {model.head_dim} channels rotate, which no llama does.")
        # llama.cpp divides by a factor without a type as well, and by its older name.
        kind = fields.get("llama.rope.scaling.type", "linear")
        factor = number("rope.scaling.factor", 0.0) or number("rope.scale_linear", 0.0) or 1.0
        original = tokens("rope.scaling.original_context_length", length)
        scaling: Scaling | None = None
        short, long = (self._factors(name) for name in ("rope_factors_short.weight", "rope_factors_long.weight"))
        shared = self._factors("rope_freqs.weight")
        gain = number("rope.scaling.attn_factor", 1.0)
        divided = kind != "none" and factor != 1
        if (shared and divided) or bool(short) != bool(long) or (gain != 1 and not short):
            tables = ", ".join(name for name in ROPE_FACTORS if name in self._stored) or "none"
            raise CheckpointError(
                f"{self.path}: its rope scaling is {kind} by {factor:g}, its attention factor {gain:g}, its tables "
                f"{tables}: an unknown combination."
            )
        if short and long:
            scaling = LongRope(short, long, original, max(1.0, length / original), gain)
            length = original
        elif shared:
            scaling = LongRope(shared, shared, original, 1.0, 1.0)
        elif kind == "linear" and factor != 1:
            scaling = PI(factor)
        elif kind == "yarn":
            betas = [number(f"rope.scaling.yarn_beta_{x}", y) for x, y in (("fast", 32.0), ("slow", 1.0))]
            if betas != [32, 1]:
                raise CheckpointError(
                    f"{self.path}: its yarn_beta_fast and yarn_beta_slow are {betas[0]:g} and {betas[1]:g}, which "
                    "llama.cpp ignores for a llama. Remove them, or import the model's Hugging Face directory."
                )
            scaling, length = Yarn(factor, original), original
        elif kind not in ("none", "linear", "longrope"):
            raise CheckpointError(
                f"{self.path}: rope scaling '{kind}' is unknown. Known: none, linear, yarn, longrope."
            )
        return nope_if_unrotated(Rope(base, 1.0, scaling), model.head_dim), length

    def _factors(self, name: str) -> tuple[float, ...]:
        if name not in self._stored:
            return ()
        return tuple(float(x) for x in check_finite(self._tensor(name), name, self.display_name).ravel())

    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        import gguf

        stored = self._stored[name]
        # A tensor of one axis is stored as one row, in BF16 as bytes.
        data = stored.data if rows == slice(None) or len(stored.shape) == 1 else stored.data[rows]
        kind = stored.kind
        if kind == "BF16":
            return np.ascontiguousarray(data).view(ml_dtypes.bfloat16).reshape(-1, *stored.shape[1:])
        if kind in ("F32", "F16", "F64"):
            return np.array(data)
        try:
            return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is {kind}, which gguf cannot dequantize ({error})."
            ) from None


def _number(fields: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A finite number of the metadata; `CheckpointError` if it is missing, or something else."""
    value = fields.get(f"llama.{key}", default)
    if not isinstance(value, int | float) or not abs(value) < math.inf:
        shown = excerpt(repr(value), 60)
        raise CheckpointError(f"{where}: its metadata lacks 'llama.{key}', or holds no number there: {shown}.")
    return value


def _model(fields: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelConfig:
    def number(key: str, default: float | None = None) -> int:
        return int(_number(fields, key, where, default))

    if fields.get("llama.expert_count"):
        raise UnsupportedError(f"{where} has a mixture of {fields['llama.expert_count']} experts, unknown to pe_lab.")
    for key in _REFUSED:
        if fields.get(f"llama.{key}"):
            raise UnsupportedError(f"{where}: llama.{key} is {fields[f'llama.{key}']}, which pe_lab does not support.")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{where} has no tensor 'token_embd.weight'.")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{where}: tensor 'token_embd.weight' is no matrix.")
    heads, width = number("attention.head_count"), number("embedding_length")
    if heads < 1:
        raise CheckpointError(f"{where}: llama.attention.head_count is {heads}; it must be positive.")
    biased = {name.removeprefix("blk.0.") for name in tensors if name.startswith("blk.0.") and name.endswith(".bias")}
    return complete(
        ModelConfig(
            vocab_size=tensors["token_embd.weight"].shape[0],
            layers=number("block_count"),
            d_model=width,
            d_ff=number("feed_forward_length"),
            heads=heads,
            kv_heads=number("attention.head_count_kv", heads),
            head_dim=number("attention.key_length", width // heads),
            attention_bias="attn_q.bias" in biased,
            output_bias="attn_output.bias" in biased,
            mlp_bias="ffn_up.bias" in biased,
            tie_embeddings="output.weight" not in tensors,
            # Stored in float32: 1e-5 is 9.9999997e-06 there.
            norm_epsilon=float(f"{_number(fields, 'attention.layer_norm_rms_epsilon', where, 1e-5):.6g}"),
            dtype="float32",
        )
    )

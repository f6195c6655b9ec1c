"""Writes tests/data/hf: tiny random models as transformers saves them, and the logits it computes from them.

    python -m pip install transformers==5.23.0 torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
    python tests/data/make_hf_models.py [NAME ...]

and then, with the python of an environment that has transformers==4.56.2 instead (the slow tests make one:
tests/transformers_environments.py),

    python tests/data/make_hf_models.py --configs-of-4 [NAME ...]

A directory NAME holds what `save_pretrained` of transformers 5 wrote (config.json; model.safetensors, or shards and
their index) and logits.npz: `tokens` [2, 40] int32 and `logits` [2, 40, V] float32. Logits are computed from the
weights as they are stored, raised to float64 where transformers lets it (its norms, its softmax and its angles stay
in float32), and rounded to float32; the script asserts that a float32 computation of the saved files is within 2e-5
of them. config.v4.json is the same model's configuration as transformers 4.56 writes it (rope_theta, rope_scaling,
rotary_pct ... instead of rope_parameters): the second command makes it, and asserts that 4.56 computes the same
logits with it. Models without one cannot be said in transformers 4.

Weights are drawn far wider than an initialization, no norm is 1 and no bias 0; epsilons and rope bases are not the
defaults. So every number of a checkpoint is felt, and the script asserts it: the logits move by more than 1e-2 when
any norm or any bias is neutralized, and when any of a model's special settings is switched off (`OFF`).

llama_drope is what DroPE's code saves, pieced together from its public source since no transformers has it: Llama's
configuration with model_type "llama_drope", `attention_type` ("nope", "qk_norm_nope", "q_norm_nope" or
"k_norm_nope"; the last two store both norms and use one), architectures ["DroPELlamaForCausalLM"] and an auto_map
into remote code; Llama's tensors and `self_attn.q_norm.weight` [H*K], `self_attn.k_norm.weight` [G*K], RMSNorms over
all heads at once, before they are split; no rotation whatever the rope settings say. Assumed, since no published
file was at hand: that nothing else differs.
"""

import argparse
import copy
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_families import FAMILIES
from hf_families import OFF as OFF_IN_FAMILIES
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

DIRECTORY = Path(__file__).parent / "hf"
BATCH, LENGTH, VOCABULARY = 2, 40, 64
FELT = 1e-2


class DroPELlamaConfig(LlamaConfig):
    model_type = "llama_drope"


class FlatNormAttention(LlamaAttention):
    """DroPE's: an RMSNorm over all query heads and one over all key heads; the rotation is the identity."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = Olmo2RMSNorm(config.num_attention_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = Olmo2RMSNorm(config.num_key_value_heads * self.head_dim, config.rms_norm_eps)
        self.q_proj.register_forward_hook(lambda module, inputs, output: self.q_norm(output))
        self.k_proj.register_forward_hook(lambda module, inputs, output: self.k_norm(output))

    def forward(self, hidden_states, position_embeddings, **settings):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), **settings)


class DroPELlamaForCausalLM(LlamaForCausalLM):
    config_class = DroPELlamaConfig

    def __init__(self, config: DroPELlamaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = FlatNormAttention(config, index)


LLAMA = (LlamaForCausalLM, LlamaConfig)
QWEN2 = (Qwen2ForCausalLM, Qwen2Config)
QWEN3 = (Qwen3ForCausalLM, Qwen3Config)
GEMMA = (GemmaForCausalLM, GemmaConfig)
GPT_NEOX = (GPTNeoXForCausalLM, GPTNeoXConfig)
SMOLLM3 = (SmolLM3ForCausalLM, SmolLM3Config)
DROPE = (DroPELlamaForCausalLM, DroPELlamaConfig)


def rope(theta: float, **scaling) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
RMS = SIZES | dict(rms_norm_eps=0.02, tie_word_embeddings=False)
SHAPE = RMS | dict(num_attention_heads=4, num_key_value_heads=2) | rope(500.0)
# Two heads of 16: eight pairs, over which a scaling's ramp is seen.
WIDE = RMS | dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
FOUR_LAYERS = SHAPE | dict(num_hidden_layers=4, intermediate_size=32, tie_word_embeddings=True, pad_token_id=0)
NEOX = SIZES | dict(num_attention_heads=2, hidden_act="gelu", layer_norm_eps=0.02, attention_bias=True)

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LONG = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=16,
    short_factor=[1.0, 1.0, 1.0, 1.125, 1.25, 1.25, 1.5, 1.5],
    long_factor=[1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
)
SLIDING, FULL = "sliding_attention", "full_attention"

# NAME: (classes, settings, dtype of the file). 40 tokens are beyond every `original_max_position_embeddings`.
MODELS = {
    "llama": (LLAMA, SHAPE, "float32"),
    "llama_tied_bf16": (LLAMA, SHAPE | dict(tie_word_embeddings=True), "bfloat16"),
    "llama_sharded": (LLAMA, SHAPE, "float16"),
    "llama_bias": (LLAMA, SHAPE | dict(attention_bias=True, mlp_bias=True), "float32"),
    "llama_head_dim": (LLAMA, SHAPE | dict(head_dim=12), "float16"),
    "llama_linear": (LLAMA, WIDE | rope(100.0, rope_type="linear", factor=4.0), "float16"),
    "llama_dynamic": (
        LLAMA,
        WIDE | rope(100.0, rope_type="dynamic", factor=2.0) | dict(max_position_embeddings=16),
        "float16",
    ),
    "llama_yarn": (LLAMA, WIDE | rope(100.0, **YARN) | dict(max_position_embeddings=64), "float16"),
    "llama_yarn_betas": (
        LLAMA,
        WIDE
        | rope(100.0, **YARN, beta_fast=2.0, beta_slow=0.25, attention_factor=1.25, truncate=False)
        | dict(max_position_embeddings=64),
        "float16",
    ),
    "llama_llama3": (
        LLAMA,
        WIDE
        | rope(
            100.0,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        "float16",
    ),
    "llama_longrope": (LLAMA, WIDE | rope(100.0, **LONG) | dict(max_position_embeddings=64), "float16"),
    "llama_proportional": (
        LLAMA,
        WIDE | rope(100.0, rope_type="proportional", partial_rotary_factor=0.5),
        "float16",
    ),
    "llama_nope": (LLAMA, WIDE | rope(100.0, rope_type="linear", factor=1e30), "float16"),
    "llama_drope": (
        DROPE,
        SHAPE
        | dict(
            attention_type="qk_norm_nope",
            auto_map={
                "AutoConfig": "drope.DroPELlamaConfig",
                "AutoModelForCausalLM": "drope.DroPELlamaForCausalLM",
            },
        ),
        "bfloat16",
    ),
    "qwen2": (QWEN2, SHAPE, "float32"),
    "qwen2_window": (
        QWEN2,
        FOUR_LAYERS
        | dict(
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=0,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
        ),
        "float16",
    ),
    "qwen3": (QWEN3, SHAPE | dict(head_dim=16), "float32"),
    "qwen3_tied": (QWEN3, SHAPE | dict(head_dim=8, tie_word_embeddings=True), "bfloat16"),
    "gemma": (
        GEMMA,
        SHAPE | dict(num_key_value_heads=1, head_dim=16, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
        "float32",
    ),
    # A quarter of 16 channels rotates: two pairs.
    "gpt_neox": (
        GPT_NEOX,
        NEOX | rope(500.0, partial_rotary_factor=0.25) | dict(use_parallel_residual=True, tie_word_embeddings=False),
        "float32",
    ),
    "gpt_neox_sequential": (
        GPT_NEOX,
        NEOX | rope(500.0, partial_rotary_factor=1.0) | dict(use_parallel_residual=False, tie_word_embeddings=True),
        "float16",
    ),
    "smollm3": (SMOLLM3, FOUR_LAYERS | dict(no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4), "float32"),
    # The SWAN pattern: windows where there is a rotation, the whole context where there is none.
    "smollm3_window": (
        SMOLLM3,
        FOUR_LAYERS
        | dict(
            no_rope_layers=[1, 0, 1, 0],
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
        ),
        "float16",
    ),
}
for name, (kind, settings, dtype) in FAMILIES.items():
    text = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text"}.get(kind, kind.removesuffix("LMHead"))
    model_class = getattr(transformers, f"{kind}Model" if kind.endswith("LMHead") else f"{kind}ForCausalLM", None)
    config_class = getattr(transformers, f"{text}Config", None)
    MODELS[name] = ((model_class, config_class), settings, dtype)  # None: this version has no such architecture
SHARD_BYTES = {"llama_sharded": 12_000}
ONLY_IN_5 = {"llama_proportional": 'rope_type "proportional"'}


def without(*keys: str) -> dict:
    return {"rope_parameters": {key: None for key in keys}}


# NAME: {what is switched off: the settings that do it}; a rope parameter of None is left out.
DEFAULT = {"rope_parameters": {"rope_type": "default"}}
OFF = {
    "llama_linear": {"linear": DEFAULT},
    "llama_dynamic": {
        "dynamic": DEFAULT,
        "dynamic factor": {"rope_parameters": {"factor": 1.0}},
        "dynamic at max_position": {"max_position_embeddings": 32},
    },
    "llama_yarn": {"yarn": DEFAULT, "yarn temperature": {"rope_parameters": {"attention_factor": 1.0}}},
    "llama_yarn_betas": {
        "yarn": DEFAULT,
        "beta_fast": without("beta_fast"),
        "beta_slow": without("beta_slow"),
        "attention_factor": without("attention_factor"),
        "truncate": without("truncate"),
    },
    "llama_llama3": {
        "llama3": DEFAULT,
        "llama3 bands": {"rope_parameters": {"rope_type": "linear"}},
        "low_freq_factor": {"rope_parameters": {"low_freq_factor": 2.0}},
        "high_freq_factor": {"rope_parameters": {"high_freq_factor": 2.0}},
    },
    "llama_longrope": {
        "longrope": DEFAULT,
        "long_factor": {"rope_parameters": {"long_factor": LONG["short_factor"]}},
        "short_factor ones": {"rope_parameters": {"long_factor": [1.0] * 8}},
        "longrope temperature": {"rope_parameters": {"attention_factor": 1.0}},
    },
    "llama_proportional": {
        "proportional": DEFAULT,
        "p": {"rope_parameters": {"partial_rotary_factor": 1.0}},
    },
    "llama_nope": {"nope": DEFAULT},
    "qwen2_window": {
        "window": {"use_sliding_window": False, "sliding_window": None, "layer_types": [FULL] * 4},
        "mixed windows": {"layer_types": [SLIDING] * 4},
        "window of 7": {"sliding_window": 7},
        "window of 9": {"sliding_window": 9},
    },
    "gpt_neox": {
        "rotary_pct": {"rope_parameters": {"partial_rotary_factor": 1.0}},
        "parallel residual": {"use_parallel_residual": False},
        "exact gelu": {"hidden_act": "gelu_pytorch_tanh"},
    },
    "gpt_neox_sequential": {
        "rotary_pct": {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "sequential residual": {"use_parallel_residual": True},
    },
    "gemma": {"gelu": {"hidden_act": "silu"}},
    "smollm3": {
        "no_rope_layers": {"no_rope_layers": [1] * 4},
        "which layer": {"no_rope_layers": [0, 1, 1, 1]},
    },
    "smollm3_window": {
        "no_rope_layers": {"no_rope_layers": [1] * 4},
        "window": {"use_sliding_window": False, "sliding_window": None, "layer_types": [FULL] * 4},
    },
}
OFF |= OFF_IN_FAMILIES
# The error of the tanh is at most 5e-4, which is what there is to be felt.
FELT_LESS = {"exact gelu": 5e-4}
NO_ROTATION = ("llama_nope", "llama_drope")
CONV1D = (".c_attn.", ".attn.c_proj.", ".c_fc.", ".mlp.c_proj.")  # GPT-2's matrices are [in, out]; StarCoder2's MLP not


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator, norm: float) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("bias"):
        return 0.5 * values
    if "norm" in name or ".ln_" in name:
        return norm + 0.3 * values
    if any(part in name for part in ("embed", "lm_head", ".wte.", ".wpe.")):
        return 0.3 * values
    if len(shape) == 1:
        return values
    inputs = shape[0] if any(part in name for part in CONV1D) else shape[1]
    return values / inputs**0.5


def configuration(config_class: type[PretrainedConfig], settings: dict, dtype: str) -> PretrainedConfig:
    return config_class(**copy.deepcopy(settings), dtype=dtype, attn_implementation="eager")


def neutral_norm(model_class: type[PreTrainedModel]) -> int:
    """The weight of a norm that does nothing: those of Gemma 1 to 3 multiply by 1 + weight."""
    return 0 if model_class.__name__.startswith("Gemma") and not model_class.__name__.startswith("Gemma4") else 1


def layer_scalars(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gemma 4's numbers of each layer, which are buffers."""
    return {key: buffer for key, buffer in model.named_buffers() if key.endswith("layer_scalar")}


def build(name: str) -> PreTrainedModel:
    """The model with random weights, in the dtype of its file."""
    (model_class, config_class), settings, dtype = MODELS[name]
    model = model_class(configuration(config_class, settings, dtype)).eval()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    norm = neutral_norm(model_class)
    weights = {key: torch.tensor(draw(key, tuple(p.shape), rng, norm)) for key, p in model.named_parameters()}
    if model_class.__name__.startswith("Gemma4"):
        # Its products of normed heads are not divided by the root of their channels: its norms have learned it.
        scaled = [key for key in weights if key.endswith(("q_norm.weight", "k_norm.weight"))]
        weights |= {key: weights[key] / len(weights[key]) ** 0.25 for key in scaled}
    weights |= {key: torch.tensor(rng.uniform(0.5, 0.9, 1)) for key in layer_scalars(model)}
    # Whatever the file's dtype, bfloat16's 8 bits: files that compress, and no rounding on the way to another one.
    model.load_state_dict({key: value.bfloat16().float() for key, value in weights.items()}, strict=False)
    model.tie_weights()
    return model.to(getattr(torch, dtype))


def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    # In a copy: a buffer of frequencies must not go through the dtype of the file.
    config = type(model.config).from_dict(model.config.to_dict(), attn_implementation="eager")
    fresh = type(model)(config).eval().double()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        return fresh(torch.tensor(tokens)).logits.float().numpy()


def changed(settings: dict, off: dict) -> dict:
    """Settings with others in their place; rope parameters are merged, and None leaves one out."""
    if "rope_type" not in settings.get("rope_parameters", {}):  # there are none, or they are by type of layers
        return settings | off
    rope_parameters = settings["rope_parameters"] | off.get("rope_parameters", {})
    if rope_parameters["rope_type"] == "default":
        rope_parameters = {
            key: rope_parameters[key]
            for key in ("rope_type", "rope_theta", "partial_rotary_factor")
            if key in rope_parameters and (key != "partial_rotary_factor" or "factor" not in rope_parameters)
        }
    rope_parameters = {key: value for key, value in rope_parameters.items() if value is not None}
    return settings | off | {"rope_parameters": rope_parameters}


def assert_felt(name: str, model: PreTrainedModel, tokens: np.ndarray, logits: np.ndarray) -> tuple[int, float, str]:
    """Asserts that every norm, bias and special setting moves the logits.

    Returns: how many were tried, and the least of what they moved with its name.
    """
    (model_class, config_class), settings, dtype = MODELS[name]
    moved = {}
    neutral = float(neutral_norm(model_class))
    for key, parameter in {**dict(model.named_parameters()), **layer_scalars(model)}.items():
        if key.endswith(("bias", "layer_scalar")) or "norm" in key or ".ln_" in key:
            kept = parameter.detach().clone()
            parameter.data.fill_(0.0 if key.endswith("bias") else neutral)
            moved[key] = np.abs(logits_of(model, tokens) - logits).max()
            parameter.data.copy_(kept)
    offs = dict(OFF.get(name, {}))
    if epsilons := {key: 1e-6 for key in settings if key.endswith(("norm_eps", "norm_epsilon"))}:
        offs["epsilon"] = epsilons
    if (
        name not in NO_ROTATION
        and "rope_type" in settings.get("rope_parameters", {})
        and "layer_rope_theta" not in settings
    ):
        offs["rope_theta"] = {"rope_parameters": {"rope_theta": 1e4}}
    for feature, off in offs.items():
        other = model_class(configuration(config_class, changed(settings, off), dtype)).eval()
        other.load_state_dict(model.state_dict())
        moved[feature] = np.abs(logits_of(other, tokens) - logits).max()
    # Without a rotation, a bias of keys adds the same to all logits of a query: the softmax does not feel it.
    moved = {key: value for key, value in moved.items() if not (name == "opt" and key.endswith("k_proj.bias"))}
    # The final norm takes away by what the last layer's output is multiplied.
    moved.pop(f"model.layers.{model.config.num_hidden_layers - 1}.layer_scalar", None)
    unfelt = {key: float(value) for key, value in moved.items() if not value > FELT_LESS.get(key, FELT)}
    assert not unfelt, f"{name}: not felt: {unfelt}"
    least = min(set(moved) - set(FELT_LESS), key=moved.__getitem__)
    return len(moved), float(moved[least]), least


def read_back(name: str, directory: Path) -> PreTrainedModel:
    if MODELS[name][0] is DROPE:
        model, report = DroPELlamaForCausalLM.from_pretrained(directory, dtype="float32", output_loading_info=True)
    else:
        # Other implementations of transformers 4 ignore soft caps.
        settings = dict(dtype="float32", attn_implementation="eager", output_loading_info=True)
        model, report = AutoModelForCausalLM.from_pretrained(directory, **settings)
    assert not any(report.values()), f"{name}: {report}"
    return model.eval()


def make(name: str) -> None:
    directory = DIRECTORY / name
    shutil.rmtree(directory, ignore_errors=True)
    model = build(name)
    tokens = np.random.default_rng(zlib.crc32(name.encode()) + 1).integers(0, VOCABULARY, (BATCH, LENGTH))
    logits = logits_of(model, tokens)
    if name in NO_ROTATION:
        still = model.__class__(model.config).eval().double()
        still.load_state_dict(model.state_dict())
        still.model.rotary_emb.inv_freq.zero_()
        with torch.no_grad():
            difference = np.abs(still(torch.tensor(tokens)).logits.numpy() - logits).max()
        assert difference < 1e-6, f"{name}: something rotates: {difference}"
    tried, least, feature = assert_felt(name, model, tokens, logits)
    model.save_pretrained(directory, max_shard_size=SHARD_BYTES.get(name, "1GB"))
    (directory / "generation_config.json").unlink(missing_ok=True)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes for its owner alone
    np.savez_compressed(directory / "logits.npz", tokens=tokens.astype(np.int32), logits=logits)
    with torch.no_grad():
        difference = np.abs(read_back(name, directory)(torch.tensor(tokens)).logits.numpy() - logits).max()
    assert difference < 2e-5, f"{name}: the files compute something else in float32, by {difference}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{name:20} {parameters:10,} {size:9,}  {np.abs(logits).max():10.2f}  {difference:9.1e}  "
        f"{tried:5}  {least:.3f} {feature}"
    )


def as_in_4(config_class: type[PretrainedConfig], settings: dict) -> dict:
    """The arguments of transformers 4's configuration class for what `rope_parameters` says in 5."""
    settings = copy.deepcopy(settings)
    parameters = settings.pop("rope_parameters", None)
    if parameters is None:
        return settings
    if "rope_type" not in parameters:  # Gemma 3
        settings["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    theta, part = parameters.pop("rope_theta"), parameters.pop("partial_rotary_factor", None)
    if config_class is GPTNeoXConfig:
        settings |= dict(rotary_emb_base=theta, rotary_pct=part)
    else:
        settings |= dict(rope_theta=theta) | ({} if part is None else dict(partial_rotary_factor=part))
    if parameters["rope_type"] != "default":
        settings["rope_scaling"] = parameters
    if config_class.__name__ == "Phi3Config":
        settings["rope_scaling"] = {"type" if k == "rope_type" else k: v for k, v in parameters.items()}
    if parameters["rope_type"] == "longrope":
        # The only place where transformers 4 looks for it; without it, the short factors are used up to 64 tokens.
        settings.setdefault("original_max_position_embeddings", parameters.get("original_max_position_embeddings"))
    return settings


def make_config_of_4(name: str) -> None:
    """Writes config.v4.json, and asserts that the model is the same with it."""
    directory = DIRECTORY / name
    (model_class, config_class), settings, dtype = MODELS[name]
    config = configuration(config_class, as_in_4(config_class, settings), dtype)
    config.architectures = [model_class.__name__]
    config.to_json_file(directory / "config.v4.json", use_diff=True)
    scratch = directory / "as_in_4"
    shutil.copytree(directory, scratch, ignore=shutil.ignore_patterns("config*"))
    try:
        shutil.copy(directory / "config.v4.json", scratch / "config.json")
        model = read_back(name, scratch)
    finally:
        shutil.rmtree(scratch)
    stored = np.load(directory / "logits.npz")
    with torch.no_grad():
        logits = model(torch.tensor(stored["tokens"], dtype=torch.int64)).logits.numpy()
    difference = np.abs(logits - stored["logits"]).max()
    assert difference < 2e-5, f"{name}: transformers 4 computes something else, by {difference}"
    written = json.loads((directory / "config.v4.json").read_text())
    told = {key: value for key, value in written.items() if "rope" in key or "rotary" in key}
    print(f"{name:20} {difference:9.1e}  {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--configs-of-4", action="store_true", help="config.v4.json; run it with transformers 4.56")
    arguments = parser.parse_args()
    major = int(transformers.__version__.partition(".")[0])
    if major != (4 if arguments.configs_of_4 else 5):
        parser.error(f"this is transformers {transformers.__version__}: see the top of the script")
    names = arguments.names or list(MODELS)
    if unknown := set(names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.configs_of_4:
        for name in names:
            if name not in ONLY_IN_5:
                make_config_of_4(name)
        return
    print(f"{'name':20} parameters     bytes  max |logit|  float32    felt  least felt")
    for name in names:
        make(name)
    size = sum(path.stat().st_size for path in DIRECTORY.rglob("*") if path.is_file())
    print(f"{DIRECTORY}: {size / 1e6:.2f} MB")
    assert size < 4e6


if __name__ == "__main__":
    main()

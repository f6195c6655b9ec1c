"""What other runtimes make of an exported `config.json`: which compute the same model, which do not, and why.

`CONTENTS` is the one table of it: `pe_lab.convert` prints the lines that concern an export, and docs/checkpoints.md
shows the table. All four runtimes were run: transformers by tests/data/read_with_transformers.py, the others on every
variant of tests/runtime_variants.py, which tests/checkpoints/test_runtime_variants.py compares with this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pe_lab.checkpoints.rope_parameters import NO_ROTATION, by_layer_type, declared_length

Config = Mapping[str, Any]

TRANSFORMERS, LLAMA_CPP, VLLM, SGLANG = "transformers", "llama.cpp", "vLLM", "SGLang"
# The versions that were run.
RUNTIMES = {
    TRANSFORMERS: "4.56.2 and 5.24.0, run",
    LLAMA_CPP: "xllamacpp 2026.10 with the converter of 2026-10-01, run",
    VLLM: "0.33.0, run",
    SGLANG: "0.5.23, run",
}
# What each statement about a runtime that does not compute an export contains, and how results differ:
# other logits or an error on a sequence; no start; a shorter length than declared; a longer one.
WRONG, NO_START, SHORTER, LONGER = "wrong", "does not start", "serves", "needs"
KINDS = (WRONG, NO_START, SHORTER, LONGER)
# vLLM and SGLang run these by transformers' own classes, rotation included; vLLM alone also those of the third line.
_OF_TRANSFORMERS = ("gpt_neox", "smollm3")
_OF_TRANSFORMERS_IN_VLLM = ("olmo2", "olmo3", "starcoder2")
# Those whose classes in SGLang do not know of a scaling.
_UNSCALED = ("gemma", "gemma2", "exaone4", "stablelm", "starcoder2")


@dataclass(frozen=True)
class Content:
    """Something that an export contains, and how the results of runtimes differ; those not named compute the same."""

    name: str  # for messages and the table
    has: Callable[[Config], bool]  # whether a `config.json` contains it
    not_right: Mapping[str, str] = field(default_factory=dict)  # by runtime, how and why


def _rope(config: Config) -> Mapping[str, Any]:
    """The keys of the one rotation; none where there are several."""
    return {} if by_layer_type(config) else config.get("rope_parameters") or config.get("rope_scaling") or {}


def _kind(config: Config) -> str:
    rope = _rope(config)
    return "dropped" if rope.get("factor") == NO_ROTATION else rope.get("rope_type", "default")


def _nested_kinds(config: Config) -> set[str]:
    """The kinds of rotation of a model that has them by type of layers."""
    return {_kind({"rope_parameters": rope}) for rope in (by_layer_type(config) or {}).values()}


def _is(config: Config, *names: str) -> bool:
    return config["model_type"] in names


def _plain(config: Config) -> bool:
    """Whether the rotation is RoPE of base 10,000."""
    return (_kind(config), _rope(config).get("rope_theta", 10000.0)) == ("default", 10000.0)


def _ramp(config: Config) -> tuple[Any, ...]:
    rope = _rope(config)
    return (rope.get("beta_fast", 32), rope.get("beta_slow", 1), rope.get("truncate", True))


def _table(config: Config) -> bool:
    return _kind(config) == "longrope" and _rope(config)["short_factor"] == _rope(config)["long_factor"]


def _beyond(config: Config) -> bool:
    return _table(config) and config["max_position_embeddings"] > _rope(config)["original_max_position_embeddings"]


def _gain_without_mscales(config: Config) -> bool:
    rope = _rope(config)
    return _table(config) and "short_mscale" not in rope and rope.get("attention_factor", 1.0) != 1.0


def _bare(config: Config) -> list[bool]:
    return [not rotates for rotates in config.get("no_rope_layers", [])]


def _windows(config: Config) -> set[bool]:
    """Which layers have a window: none, all ({True}) or some of them."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return set()
    kinds = {kind == "sliding_attention" for kind in config.get("layer_types") or ["sliding_attention"]}
    return kinds if True in kinds else set()


def _every(config: Config, interval: int) -> bool:
    """Whether every so many layers, and no others, have no window."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return kinds == [(n + 1) % interval != 0 for n in range(len(kinds))]


def _window_of_one_size(config: Config) -> bool:
    return _is(config, "mistral", "starcoder2", "phi3", "ministral3") and bool(_windows(config))


def _biased(config: Config, *names: str) -> bool:
    return _is(config, *names) and bool(config.get("attention_bias"))


_DROPS_SCALING = "wrong: its converter drops the base and the scaling"
_DROPS_TABLES = "wrong: its converter drops the tables"
_DROPS_WINDOWS = "wrong: its converter drops windows"
_HAS_NO_WINDOWS = "wrong: its classes of these models have no windows"
_NO_CLASS = "does not start: it has no class of it"
_NOT_CONVERTED = "does not start: it has no such architecture"
_TOO_MANY_ROWS = "does not start: its table has max_position_embeddings x 1e30 rows"
_TIMES_1E30 = {
    VLLM: "needs --max-model-len: its default length is multiplied by 1e30",
    SGLANG: "needs --context-length: its default length is multiplied by 1e30",
}
_OWN_FACTOR = "wrong: it computes its own factor"


CONTENTS: tuple[Content, ...] = (
    Content("RoPE, also with another base (NTK)", lambda c: _kind(c) == "default" and not by_layer_type(c)),
    Content("PI", lambda c: _kind(c) == "linear"),
    Content(
        "no encoding on any layer (`linear`, 1e30)",
        lambda c: _kind(c) == "dropped" and not _is(c, *_OF_TRANSFORMERS, *_OF_TRANSFORMERS_IN_VLLM, *_UNSCALED),
        {VLLM: f"{_TOO_MANY_ROWS}, whatever --max-model-len is", SGLANG: _TOO_MANY_ROWS},
    ),
    Content(
        "the same, Gemma 1 and 2, EXAONE 4, StableLM",
        lambda c: _kind(c) == "dropped" and _is(c, *_UNSCALED) and not _is(c, "starcoder2"),
        {VLLM: _TOO_MANY_ROWS, SGLANG: _TIMES_1E30[SGLANG]},
    ),
    Content(
        "the same, GPT-NeoX, StarCoder2",
        lambda c: _kind(c) == "dropped" and _is(c, "gpt_neox", "starcoder2"),
        _TIMES_1E30,
    ),
    Content(
        "the same, OLMo 2 and 3",
        lambda c: _is(c, "olmo2", "olmo3") and "dropped" in {_kind(c), *_nested_kinds(c)},
        {VLLM: _TIMES_1E30[VLLM], SGLANG: _TOO_MANY_ROWS},
    ),
    Content(
        "dynamic NTK",
        lambda c: _kind(c) == "dynamic" and not _is(c, *_OF_TRANSFORMERS),
        {
            LLAMA_CPP: "wrong beyond the training length: it ignores the scaling",
            VLLM: "wrong beyond the training length: its table ends there",
            SGLANG: "wrong: its base is that of one length, the longest, for all sequences",
        },
    ),
    Content(
        "the same, SmolLM3 and GPT-NeoX",
        lambda c: _kind(c) == "dynamic" and _is(c, *_OF_TRANSFORMERS),
        {LLAMA_CPP: "wrong beyond the training length: it ignores the scaling"},
    ),
    Content("YaRN", lambda c: _kind(c) == "yarn"),
    Content(
        "YaRN with an attention factor (also NTK-by-parts)",
        lambda c: _kind(c) == "yarn" and "attention_factor" in _rope(c) and not _is(c, *_OF_TRANSFORMERS),
        {LLAMA_CPP: _OWN_FACTOR, SGLANG: _OWN_FACTOR},
    ),
    Content(
        "the same, SmolLM3 and GPT-NeoX",
        lambda c: _kind(c) == "yarn" and "attention_factor" in _rope(c) and _is(c, *_OF_TRANSFORMERS),
        {LLAMA_CPP: _OWN_FACTOR},
    ),
    Content(
        "YaRN with mscale",
        lambda c: _kind(c) == "yarn" and "mscale" in _rope(c) and not _is(c, "ministral3"),
        {LLAMA_CPP: "wrong: its converter drops mscale"},
    ),
    Content(
        "YaRN with other betas, or without rounding",
        lambda c: _kind(c) == "yarn" and _ramp(c) != (32, 1, True),
        {LLAMA_CPP: "wrong: it has 32, 1 and rounding for every model of these"},
    ),
    Content("llama3", lambda c: _kind(c) == "llama3"),
    Content(
        "llama3 on Qwen2 or Qwen3",
        lambda c: _kind(c) == "llama3" and _is(c, "qwen2", "qwen3"),
        {LLAMA_CPP: "wrong: its converter drops the scaling"},
    ),
    Content(
        "LongRoPE with two tables",
        lambda c: _kind(c) == "longrope" and not _table(c) and not _is(c, "phi3", *_OF_TRANSFORMERS),
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "serves the original length unless --max-model-len asks for more; then wrong for shorter sequences, "
            "which get the long table too",
            SGLANG: "wrong: the table changes within a sequence that outgrows the original length",
        },
    ),
    Content(
        "LongRoPE with two tables, Phi-3",
        lambda c: _kind(c) == "longrope" and not _table(c) and _is(c, "phi3"),
        {
            LLAMA_CPP: "wrong for sequences up to the original length in a longer context: they get the long table too",
            VLLM: "serves the original length unless --max-model-len asks for more; then wrong for shorter sequences, "
            "which get the long table too",
            SGLANG: "wrong: the table changes within a sequence that outgrows the original length",
        },
    ),
    Content(
        "LongRoPE with two tables, SmolLM3 and GPT-NeoX",
        lambda c: _kind(c) == "longrope" and not _table(c) and _is(c, *_OF_TRANSFORMERS),
        {LLAMA_CPP: _DROPS_TABLES, VLLM: "serves the original length unless --max-model-len asks for more"},
    ),
    Content(
        "one table (p-RoPE, partial RoPE, a factor that is no whole length; 1e30 for no encoding)",
        lambda c: _table(c) and not _is(c, "phi3"),
        {LLAMA_CPP: _DROPS_TABLES},
    ),
    Content("one table, Phi-3", lambda c: _table(c) and _is(c, "phi3")),
    Content(
        "a table for more than the original length",
        lambda c: _beyond(c) and not _is(c, *_OF_TRANSFORMERS),
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "serves the original length unless --max-model-len asks for more",
            SGLANG: "wrong: it rotates the token at the original length as the first one",
        },
    ),
    Content(
        "the same, SmolLM3 and GPT-NeoX",
        lambda c: _beyond(c) and _is(c, *_OF_TRANSFORMERS),
        {LLAMA_CPP: _DROPS_TABLES, VLLM: "serves the original length unless --max-model-len asks for more"},
    ),
    Content(
        "a table with a gain, without `short_mscale` and `long_mscale`",
        _gain_without_mscales,
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "wrong: it computes the gain of the lengths",
            SGLANG: "wrong: it computes the gain of the lengths",
        },
    ),
    Content(
        "a table on adjacent pairs (Cohere 2, GLM-4)",
        lambda c: _kind(c) == "longrope" and _is(c, "cohere2", "glm4"),
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "does not start: its tables have no adjacent pairs",
            SGLANG: "does not start: its tables have no adjacent pairs",
        },
    ),
    Content(
        "SmolLM3: other layers without rotation than every fourth",
        lambda c: _is(c, "smollm3") and any(x != ((n + 1) % 4 == 0) for n, x in enumerate(_bare(c))),
        {LLAMA_CPP: "wrong: it has every fourth layer without rotation, whatever no_rope_layers is"},
    ),
    Content(
        "windows on all layers, Qwen2 and Qwen3",
        lambda c: _windows(c) == {True} and _is(c, "qwen2", "qwen3"),
        {LLAMA_CPP: _DROPS_WINDOWS, SGLANG: _HAS_NO_WINDOWS},
    ),
    Content(
        "windows on some layers, Qwen2 and Qwen3",
        lambda c: _windows(c) == {True, False} and _is(c, "qwen2", "qwen3"),
        {
            LLAMA_CPP: _DROPS_WINDOWS,
            VLLM: "wrong: its classes of these models give no window to single layers",
            SGLANG: _HAS_NO_WINDOWS,
        },
    ),
    Content(
        "windows, SmolLM3",
        lambda c: True in _windows(c) and _is(c, "smollm3"),
        {LLAMA_CPP: _DROPS_WINDOWS, SGLANG: "wrong: windows of one token more"},
    ),
    Content(
        "windows, Mistral, Phi-3, StarCoder2",
        _window_of_one_size,
        {LLAMA_CPP: "wrong: it has no windows in these models", SGLANG: _HAS_NO_WINDOWS},
    ),
    Content("QK-norm (Qwen3)", lambda c: _is(c, "qwen3")),
    Content(
        "biases of attention, Qwen3",
        lambda c: _biased(c, "qwen3"),
        {LLAMA_CPP: "does not start: it has no such biases", VLLM: "wrong: it drops the bias of the output"},
    ),
    Content(
        "biases of attention, SmolLM3", lambda c: _biased(c, "smollm3"), {LLAMA_CPP: "does not start: it has no biases"}
    ),
    Content(
        "biases of attention, Gemma",
        lambda c: _biased(c, "gemma"),
        {
            LLAMA_CPP: "does not start: it has no biases",
            VLLM: "wrong: it drops the biases",
            SGLANG: "wrong: it drops the biases",
        },
    ),
    Content(
        "biases of the MLP, Llama",
        lambda c: _is(c, "llama") and bool(c.get("mlp_bias")),
        {SGLANG: "wrong: it drops the biases of the MLP"},
    ),
    Content(
        "GPT-NeoX with tied embeddings",
        lambda c: _is(c, "gpt_neox") and bool(c["tie_word_embeddings"]),
        {LLAMA_CPP: "does not start: it asks for the output matrix"},
    ),
    Content(
        "Gemma 1 and 2, GPT-NeoX, StableLM, Falcon with another rotation than RoPE of base 10,000",
        lambda c: _is(c, "gemma", "gemma2", "gpt_neox", "stablelm", "falcon") and not _plain(c),
        {LLAMA_CPP: _DROPS_SCALING},
    ),
    Content(
        "Gemma 1 and 2, StableLM, StarCoder2 with a scaling",
        lambda c: _is(c, "gemma", "gemma2", "stablelm", "starcoder2") and _kind(c) != "default",
        {SGLANG: "wrong: its classes of these models ignore the scaling"},
    ),
    Content(
        "Gemma 2 without `hidden_act` beside `hidden_activation`",
        lambda c: _is(c, "gemma2") and "hidden_act" not in c,
        {SGLANG: "does not start: it asks for hidden_act"},
    ),
    Content(
        "Gemma 2 and 3, an attention scale that is not the head dimension's",
        lambda c: _is(c, "gemma2", "gemma3_text") and c["query_pre_attn_scalar"] != c["head_dim"],
        {LLAMA_CPP: "wrong: its scale follows from the head dimension"},
    ),
    Content("Gemma 3", lambda c: _is(c, "gemma3_text")),
    Content(
        "Gemma 3, other windows than all but every sixth layer, or windows with another base than 10,000",
        lambda c: _is(c, "gemma3_text") and (not _every(c, 6) or c["rope_local_base_freq"] != 10000.0),
        {LLAMA_CPP: "wrong: its converter drops the pattern and the base of the windows"},
    ),
    Content(
        "Gemma 3, PI without a window",
        lambda c: _is(c, "gemma3_text") and "linear" in _nested_kinds(c),
        {
            VLLM: "serves max_position_embeddings, not times the factor",
            SGLANG: "serves max_position_embeddings, not times the factor",
        },
    ),
    Content(
        "Gemma 3, no encoding without a window (`linear`, 1e30)",
        lambda c: _is(c, "gemma3_text") and "dropped" in _nested_kinds(c),
        {VLLM: _TOO_MANY_ROWS},
    ),
    Content("OLMo 2 and 3", lambda c: _is(c, "olmo2", "olmo3")),
    Content(
        "OLMo 3 with a scaling on layers with a window",
        lambda c: _is(c, "olmo3") and _kind({"rope_parameters": by_layer_type(c)["sliding_attention"]}) != "default",
        {
            LLAMA_CPP: "wrong: it scales layers without a window alone",
            SGLANG: "wrong: it scales layers without a window alone",
        },
    ),
    Content(
        "EXAONE 4 with windows",
        lambda c: _is(c, "exaone4") and bool(_windows(c)),
        {LLAMA_CPP: "wrong: it has windows in models of 64 layers alone"},
    ),
    Content(
        "EXAONE 4 with `sliding_window`, but no `sliding_window_pattern` in letters",
        lambda c: _is(c, "exaone4") and bool(c["sliding_window"]) and not c.get("sliding_window_pattern"),
        {SGLANG: "does not start: it asks for the length of a number"},
    ),
    Content(
        "EXAONE 4 with another rotation than RoPE of base 1,000,000",
        lambda c: _is(c, "exaone4") and (_kind(c), _rope(c)["rope_theta"]) != ("default", 1_000_000.0),
        {SGLANG: "wrong: it ignores the base and the scaling"},
    ),
    Content(
        "EXAONE 4 with another epsilon than 1e-6",
        lambda c: _is(c, "exaone4") and c["rms_norm_eps"] != 1e-6,
        {SGLANG: "wrong: its QK-norm has an epsilon of 1e-6"},
    ),
    Content(
        "Cohere 2 with windows",
        lambda c: _is(c, "cohere2") and bool(_windows(c)),
        {VLLM: "wrong: windows of one token more", SGLANG: "wrong: windows of one token more"},
    ),
    Content(
        "Cohere 2 without `rotary_pct`",
        lambda c: _is(c, "cohere2") and "rotary_pct" not in c,
        {LLAMA_CPP: "does not start: its converter asks for rotary_pct"},
    ),
    Content(
        "Cohere 2, other windows than all but every fourth layer, or a scaling",
        lambda c: _is(c, "cohere2") and (not _every(c, 4) or _kind(c) != "default"),
        {LLAMA_CPP: "wrong: its converter drops the pattern and the scaling"},
    ),
    Content("Granite", lambda c: _is(c, "granite")),
    Content(
        "GraniteSWA with a layer without rotation, and no `no_rope_layers`",
        lambda c: _is(c, "granite_swa") and 0 in c["layer_rope_theta"] and "no_rope_layers" not in c,
        {LLAMA_CPP: "wrong: its converter asks for no_rope_layers"},
    ),
    Content(
        "GraniteSWA with several bases",
        lambda c: _is(c, "granite_swa") and len({base for base in c["layer_rope_theta"] if base}) > 1,
        {LLAMA_CPP: "wrong: it has one base"},
    ),
    Content(
        "Ministral 3 for more than the original length",
        lambda c: _is(c, "ministral3") and c["max_position_embeddings"] > _rope(c)["original_max_position_embeddings"],
        {
            VLLM: "wrong beyond the original length: it ignores the temperature",
            SGLANG: "wrong beyond the original length: its temperature rises with max_position_embeddings",
        },
    ),
    Content(
        "Ministral 3 with another rotation than YaRN",
        lambda c: _is(c, "ministral3") and _kind(c) != "yarn",
        {LLAMA_CPP: "does not start: its converter asks for YaRN"},
    ),
    Content("GLM-4", lambda c: _is(c, "glm4")),
    Content(
        "GPT-J", lambda c: _is(c, "gptj"), {LLAMA_CPP: _NOT_CONVERTED, SGLANG: "wrong: it drops the bias of the output"}
    ),
    Content(
        "StableLM with a QK-norm",
        lambda c: _is(c, "stablelm") and bool(c["qk_layernorm"]),
        dict.fromkeys((LLAMA_CPP, VLLM, SGLANG), "does not start: it does not know the names of these tensors"),
    ),
    Content(
        "StableLM with parallel blocks",
        lambda c: _is(c, "stablelm") and bool(c["use_parallel_residual"]),
        {VLLM: "does not start: it asks for a norm before the MLP", SGLANG: "wrong: it has no parallel blocks"},
    ),
    Content("Falcon", lambda c: _is(c, "falcon"), {SGLANG: _NO_CLASS}),
    Content(
        "Falcon, an MLP that is not four times as wide as the model",
        lambda c: _is(c, "falcon") and c["ffn_hidden_size"] != 4 * c["hidden_size"],
        dict.fromkeys((LLAMA_CPP, VLLM), "does not start: it does not read ffn_hidden_size"),
    ),
    Content(
        "Falcon with sequential blocks",
        lambda c: _is(c, "falcon") and not c["parallel_attn"],
        {LLAMA_CPP: "does not start: its converter has no second norm"},
    ),
    Content("BLOOM", lambda c: _is(c, "bloom"), {SGLANG: _NO_CLASS}),
    Content("MPT", lambda c: _is(c, "mpt"), {LLAMA_CPP: _NOT_CONVERTED, VLLM: _NO_CLASS, SGLANG: _NO_CLASS}),
    Content(
        "GPT-2",
        lambda c: _is(c, "gpt2"),
        {LLAMA_CPP: "does not start without n_ctx, or with an MLP that is not four times as wide as the model"},
    ),
    Content("OPT", lambda c: _is(c, "opt"), {LLAMA_CPP: _NOT_CONVERTED}),
)  # fmt: skip


def kinds(statements: Sequence[str]) -> set[str]:
    """Which of `KINDS` some statements name; a runtime that does not start fails in no other way."""
    found = {kind for kind in KINDS if any(kind in statement for statement in statements)}
    return {NO_START} if NO_START in found else found


def contents(config: Config) -> list[Content]:
    """What an exported `config.json` contains, in the order of `CONTENTS`."""
    return [content for content in CONTENTS if content.has(config)]


def judge(config: Config) -> dict[str, list[str]]:
    """By runtime, the reasons for which it does not compute the exported model as it is; none if it does."""
    found = contents(config)
    reasons = {name: [content.not_right[name] for content in found if name in content.not_right] for name in RUNTIMES}
    return {name: list(dict.fromkeys(listed)) for name, listed in reasons.items()}


def report(config: Config) -> str:
    """The lines about an export: what each runtime makes of it, and how that is known."""
    lines = [f"Declared for {declared_length(config):,} tokens. What runtimes make of it:"]
    for name, listed in judge(config).items():
        lines.append(f"  {name} ({RUNTIMES[name]}): {'; '.join(listed) or 'right'}")
    return "\n".join(lines)


def table() -> str:
    """`CONTENTS` as a Markdown table."""
    rows = [
        ["an export with", *(f"{name} ({how})" for name, how in RUNTIMES.items())],
        ["---"] * (len(RUNTIMES) + 1),
        *([content.name, *(content.not_right.get(name, "right") for name in RUNTIMES)] for content in CONTENTS),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

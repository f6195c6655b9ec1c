"""What other runtimes make of an exported `config.json`: which compute the same model, which do not, and why.

`CONTENTS` is the one table of it: `pe_lab.convert` prints the lines that concern an export, and docs/checkpoints.md
shows the table. All four runtimes were run on every variant of tests/runtime_variants.py;
tests/checkpoints/test_runtime_variants.py compares what they compute with this table.
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
    TRANSFORMERS: "4.56.2 and 5.23.0",
    LLAMA_CPP: "xllamacpp 2026.10 with the converter of 2026-10-01",
    VLLM: "0.33.0",
    SGLANG: "0.5.23",
}
# What each statement about a runtime that does not compute an export contains, and how results differ:
# other logits or an error on a sequence; no start; a shorter length than declared; a longer one.
WRONG, NO_START, SHORTER, LONGER = "wrong", "does not start", "serves", "needs"
KINDS = (WRONG, NO_START, SHORTER, LONGER)
# Families that the servers run by transformers' own classes, rotation included.
_TRANSFORMERS_IN_SGLANG = ("gpt_neox", "smollm3")
_TRANSFORMERS_IN_VLLM = (*_TRANSFORMERS_IN_SGLANG, "olmo2", "olmo3", "starcoder2")
# Those whose classes in SGLang do not know of a scaling.
_UNSCALED = ("gemma", "gemma2", "stablelm", "starcoder2")


@dataclass(frozen=True)
class ByFamily:
    """How the results of a runtime differ in most families, and in `others`, by `model_type`; "": not at all."""

    most: str
    others: Mapping[tuple[str, ...], str]

    def of(self, model_type: str) -> str:
        return next((text for names, text in self.others.items() if model_type in names), self.most)

    def __str__(self) -> str:
        others = [
            f"{', '.join(f'`{name}`' for name in names)}: {text or 'right'}" for names, text in self.others.items()
        ]
        return "; ".join([self.most or "right", *others])


@dataclass(frozen=True)
class Content:
    """Something that an export contains, and how the results of runtimes differ; those not named compute the same."""

    name: str  # for messages and the table
    has: Callable[[Config], bool]  # whether a `config.json` contains it
    not_right: Mapping[str, str | ByFamily] = field(default_factory=dict)  # by runtime, how and why

    def reason(self, runtime: str, config: Config) -> str:
        """How and why the results of a runtime differ for an export with this content; "": they do not."""
        fault = self.not_right.get(runtime, "")
        return fault.of(config["model_type"]) if isinstance(fault, ByFamily) else fault


def _rope(config: Config, layers: str = "full_attention") -> Mapping[str, Any]:
    """The keys of the one rotation, or of that of a type of layers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope[layers] if by_layer_type(config) else rope


def _kind(config: Config, layers: str = "full_attention") -> str:
    rope = _rope(config, layers)
    return "dropped" if rope.get("factor") == NO_ROTATION else rope.get("rope_type", "default")


def _is(config: Config, *names: str) -> bool:
    return config["model_type"] in names


def _plain(config: Config) -> bool:
    """Whether the rotation is RoPE of base 10,000."""
    return (_kind(config), _rope(config).get("rope_theta", 10000.0)) == ("default", 10000.0)


def _type_and_factor(config: Config) -> bool:
    """Whether the scaling has a factor above 1 and nothing else."""
    return _kind(config) in ("linear", "dynamic", "dropped") and _rope(config)["factor"] > 1


def _ramp(config: Config) -> tuple[Any, ...]:
    rope = _rope(config)
    return (rope.get("beta_fast", 32), rope.get("beta_slow", 1), rope.get("truncate", True))


def _table(config: Config) -> bool:
    return _kind(config) == "longrope" and _rope(config)["short_factor"] == _rope(config)["long_factor"]


def _rotates(config: Config) -> bool:
    return _kind(config) != "dropped" and not (_table(config) and min(_rope(config)["short_factor"]) == NO_ROTATION)


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


_DROPS_TABLES = "wrong: its converter drops the tables"
_NO_CLASS = "does not start: it has no class of it"
_NOT_CONVERTED = "does not start: it has no such architecture"
_LONG_ON_REQUEST = "serves the original length unless --max-model-len asks for more"
_ROWS = "does not start: its table has max_position_embeddings x 1e30 rows"
_NO_ADJACENT = {("cohere2", "glm4"): "does not start: its tables have no adjacent pairs"}


def _times_1e30(option: str) -> str:
    return f"needs {option}: its default length is multiplied by 1e30"


CONTENTS: tuple[Content, ...] = (
    Content("RoPE, NTK (a larger base), PI, YaRN", lambda c: _kind(c) in ("default", "linear", "yarn")),
    Content(
        "llama3",
        lambda c: _kind(c) == "llama3",
        {
            LLAMA_CPP: ByFamily(
                "",
                {
                    ("qwen2", "qwen3", "olmo2", "olmo3", "starcoder2", "glm4"): "wrong: it drops the scaling",
                    ("smollm3", "granite"): "does not start: it does not know the scaling's tensor",
                },
            )
        },
    ),
    Content(
        "YaRN with an attention factor, NTK-by-parts",
        lambda c: _kind(c) == "yarn" and "attention_factor" in _rope(c),
        {LLAMA_CPP: "wrong: it computes its own factor"},
    ),
    Content(
        "YaRN with mscale, without an attention factor",
        lambda c: _kind(c) == "yarn" and "mscale" in _rope(c) and "attention_factor" not in _rope(c),
        {LLAMA_CPP: ByFamily("wrong: its converter drops mscale", {("ministral3",): ""})},
    ),
    Content(
        "YaRN with other betas, or without rounding",
        lambda c: _kind(c) == "yarn" and _ramp(c) != (32, 1, True),
        {LLAMA_CPP: "wrong: it has 32, 1 and rounding for every model of these"},
    ),
    Content(
        "dynamic NTK",
        lambda c: _kind(c) == "dynamic",
        {
            LLAMA_CPP: "wrong beyond the training length: it ignores the scaling",
            VLLM: ByFamily("wrong beyond the training length: its table ends there", {_TRANSFORMERS_IN_VLLM: ""}),
            SGLANG: ByFamily(
                "wrong: it has one base for all lengths, that of the longest",
                {(*_TRANSFORMERS_IN_SGLANG, "gemma3_text"): ""},
            ),
        },
    ),
    Content(
        "LongRoPE with two tables",
        lambda c: _kind(c) == "longrope" and not _table(c),
        {
            LLAMA_CPP: ByFamily(_DROPS_TABLES, {("phi3",): "wrong for short sequences in a long context"}),
            VLLM: ByFamily(
                f"{_LONG_ON_REQUEST}; then wrong for short sequences: the long table",
                {tuple(name for name in _TRANSFORMERS_IN_VLLM if name != "olmo3"): _LONG_ON_REQUEST} | _NO_ADJACENT,
            ),
            SGLANG: ByFamily(
                "wrong: the table changes within a sequence that outgrows the original length",
                {_TRANSFORMERS_IN_SGLANG: "", ("gemma3_text",): "wrong beyond the original length"} | _NO_ADJACENT,
            ),
        },
    ),
    Content(
        "one table (p-RoPE, partial RoPE, a factor that is no whole length; 1e30 for no encoding)",
        _table,
        {
            LLAMA_CPP: ByFamily(_DROPS_TABLES, {("phi3",): ""}),
            VLLM: ByFamily("", _NO_ADJACENT),
            SGLANG: ByFamily("", _NO_ADJACENT),
        },
    ),
    Content(
        "no encoding on any layer, as `linear` with 1e30",
        lambda c: _kind(c) == "dropped",
        {
            VLLM: ByFamily(_ROWS, {_TRANSFORMERS_IN_VLLM: _times_1e30("--max-model-len")}),
            SGLANG: ByFamily(
                _ROWS,
                {(*_TRANSFORMERS_IN_SGLANG, *_UNSCALED): _times_1e30("--context-length"), ("gemma3_text",): ""},
            ),
        },
    ),
    Content(
        "SmolLM3: other layers without rotation than every fourth",
        lambda c: _is(c, "smollm3") and any(x != ((n + 1) % 4 == 0) for n, x in enumerate(_bare(c))),
        {LLAMA_CPP: "wrong: it has every fourth layer without rotation"},
    ),
    Content(
        "another rotation than RoPE of base 10,000 in Gemma 1 and 2, GPT-NeoX, StableLM, Falcon",
        lambda c: _is(c, "gemma", "gemma2", "gpt_neox", "stablelm", "falcon") and not _plain(c),
        {LLAMA_CPP: "wrong: its converter drops the base and the scaling"},
    ),
    Content(
        "a scaling in Gemma 1 and 2, StableLM, StarCoder2",
        lambda c: _is(c, *_UNSCALED) and _kind(c) != "default",
        {SGLANG: "wrong: its classes of these models ignore the scaling"},
    ),
    Content(
        "a base that is no whole number in StarCoder2",
        lambda c: _is(c, "starcoder2") and _rope(c)["rope_theta"] % 1 != 0,
        {SGLANG: "wrong: it rounds the base down"},
    ),
    Content(
        "windows in Qwen2, Qwen3, Mistral, Ministral 3, Phi-3, StarCoder2",
        lambda c: _is(c, "qwen2", "qwen3", "mistral", "ministral3", "phi3", "starcoder2") and bool(_windows(c)),
        {LLAMA_CPP: "wrong: it has no windows in these models", SGLANG: "wrong: it has no windows in these models"},
    ),
    Content(
        "windows on some layers of Qwen2, Qwen3",
        lambda c: _is(c, "qwen2", "qwen3") and _windows(c) == {True, False},
        {VLLM: "wrong: it gives no window to single layers"},
    ),
    Content(
        "windows in SmolLM3",
        lambda c: _is(c, "smollm3") and bool(_windows(c)),
        {LLAMA_CPP: "wrong: its converter drops windows", SGLANG: "wrong: windows of one token more"},
    ),
    Content(
        "biases of attention in Qwen3, SmolLM3, Gemma",
        lambda c: _is(c, "qwen3", "smollm3", "gemma") and bool(c.get("attention_bias")),
        {
            LLAMA_CPP: "does not start: it has no such biases",
            VLLM: ByFamily("wrong: it drops biases", {("smollm3",): ""}),
            SGLANG: ByFamily("", {("gemma",): "wrong: it drops biases"}),
        },
    ),
    Content(
        "biases of the MLP in Llama",
        lambda c: _is(c, "llama") and bool(c.get("mlp_bias")),
        {SGLANG: "wrong: it drops the biases of the MLP"},
    ),
    Content(
        "GPT-NeoX with tied embeddings",
        lambda c: _is(c, "gpt_neox") and bool(c["tie_word_embeddings"]),
        {LLAMA_CPP: "does not start: it asks for the output matrix"},
    ),
    Content(
        "Gemma 2 and 3 with another attention scale than that of the head dimension",
        lambda c: _is(c, "gemma2", "gemma3_text") and c["query_pre_attn_scalar"] != c["head_dim"],
        {LLAMA_CPP: "wrong: its scale follows from the head dimension"},
    ),
    Content(
        "Gemma 3 with other windows than all but every sixth layer, or with another base than 10,000 in them",
        lambda c: _is(c, "gemma3_text") and (not _every(c, 6) or c["rope_local_base_freq"] != 10000.0),
        {LLAMA_CPP: "wrong: its converter drops the pattern and the base of the windows"},
    ),
    Content(
        "Gemma 3 with PI on layers without a window",
        lambda c: _is(c, "gemma3_text") and _kind(c) == "linear",
        {
            VLLM: "serves max_position_embeddings, not times the factor; wrong beyond",
            SGLANG: "serves max_position_embeddings, not times the factor",
        },
    ),
    Content(
        "OLMo 3 with two bases",
        lambda c: _is(c, "olmo3") and len({_rope(c, kind)["rope_theta"] for kind in by_layer_type(c)}) > 1,
        dict.fromkeys((LLAMA_CPP, SGLANG), "wrong: it has one base"),
    ),
    Content(
        "OLMo 3 with PI",
        lambda c: _is(c, "olmo3") and _kind(c) == "linear",
        {SGLANG: "wrong beyond max_position_embeddings: the table of layers with a window ends there"},
    ),
    Content(
        "OLMo 3 with a scaling on layers with a window",
        lambda c: _is(c, "olmo3") and _kind(c, "sliding_attention") != "default",
        dict.fromkeys((LLAMA_CPP, SGLANG), "wrong: it scales layers without a window alone"),
    ),
    Content(
        "EXAONE 4 with windows",
        lambda c: _is(c, "exaone4") and bool(_windows(c)),
        {LLAMA_CPP: "wrong: it has windows in models of 64 layers alone"},
    ),
    Content(
        "EXAONE 4 with other windows than on all but every so many layers",
        lambda c: _is(c, "exaone4") and bool(_windows(c)) and c["sliding_window_pattern"].lstrip("L") != "G",
        {SGLANG: "wrong: it takes the last layer of the pattern for the one without a window"},
    ),
    Content(
        "EXAONE 4 with another base than 1,000,000, or another epsilon than 1e-6",
        lambda c: _is(c, "exaone4") and ((_rotates(c) and _rope(c)["rope_theta"] != 1e6) or c["rms_norm_eps"] != 1e-6),
        {SGLANG: "wrong: it has these values in all models"},
    ),
    Content(
        "Cohere 2 with windows",
        lambda c: _is(c, "cohere2") and bool(_windows(c)),
        dict.fromkeys((VLLM, SGLANG), "wrong: windows of one token more"),
    ),
    Content(
        "Cohere 2 with other windows than all but every fourth layer, or a scaling",
        lambda c: _is(c, "cohere2") and (not _every(c, 4) or _kind(c) != "default"),
        {LLAMA_CPP: "wrong: its converter drops the pattern and the scaling"},
    ),
    Content(
        "GraniteSWA without windows",
        lambda c: _is(c, "granite_swa") and not _windows(c),
        {LLAMA_CPP: "does not start: it asks for a window"},
    ),
    Content(
        "GraniteSWA with several bases",
        lambda c: _is(c, "granite_swa") and len({base for base in c["layer_rope_theta"] if base}) > 1,
        {LLAMA_CPP: "wrong: it has one base"},
    ),
    Content(
        "Ministral 3 for more than its original length",
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
        "Falcon with an MLP that is not four times as wide as the model",
        lambda c: _is(c, "falcon") and c["ffn_hidden_size"] != 4 * c["hidden_size"],
        dict.fromkeys((LLAMA_CPP, VLLM), "does not start: it does not read ffn_hidden_size"),
    ),
    Content(
        "Falcon with sequential blocks",
        lambda c: _is(c, "falcon") and not c["parallel_attn"],
        {LLAMA_CPP: "does not start: its converter has no second norm"},
    ),
    Content(
        "GPT-2 with an MLP that is not four times as wide as the model",
        lambda c: _is(c, "gpt2") and c["n_inner"] not in (None, 4 * c["n_embd"]),
        {LLAMA_CPP: "does not start: it does not read n_inner"},
    ),
    Content(
        "GPT-J", lambda c: _is(c, "gptj"), {LLAMA_CPP: _NOT_CONVERTED, SGLANG: "wrong: it drops the bias of the output"}
    ),
    Content("OPT", lambda c: _is(c, "opt"), {LLAMA_CPP: _NOT_CONVERTED}),
    Content("BLOOM", lambda c: _is(c, "bloom"), {SGLANG: _NO_CLASS}),
    Content("MPT", lambda c: _is(c, "mpt"), {LLAMA_CPP: _NOT_CONVERTED, VLLM: _NO_CLASS, SGLANG: _NO_CLASS}),
    Content(
        "Gemma 4", lambda c: _is(c, "gemma4_text"), {SGLANG: "does not start: it reads one head size for all layers"}
    ),
    Content(
        "Gemma 4 without p-RoPE in its full layers",
        lambda c: _is(c, "gemma4_text") and _kind(c) != "proportional",
        {LLAMA_CPP: "does not start: its converter asks for p-RoPE"},
    ),
    Content(
        "Gemma 4 with PI",
        lambda c: _is(c, "gemma4_text") and _kind(c) == "linear",
        {VLLM: "wrong beyond max_position_embeddings: its tables end there"},
    ),
    Content(
        "Gemma 4 with p-RoPE and PI",
        lambda c: _is(c, "gemma4_text") and _kind(c) == "proportional" and "factor" in _rope(c),
        dict.fromkeys((LLAMA_CPP, VLLM), "wrong: it does not read the factor"),
    ),
    Content(
        "Gemma 4, OLMo 3, Ministral 3, GraniteSWA",
        lambda c: _is(c, "gemma4_text", "olmo3", "ministral3", "granite_swa"),
        {TRANSFORMERS: "needs 5: 4.56 has no such architecture"},
    ),
    Content(
        "OLMo 2 with another scaling than PI, or dynamic NTK of a factor above 1",
        lambda c: _is(c, "olmo2") and bool(rope := c["rope_scaling"]) and not ("type" in rope and rope["factor"] > 1),
        {TRANSFORMERS: "needs 5: 4.56 refuses such a scaling"},
    ),
)  # fmt: skip


def kinds(statements: Sequence[str]) -> set[str]:
    """Which of `KINDS` some statements name; a runtime that does not start fails in no other way."""
    found = {kind for kind in KINDS if any(kind in statement for statement in statements)}
    return {NO_START} if NO_START in found else found


def fails(statements: Sequence[str]) -> bool:
    """Whether a runtime of which this is known computes another model than the export, or none, or may do so."""
    return not kinds(statements).isdisjoint((WRONG, NO_START))


def contents(config: Config) -> list[Content]:
    """What an exported `config.json` contains, in the order of `CONTENTS`."""
    return [content for content in CONTENTS if content.has(config)]


def judge(config: Config) -> dict[str, list[str]]:
    """By runtime, the reasons for which it does not compute the exported model as it is; none if it does."""
    found = contents(config)
    reasons = {name: [content.reason(name, config) for content in found] for name in RUNTIMES}
    return {name: list(dict.fromkeys(filter(None, listed))) for name, listed in reasons.items()}


def report(config: Config) -> str:
    """The lines about an export: what each runtime makes of it, and the version that was run."""
    lines = [f"Declared for {declared_length(config):,} tokens. What runtimes make of it:"]
    for name, listed in judge(config).items():
        lines.append(f"  {name} ({RUNTIMES[name]}): {'; '.join(listed) or 'right'}")
    return "\n".join(lines)


def table() -> str:
    """`CONTENTS` as a Markdown table."""
    rows = [
        ["an export with", *(f"{name} ({version})" for name, version in RUNTIMES.items())],
        ["---"] * (len(RUNTIMES) + 1),
        *([content.name, *(str(content.not_right.get(name, "right")) for name in RUNTIMES)] for content in CONTENTS),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

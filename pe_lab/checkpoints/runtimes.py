"""What other runtimes make of an exported `config.json`: which compute the same model, which do not, and why.

`CONTENTS` is the one table of it: `pe_lab.convert` prints the lines that concern an export, and docs/checkpoints.md
shows the table. transformers and llama.cpp were run (tests/data/read_with_transformers.py, read_with_llama_cpp.py); of
vLLM and SGLang the code was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pe_lab.checkpoints.rope_parameters import NO_ROTATION, declared_length

Config = Mapping[str, Any]

TRANSFORMERS, LLAMA_CPP, VLLM, SGLANG = "transformers", "llama.cpp", "vLLM", "SGLang"
# What each statement rests on: a version that was run, or whose code was read.
RUNTIMES = {
    TRANSFORMERS: "4.56.2 and 5.24.0, run",
    LLAMA_CPP: "xllamacpp 2026.10 with the converter of 2026-10-01, run",
    VLLM: "0.33.0, by its code",
    SGLANG: "0.5.23, by its code",
}
# Of other architectures, only what transformers makes of them is known.
_KNOWN = ("llama", "qwen2", "qwen3", "smollm3", "gemma", "gpt_neox")
# How a statement about a runtime that does not compute an export begins, or which of these it contains.
WRONG, NO_START, SHORTER, LONGER = "wrong", "does not start", "serves", "needs"
KINDS = (WRONG, NO_START, SHORTER, LONGER)
_OF_TRANSFORMERS = ("gpt_neox", "smollm3")  # vLLM and SGLang run these by transformers' own classes


@dataclass(frozen=True)
class Content:
    """Something that an export contains, and how the results of runtimes differ; those not named compute the same."""

    name: str  # for messages and the table
    has: Callable[[Config], bool]  # whether a `config.json` contains it
    not_right: Mapping[str, str] = field(default_factory=dict)  # by runtime, how and why


def _rope(config: Config) -> Mapping[str, Any]:
    return config.get("rope_scaling") or {}


def _kind(config: Config) -> str:
    rope = _rope(config)
    return "dropped" if rope.get("factor") == NO_ROTATION else rope.get("rope_type", "default")


def _ramp(config: Config) -> tuple[Any, ...]:
    return tuple(_rope(config)[key] for key in ("beta_fast", "beta_slow", "truncate"))


def _own_class(config: Config) -> bool:
    return config["model_type"] not in _OF_TRANSFORMERS


def _table(config: Config) -> bool:
    return _kind(config) == "longrope" and _rope(config)["short_factor"] == _rope(config)["long_factor"]


def _beyond(config: Config) -> bool:
    return _table(config) and config["max_position_embeddings"] > _rope(config)["original_max_position_embeddings"]


def _bare(config: Config) -> list[bool]:
    return [not rotates for rotates in config.get("no_rope_layers", [])]


def _windows(config: Config) -> set[bool]:
    if not config.get("use_sliding_window"):
        return set()
    return {kind == "sliding_attention" for kind in config["layer_types"]}


_DROPS_SCALING = "wrong: its converter drops the base and the scaling"
_DROPS_TABLES = "wrong: its converter drops the tables"
CONTENTS: tuple[Content, ...] = (
    Content("RoPE, also with another base (NTK)", lambda c: _kind(c) == "default"),
    Content("PI", lambda c: _kind(c) == "linear"),
    Content(
        "no encoding on any layer (`linear`, 1e30)",
        lambda c: _kind(c) == "dropped" and _own_class(c),
        {
            VLLM: "does not start: its table has max_position_embeddings x 1e30 rows, whatever --max-model-len is",
            SGLANG: "does not start: its table has max_position_embeddings x 1e30 rows",
        },
    ),
    Content(
        "no encoding on any layer, GPT-NeoX (`linear`, 1e30)",
        lambda c: _kind(c) == "dropped" and c["model_type"] == "gpt_neox",
        {
            LLAMA_CPP: _DROPS_SCALING,
            VLLM: "needs --max-model-len: its default length is multiplied by 1e30",
            SGLANG: "needs --context-length: its default length is multiplied by 1e30",
        },
    ),
    Content(
        "dynamic NTK",
        lambda c: _kind(c) == "dynamic",
        {
            LLAMA_CPP: "wrong beyond the training length: it ignores the scaling",
            VLLM: "wrong beyond the training length: its base does not follow the length",
            SGLANG: "wrong beyond the training length: its base does not follow the length",
        },
    ),
    Content("YaRN", lambda c: _kind(c) == "yarn"),
    Content(
        "YaRN with an attention factor (also NTK-by-parts)",
        lambda c: _kind(c) == "yarn" and "attention_factor" in _rope(c),
        {LLAMA_CPP: "wrong: it computes its own factor", SGLANG: "wrong: it computes its own factor"},
    ),
    Content(
        "YaRN with mscale",
        lambda c: _kind(c) == "yarn" and "mscale" in _rope(c),
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
        lambda c: _kind(c) == "llama3" and c["model_type"] in ("qwen2", "qwen3"),
        {LLAMA_CPP: "wrong: its converter drops the scaling"},
    ),
    Content(
        "LongRoPE with two tables",
        lambda c: _kind(c) == "longrope" and not _table(c),
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "one table for all lengths: the long one if --max-model-len exceeds the original length",
            SGLANG: "the table changes within a sequence that outgrows the original length",
        },
    ),
    Content("one table (p-RoPE, partial RoPE, a factor that is no whole length)", _table, {LLAMA_CPP: _DROPS_TABLES}),
    Content(
        "a table for more than the original length",
        _beyond,
        {
            LLAMA_CPP: _DROPS_TABLES,
            VLLM: "serves the original length unless --max-model-len asks for more",
            SGLANG: "rotates the token at the original length as the first one",
        },
    ),
    Content(
        "SmolLM3: other layers without rotation than every fourth",
        lambda c: bool(_bare(c)) and any(x != ((n + 1) % 4 == 0) for n, x in enumerate(_bare(c))),
        {LLAMA_CPP: "wrong: it has every fourth layer without rotation, whatever no_rope_layers is"},
    ),
    Content(
        "windows on all layers, Qwen2 and Qwen3",
        lambda c: _windows(c) == {True} and _own_class(c),
        {LLAMA_CPP: "wrong: its converter drops windows", SGLANG: "wrong: its classes of these models have no windows"},
    ),
    Content(
        "windows on some layers, Qwen2 and Qwen3",
        lambda c: _windows(c) == {True, False} and _own_class(c),
        {
            LLAMA_CPP: "wrong: its converter drops windows",
            VLLM: "wrong: its classes of these models give no window to single layers",
            SGLANG: "wrong: its classes of these models have no windows",
        },
    ),
    Content(
        "windows, SmolLM3",
        lambda c: True in _windows(c) and not _own_class(c),
        {
            LLAMA_CPP: "wrong: its converter drops windows",
            SGLANG: "wrong: windows of one token more; does not run with its Triton backend",
        },
    ),
    Content("QK-norm (Qwen3)", lambda c: c["model_type"] == "qwen3"),
    Content(
        "Gemma with another rotation than RoPE of base 10,000",
        lambda c: c["model_type"] == "gemma" and (_kind(c), c["rope_theta"]) != ("default", 10000.0),
        {LLAMA_CPP: _DROPS_SCALING},
    ),
    Content(
        "Gemma with a scaling",
        lambda c: c["model_type"] == "gemma" and _kind(c) != "default",
        {LLAMA_CPP: _DROPS_SCALING, SGLANG: "wrong: its Gemma ignores the scaling"},
    ),
    Content(
        "GPT-NeoX with tied embeddings",
        lambda c: c["model_type"] == "gpt_neox" and c["tie_word_embeddings"],
        {LLAMA_CPP: "does not load"},
    ),
    Content(
        "GPT-NeoX with another rotation than RoPE of base 10,000",
        lambda c: c["model_type"] == "gpt_neox" and (_kind(c), c["rope_theta"]) != ("default", 10000.0),
        {LLAMA_CPP: _DROPS_SCALING},
    ),
)  # fmt: skip


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
    if config["model_type"] not in _KNOWN:
        lines.append(f"  {TRANSFORMERS} ({RUNTIMES[TRANSFORMERS]}): right")
        others = ", ".join(name for name in RUNTIMES if name != TRANSFORMERS)
        return "\n".join([*lines, f"  {others}: not known for this architecture"])
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

"""The ways of reading a longer text that a report knows: their order, their look, what each one is in a
line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pe_lab.analysis.run_files import Row


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere: a colour of the stylesheet, and a dash pattern for those who see no
    colours."""

    colour: str
    dash: str | None = None
    width: float = 2.0


# Hue is the scheme (grey RoPE, green dropped, orange NoPE), dash the variant; hues are Okabe and Ito's,
# darkened.
STYLES = {
    "RoPE": Style("rope", None, 2.4),
    "cropped": Style("rope", "2 4"),
    "PI": Style("pi", "8 4"),
    "NTK": Style("ntk", "11 3 2 3"),
    "YaRN": Style("yarn"),
    "DroPE": Style("drope", "6 4", 2.4),
    "DroPE beta": Style("drope", "2 3", 2.4),
    "DroPE paper beta": Style("drope", None, 3.0),
    "NoPE": Style("nope", "3 3"),
    "NoPE beta": Style("nope", "7 3"),
    "NoPE paper beta": Style("nope"),
}
STRETCHES = ("PI", "NTK", "YaRN")
SPARE = ("extra-1", "extra-2", "extra-3", "extra-4")

DEFINITIONS = {
    "RoPE": "Rotary position embedding, as trained: queries and keys turn by an angle proportional to "
    "their position, "
    "each pair of channels at its own frequency w. Read at every length without any change.",
    "cropped": "The RoPE model as trained, never shown more than its training length of context. Not a way "
    "to read "
    "long texts, but the bar: a method that cannot beat it gains nothing from the longer context.",
    "PI": "Position interpolation: every frequency is divided by s = length / training length.",
    "NTK": "NTK-aware scaling: RoPE's base b becomes b·s^(d/(d−2)). The fastest pair is left alone, the "
    "slowest is "
    "divided by s, those between by something between.",
    "YaRN": "Pairs that turn 32 times or more within the training length are kept, those that turn less "
    "than once are "
    "divided by s, with a ramp between; attention logits grow by (0.1 ln s + 1)².",
    "DroPE": "RoPE removed after pretraining (no rotation in any layer), then a short recalibration: a "
    "little more "
    "training at the original length. Read at every length without any change.",
    "DroPE beta": "The same weights as DroPE, with attention logits multiplied by one number β(s) = 1 + c "
    "ln s, fitted "
    "on held-out text at the target length.",
    "NoPE": "Trained without any positional encoding from the first step; only the causal mask tells order.",
    "NoPE beta": "The NoPE model with attention logits multiplied by a fitted β(s).",
    "DroPE paper beta": "The same with the constant that the DroPE paper reports for its models trained from scratch, "
    "c = 0.412: nothing is fitted here.",
    "NoPE paper beta": "The NoPE model with the paper's β(s) = 1 + 0.412 ln s.",
}

GLOSSARY = {
    "training length": "The number of tokens in every training window; the model never saw a longer text. "
    "4× is a "
    "text four times as long.",
    "token": "The unit a model reads: a byte, a word or a piece of one, as the tokenizer cuts.",
    "nats per token, loss": "The mean of −ln(probability the model gave to the token that came next). Lower is better.",
    "perplexity": "e to the loss: the model is as unsure as if it chose evenly among so many tokens. Lower "
    "is better. "
    "Comparable only between models with one tokenizer, on one text.",
    "needle": "A key and its value, placed somewhere in filler text and asked for later in the same window.",
    "needle accuracy": "The share of questions for which the value is the model's first choice. Higher is better.",
    "recalibration": "The short training after the encoding was dropped, at the original length.",
    "β (beta)": "A factor on the attention logits that makes attention sharper when there is more to attend to.",
    "95% interval": "Value ± 1.96 standard errors over test tokens or questions. It says nothing of the "
    "luck of a "
    "training run: that would take several seeds.",
}

# Said where the page has them.
TASK_TERMS = {
    "depth": "Where in the text a needle stands: 0% is its beginning, 100% its end, next to the question.",
    "needle in a haystack": "A sentence with a fact, put into a long text that has nothing to do with it. The model is "
    "asked for the fact at the end, and answers in words of its own.",
    "fraction found, all found": "The share of the asked values that the answer contains, and the share of prompts "
    "whose answer contains every one. They differ only where several are asked for.",
    "RULER": "A suite of 13 tasks made for long context at any length (Hsieh et al., 2024): eight kinds of needles, "
    "variable tracing, two of word counts, two of questions about documents.",
    "LongBench": "A suite of 21 tasks on real texts of thousands of words, in English and Chinese (Bai et al., 2023). "
    "Each task has its own metric.",
}


def task_terms(suites: Collection[str], depths: bool) -> dict[str, str]:
    """The words that a page with these suites needs beside `GLOSSARY`; `depths`: it has heat maps."""
    wanted = {
        "depth": depths,
        "needle in a haystack": bool({"niah", "ruler"} & set(suites)),
        "fraction found, all found": bool({"niah", "ruler"} & set(suites)),
        "RULER": "ruler" in suites,
        "LongBench": "longbench" in suites,
    }
    return {term: TASK_TERMS[term] for term, is_there in wanted.items() if is_there}


def kind(row: Row) -> str:
    """The key of a row's method in `STYLES` and `DEFINITIONS`; "" for one this report does not know. A stretch with
    options, `yarn:factor=2`, is of that stretch's kind."""
    model, method = str(row.get("model", "")), str(row.get("method", ""))
    method = next((name for name in STRETCHES if method.lower().startswith(f"{name.lower()}:")), method)
    if is_dropped(row) or model == "NoPE":
        name = "DroPE" if is_dropped(row) else "NoPE"
        return {"as trained": name, "beta": f"{name} beta", "paper beta": f"{name} paper beta"}.get(method, "")
    if model == "RoPE":
        return "RoPE" if method == "as trained" else method if method in STYLES and "RoPE" not in method else ""
    return ""


def is_dropped(row: Row) -> bool:
    """Whether a row measured a model whose positional encoding was dropped."""
    return str(row.get("model", "")).lower() == "drope"


def is_rotary(row: Row) -> bool:
    """Whether a row measured a model that rotates (RoPE and its kin): what the dropped model has to beat."""
    return "rope" in str(row.get("model", "")).lower() and not is_dropped(row)


def order(label: str, row: Row) -> tuple:
    """Sort key: known methods in `STYLES`' order, then the others by name."""
    known = list(STYLES)
    name = kind(row)
    return (known.index(name) if name in known else len(known), label)


def assign_styles(rows: dict[str, Row]) -> dict[str, Style]:
    """A style for each label. `rows`: label -> one of its rows. A look is given once; later comers get spare
    ones."""
    styles: dict[str, Style] = {}
    spare = 0
    for label, row in sorted(rows.items(), key=lambda item: order(*item)):
        style = STYLES.get(kind(row))
        if style is None or style in styles.values():
            dash = ("none", "7 3", "2 3")[spare // len(SPARE) % 3]
            style, spare = Style(SPARE[spare % len(SPARE)], None if dash == "none" else dash), spare + 1
        styles[label] = style
    return styles

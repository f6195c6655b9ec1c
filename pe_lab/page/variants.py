"""The look of each variant on the page, and its explanation; the words of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pe_lab.results.records import Record
from pe_lab.results.scores import Table
from pe_lab.results.variants import in_order, kind


@dataclass(frozen=True)
class Style:
    """A line's colour (a name in the stylesheet), dash pattern and width."""

    colour: str
    dash: str | None = None
    width: float = 2.0


# Hue is the scheme (grey RoPE, green dropped, orange NoPE), dash the variant. The hues are those of Okabe and Ito,
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
SPARE = ("extra-1", "extra-2", "extra-3", "extra-4")
INK = Style("ink")

NAMES = {
    "cropped": "RoPE, cropped context",
    "PI": "RoPE + PI",
    "NTK": "RoPE + NTK",
    "YaRN": "RoPE + YaRN",
    "DroPE beta": "DroPE, β",
    "DroPE paper beta": "DroPE, paper's β",
    "NoPE beta": "NoPE, β",
    "NoPE paper beta": "NoPE, paper's β",
}

DEFINITIONS = {
    "RoPE": "Rotary position embedding, as trained: queries and keys are rotated by an angle proportional to their "
    "position, each pair of channels at its own frequency w. Unchanged at every length.",
    "cropped": "The RoPE model as trained, which never sees more than its training length of context. It cannot use a "
    "longer context: a variant that does not beat it gains nothing from the longer context.",
    "PI": "Position interpolation: every frequency is divided by s = length / training length.",
    "NTK": "NTK-aware scaling: RoPE's base b becomes b·s^(d/(d−2)). The fastest pair keeps its frequency, the slowest "
    "is divided by s, those between by something between.",
    "YaRN": "Pairs that rotate 32 times or more within the training length are kept, those that rotate less than once "
    "are divided by s, with a ramp between; attention logits grow by (0.1 ln s + 1)².",
    "DroPE": "RoPE removed after pretraining (no rotation in any layer), then a short recalibration: a little more "
    "training at the original length. Unchanged at every length.",
    "DroPE beta": "The same weights as DroPE, with attention logits multiplied by one number β(s) = 1 + c ln s, fitted "
    "on held-out text at the target length.",
    "NoPE": "Trained without any positional encoding from the first step; only the causal mask tells order.",
    "NoPE beta": "The NoPE model with attention logits multiplied by a fitted β(s).",
    "DroPE paper beta": "The same with a constant c that the DroPE paper reports: 0.412 for its models trained from "
    "scratch, 0.103 for models dropped after an external pretraining. Nothing is fitted here.",
    "NoPE paper beta": "The NoPE model with the paper's β(s) = 1 + 0.412 ln s.",
}

GLOSSARY = {
    "training length": "The number of tokens in every training sequence; the model never saw a longer one. 4× is a "
    "sequence four times as long.",
    "token": "The unit of a sequence: a byte, a word or a piece of one, as the tokenizer cuts.",
    "nats per token, loss": "The mean of −ln(probability the model gave to the token that came next). Lower is better.",
    "perplexity": "e to the loss: the model is as unsure as if it chose evenly among so many tokens. Lower is better. "
    "Comparable only between models with one tokenizer, on one text.",
    "needle": "A key and its value, placed somewhere in filler text and asked for later in the same sequence.",
    "needle accuracy": "The share of questions for which the value is the model's first choice. Higher is better.",
    "recalibration": "The short training after the encoding was dropped, at the original length.",
    "β (beta)": "A factor on the attention logits that makes attention sharper when there is more to attend to.",
    "95% interval": "Of one run, it covers the noise of test tokens or questions: 1.96 standard errors to both sides, "
    "and Wilson's interval where all or no answers were right. It does not cover the luck of a training run. Of a "
    "group of seeds it does: Student's t over the seeds.",
}


def assign_styles(variants: Mapping[str, Record]) -> dict[str, Style]:
    """A style for each label (with one of its records). No two share a style: later ones get spare colours."""
    styles: dict[str, Style] = {}
    spare = 0
    for label, record in in_order(variants).items():
        style = STYLES.get(kind(record))
        if style is None or style in styles.values():
            style = Style(SPARE[spare % len(SPARE)], (None, "7 3", "2 3")[spare // len(SPARE) % 3])
            spare += 1
        styles[label] = style
    return styles


def comparison_styles(table: Table) -> dict[str, Style]:
    """The styles of a table of several runs, where one variant has several rows."""
    return {label: style for label, record in table.variants.items() if (style := STYLES.get(kind(record)))}

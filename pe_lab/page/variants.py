"""The words of the page: names and explanations of variants, suites and terms; and the look of each variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pe_lab.evaluation.suites import SUITES, terms
from pe_lab.evaluation.suites import title as suite_title
from pe_lab.page.colours import SPARE, STYLES, Style
from pe_lab.results.records import Record
from pe_lab.results.table import Table
from pe_lab.results.variants import in_order, kind

__all__ = ["suite_title"]

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
    "scratch, 0.103 for models dropped after an external pretraining. Nothing is fitted here, so it is the constant of "
    "another model.",
    "NoPE paper beta": "The NoPE model with the paper's β(s) = 1 + 0.412 ln s.",
}

# What a model is whose encoding is none of the above, by the display name of the encoding or of what is added to it.
FAMILIES = {
    "Partial RoPE": "RoPE on the first channels of each head only; the other channels know no position.",
    "ALiBi": "A penalty on the attention logits that grows with the distance, with a fixed slope for each head.",
    "learned positions": "A learned vector for each position, added to the embedding of the token.",
    "sinusoidal": "Sines and cosines of the position, of many wavelengths, added to the embedding of the token.",
    "learned ALiBi": "ALiBi with slopes that are learned.",
    "T5's bias": "A learned number on the attention logits for each head and each range of distances.",
    "KERPLE (log)": "A penalty on the attention logits that grows with the logarithm of the distance, with learned "
    "parameters for each head.",
    "KERPLE (power)": "A penalty on the attention logits that grows with a power of the distance, with learned "
    "parameters for each head.",
    "FIRE": "A bias on the attention logits that a small network computes from the distance as a part of the query's "
    "position.",
    "forgetting": "The forgetting transformer: the tokens between a query and a key reduce the key's weight, by a "
    "learned gate.",
    "CoPE": "Contextual position encoding: positions count the tokens that the query chooses.",
    "clipped RoPE": "RoPE whose slow pairs are slowed further, down to no rotation.",
    "xPos": "RoPE whose logits decay with the distance, those of fast pairs more.",
    "FoPE": "Fourier position embedding: each pair of channels rotates with a series of frequencies.",
    "PoPE": "Polar coordinate embedding: the content gives the amplitude and the position the angle.",
    "gated RoPE": "Logits with and without rotation, mixed by a gate for each query head.",
    "Selective RoPE": "RoPE to which each token adds an angle of its own.",
    "rotation by content": "Each token rotates queries and keys by an angle of its own; nothing is summed over tokens.",
    "the notebook's YaRN": "The scaling that the authors of DroPE call YaRN in their notebook: position n becomes "
    "n m(n).",
    "the notebook's bias": "The bias that the authors of DroPE use in their notebook: a number on the diagonal of the "
    "logits.",
    "gated output": "Each head's output is multiplied by a gate that the token computes.",
    "XSA": "Exclusive self-attention: a head's output without its part along the token's own value.",
    "gated XSA": "Exclusive self-attention by a share that is learned for each head.",
    "sink": "One more learned logit for each head, to which attention can go that no token is to have.",
    "SSMax": "Attention logits are multiplied by s ln(n), n the number of tokens, with s learned for each head.",
    "Llama 4's temperature": "Queries grow with the logarithm of their position, as in Llama 4.",
}
AS_MEASURED = {
    "as trained": "Unchanged at every length.",
    "cropped": "Never sees more than its training length of context.",
    "PI": "The frequencies of its rotation are divided by s = length / training length (position interpolation).",
    "NTK": "Its rotation has a larger base (NTK-aware scaling): slow pairs are slowed most.",
    "YaRN": "Its slow pairs are slowed by s = length / training length, its fast ones kept, and its logits grow.",
    "beta": "Its attention logits are multiplied by one number β(s), fitted on held-out text at the target length.",
    "paper beta": "Its attention logits are multiplied by β(s) = 1 + c ln s with a constant of the DroPE paper.",
    "dropped": "Its positional encoding is removed, without training afterwards.",
}


def definition(record: Record) -> str:
    """What a record's variant is, in a sentence or two, for every variant that there is."""
    if name := kind(record):
        return DEFINITIONS[name]
    model, scaled = str(record.get("model") or ""), ""
    if model.endswith(")") and not model.endswith(tuple(FAMILIES)):  # KERPLE (log)
        model, _, scaled = model.removesuffix(")").rpartition(" (")
    families = list(dict.fromkeys(part for layers in model.split("/") for part in layers.split(" + ") if part))
    parts = [_family(name) if len(families) == 1 else f"{name}: {_family(name)}" for name in families]
    if "/" in model:
        parts.insert(0, "Its layers have different encodings.")
    if scaled:
        parts.append(f"It was trained with frequencies that are scaled already ({scaled}).")
    variant = str(record.get("variant") or "")
    if variant in AS_MEASURED:
        parts.append(AS_MEASURED[variant])
    elif variant:
        parts.append(f"Here its weights are used under another encoding than they were trained with: {variant}.")
    return " ".join(parts)


def _family(name: str) -> str:
    """A sentence about an encoding; one that the run's own code registered is named as such."""
    known = FAMILIES.get(name) or DEFINITIONS.get(name, "").removesuffix(" Unchanged at every length.")
    if name.startswith("p-RoPE "):
        return (
            f"RoPE on {name.removeprefix('p-RoPE ')} of the pairs of channels, the fastest; the others do not rotate."
        )
    return known or f"The encoding {name}, of the run's own code."


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
    return {label: style for label, record in table.rows.items() if (style := STYLES.get(kind(record)))}


# ---------------------------------------------------------------------------------------------------------------------
# Suites

SCORED = ("needles", "perplexity")  # the suites that a verdict is made of, the first one first
ORDER = ("needles", *(name for name in SUITES if name != "needles"))
ABOUT = {name: suite.about for name, suite in SUITES.items() if suite.about}
DEPTH = "Where in the sequence a needle stands: 0% is its beginning, 100% its end, next to the question."


def task_terms(suites: Collection[str], depths: bool) -> dict[str, str]:
    """The glossary entries of these suites; `depths`: the page has heat maps."""
    return ({"depth": DEPTH} if depths else {}) | terms(suites)


def task_suites(names: Collection[str]) -> list[str]:
    """Suites in the order of the page: the known ones first, then by name."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def task_name(table: Table) -> str:
    """A task's display name."""
    return table.source.replace("_", " ")


def table_title(table: Table, name_source: bool = False) -> str:
    """`RULER, niah single 1` of a prompted task; the suite, with its source on request, of any other table."""
    title = suite_title(table.suite)
    if table.prompted:
        return f"{title}, {task_name(table)}"
    return f"{title} on {table.source}" if table.source and name_source else title


def metric_name(table: Table) -> str:
    """The display name of a prompted task's metric: `fraction found`."""
    return table.metric.replace("_", " ")

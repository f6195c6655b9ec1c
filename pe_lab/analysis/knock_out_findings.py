"""What the analysis `knock_out` found, as sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import Mean, interval, mean_of
from pe_lab.results.table import TextTable

Head = tuple[int, int]  # layer, query head
MASKS = {  # what is done to a head, and the state of the head afterwards
    "zero": ("masking", "add nothing to the residual stream"),
    "uniform": ("making uniform", "attend to all tokens alike"),
    "nope": ("dropping the encoding of", "have no positional encoding"),
}


@dataclass(frozen=True)
class Knocked:
    """What was measured of one variant.

    Attributes:
      retrieval: attention to the needle in the choosing half of the sequences.
      heads: the retrieval heads, the strongest first.
      drawn: D random draws of other heads.
      found: whether each answer was found, by masked heads and sequence: "none", ("retrieval", k) or ("random", k, d).
      log_prob: mean log-probability of the answer tokens, likewise [S].
    """

    name: str
    retrieval: Float[np.ndarray, "S N H"]
    heads: tuple[Head, ...]
    drawn: tuple[tuple[Head, ...], ...]
    found: dict[Any, list[list[bool]]]
    log_prob: dict[Any, Float[np.ndarray, " S"]]

    def keys(self, kind: str, count: int) -> list[Any]:
        """The keys of the measurements with `count` heads of a kind masked: one, or one a draw."""
        if count == 0:
            return ["none"]
        draws = range(len(self.drawn))
        return [("retrieval", count)] if kind == "retrieval" else [("random", count, d) for d in draws]

    def share(self, kind: str, count: int) -> Mean:
        """The share of answers found. The answers of a sequence are one cluster, over all draws."""
        found = [self.found[key] for key in self.keys(kind, count)]
        units = [(s, float(x)) for draw in found for s, answers in enumerate(draw) for x in answers]
        mean = mean_of([x for _, x in units], [s for s, _ in units])
        assert mean is not None
        return mean

    def by_sequence(self, kind: str, count: int) -> Float[np.ndarray, " S"]:
        """The share of answers found in each sequence; mean over draws."""
        found = [self.found[key] for key in self.keys(kind, count)]
        return np.mean([[np.mean(answers) for answers in draw] for draw in found], axis=0)

    def lost(self, kind: str, count: int) -> Float[np.ndarray, " S"]:
        """What masking changes in the mean log-probability of the answer, by sequence; mean over draws."""
        found = [self.log_prob[key] for key in self.keys(kind, count)]
        return np.mean(found, axis=0) - self.log_prob["none"]


def findings(mask: str, results: Sequence[Knocked], counts: Sequence[Sequence[int]]) -> Findings:
    several = len(results) > 1
    numbers: dict[str, np.ndarray] = {}
    figures: list[Figure] = []
    sentences: list[str] = []
    rows: list[tuple[str, ...]] = []
    heads: dict[str, Any] = {}
    for v, (one, each) in enumerate(zip(results, counts, strict=True)):
        suffix, of = (f"_{v}", f" of {one.name}") if several else ("", "")
        sentences += _sentences(mask, one, each)
        figures += _figures(mask, one, each, suffix, of)
        rows += _rows(one, each)
        numbers |= {f"retrieval{suffix}": one.retrieval, f"counts{suffix}": np.array(each)}
        for kind in ("retrieval", "random"):
            numbers[f"{kind}_found{suffix}"] = np.stack([one.by_sequence(kind, k) for k in (0, *each)])
            numbers[f"{kind}_log_prob_change{suffix}"] = np.stack([one.lost(kind, k) for k in (0, *each)])
        heads[one.name] = {"retrieval": one.heads, "random": one.drawn}
    shapes = {
        "retrieval": "[S of the choosing half, N, H] sequence, layer, query head; attention to the needle",
        "counts": "[k] numbers of masked heads",
        "*_found": "[1 + k, S of the other half] share of answers found, with no heads and with k masked",
        "*_log_prob_change": "[1 + k, S of the other half] change of the answer tokens' mean log-probability, nats",
    }
    title = f"Answers found with heads masked ({mask}), and change of log-probability in nats (95% intervals)"
    table = TextTable(title, ("model", "masked heads", "found", "log-probability"), tuple(rows), words=2)
    return Findings(tuple(sentences), (table,), tuple(figures), numbers, shapes, {"heads": heads})


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _share(mean: Mean) -> str:
    return f"{mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}]"


def _rows(one: Knocked, counts: Sequence[int]) -> list[tuple[str, ...]]:
    rows = [(one.name, "none", _share(one.share("retrieval", 0)), "")]
    for k in counts:
        for kind in ("retrieval", "random"):
            rows.append(
                (one.name, f"{k} {kind}", _share(one.share(kind, k)), interval(one.lost(kind, k)).words("{:.2f}"))
            )
    return rows


def _sentences(mask: str, one: Knocked, counts: Sequence[int]) -> list[str]:
    mean = one.retrieval.mean(0)
    n, h = one.heads[0]
    weight = interval(one.retrieval[:, n, h]).words("{:.3f}")
    found = [
        f"{one.name}: layer {n} head {h} attends most to the needle, with weight {weight}; the "
        f"mean over all heads is {mean.mean():.3f}."
    ]
    unmasked = one.share("retrieval", 0)
    for k in counts:
        found.append(
            f"{one.name}: {MASKS[mask][0]} {_counted(k, 'retrieval head')} takes the share of answers found from "
            f"{_share(unmasked)} to {_share(one.share('retrieval', k))}, and the same with "
            f"{_counted(k, 'random other head')} to {_share(one.share('random', k))} "
            f"({_counted(len(one.drawn), 'draw')})."
        )
    return [*found, f"{one.name}: {verdict(one, counts, mask)}"]


def verdict(one: Knocked, counts: Sequence[int], mask: str = "zero") -> str:
    """Whether answers depend on the retrieval heads, or on their encoding, more than on as many random others."""
    unmasked = one.share("retrieval", 0)
    if unmasked.low < 0.1:
        return f"undecided: with nothing masked it finds {_share(unmasked)} of the answers, too few to lose any."
    # One test, over all counts: the count with the largest difference would be the luckiest one too.
    differences = np.mean([one.by_sequence("random", k) - one.by_sequence("retrieval", k) for k in counts], axis=0)
    around = interval(differences)
    confirmed = "confirmed" if around.low > 0 else "not confirmed"
    on = "the encoding of the retrieval heads" if mask == "nope" else "the retrieval heads"
    return (
        f"{confirmed} that the answers depend on {on} more than on random ones: over {', '.join(map(str, counts))} "
        f"heads, the share of answers lost is larger by {around.words('{:.2f}')}."
    )


def _figures(mask: str, one: Knocked, counts: Sequence[int], suffix: str, of: str) -> list[Figure]:
    N, H = one.retrieval.shape[1:]
    weights = HeatMaps(
        f"retrieval_scores{suffix}",
        f"Attention to the needle{of}, by layer and head",
        "The weight from the query that predicts a token of the answer to the same token in the needle; mean over "
        "questions and sequences.",
        one.retrieval.mean(0)[None],
        ("all questions",),
        layer_names(range(N)),
        tuple(f"head {h}" for h in range(H)),
        "",
        "layer",
        "query head",
        "attention weight",
    )
    x = np.asarray((0, *counts), np.float64)
    kinds = {"retrieval": "retrieval heads", "random": "random heads"}
    shares, changes = [], []
    for kind, label in kinds.items():
        means = [one.share(kind, k) for k in (0, *counts)]
        shares.append(Line(label, x, *(np.array([getattr(m, f) for m in means]) for f in ("score", "low", "high"))))
        around = interval(np.stack([one.lost(kind, k) for k in (0, *counts)], axis=1))
        changes.append(Line(label, x, around.mean, around.low, around.high))
    how = f"Masked heads {MASKS[mask][1]}."
    published = "Published for 87 heads of a larger model: 0.00, and 1.00 for random ones (arXiv 2606.21249)."
    return [
        weights,
        LineCharts(
            f"needles_found{suffix}",
            f"Answers found{of}, by masked heads",
            f"{how} Retrieval heads attend most to the needle in other prompts. 95% intervals (Wilson's, by prompt). "
            f"{published}",
            (("", tuple(shares)),),
            "masked heads",
            "share of answers found",
        ),
        LineCharts(
            f"answer_log_prob{suffix}",
            f"Change of the answer's log-probability{of}, by masked heads",
            f"{how} Mean over the tokens of the answers, less that with nothing masked; 95% intervals over prompts.",
            (("", tuple(changes)),),
            "masked heads",
            "change of log-probability, nats",
        ),
    ]

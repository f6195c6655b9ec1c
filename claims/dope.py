"""DoPE: heads chosen by their entropy and left without encoding, beyond the training length, without training."""

import argparse
import dataclasses

import numpy as np

import pe_lab
from pe_lab.analysis import head_entropy
from pe_lab.analysis.losses import Streams
from pe_lab.analysis.sequences import Sequences, data_of, prompts, symbol_windows, text_windows
from pe_lab.evaluation.tasks.suites import open_tasks
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.claims import Claim, Criterion, Precondition, Reference, shape
from pe_lab.positional import NTK, dope_by_all

from .arms import FOUND, ROPE

FACTOR, HEADS, WINDOWS = 4, 3, 32
HAYSTACK = "essays"
INDICATORS, RANKS, ORDERS = ("query", "key"), ("1", "8", "full"), ("ascending", "descending")


def needles(subject: Subject, length: int) -> Sequences:
    """Windows of the needles that the model was trained with; of a model that was not, prompts of niah."""
    data = data_of(subject)
    if data is None or data.prepared:
        arguments = argparse.Namespace(haystack=HAYSTACK, samples=WINDOWS, depths=None)
        (task,) = open_tasks({"niah": ("standard",)}, arguments)
        return prompts(task, subject.lm.tokenizer, length, WINDOWS, 0)
    return symbol_windows(subject, length, WINDOWS, 0)


def denoised(directory) -> dict[str, float]:
    """Needles and text at 4x under NTK, as it is and with three heads of each selection without encoding."""
    trained = pe_lab.load(directory)
    length = FACTOR * trained.training_length
    scaled = trained.with_positional(
        [
            dataclasses.replace(one, encoding=dataclasses.replace(one.encoding, scaling=NTK(FACTOR)))
            for one in trained.layers
        ]
    )
    subject = Subject(trained, "rope", str(directory))
    asked = needles(subject, length)
    text = text_windows(None, subject, length, WINDOWS)
    # Heads are chosen on other text than that which is scored.
    chosen_on = text_windows(None, subject, length, 2 * WINDOWS).tokens[1::2][:8]
    retrieved, prose = Streams(scaled, asked.tokens), Streams(scaled, text.tokens)

    def numbers(name, layers) -> dict[str, float]:
        lm = dataclasses.replace(scaled, layers=layers)
        right = retrieved.under(lm).scores(asked.questions.at, asked.questions.answers)[1]
        return {
            f"needles {name}": float(right.mean()),
            f"text {name}": float(prose.under(lm).losses(text.targets).mean()),
        }

    found = numbers("NTK", scaled.layers)
    rng = np.random.default_rng(0)
    draws = [rng.permutation(len(scaled.layers) * scaled.config.heads)[:HEADS] for _ in range(8)]
    selections = {"random": draws}
    for indicator in INDICATORS:
        spectra = head_entropy.measure(scaled, chosen_on, indicator=indicator, stage="post_ntk")
        for rank in RANKS:
            order = np.argsort(spectra.score(rank).mean(0).ravel(), kind="stable")
            for name, places in zip(ORDERS, (order[:HEADS], order[::-1][:HEADS]), strict=True):
                selections[f"{indicator} {rank} {name}"] = [places]
    for name, drawn in selections.items():
        each = [
            numbers(name, dope_by_all(scaled.layers, [divmod(int(p), scaled.config.heads) for p in places]))
            for places in drawn
        ]
        found |= {key: float(np.mean([one[key] for one in each])) for key in each[0]}
    return found


SELECTIONS = [f"{indicator} {rank} {order}" for indicator in INDICATORS for rank in RANKS for order in ORDERS]

CLAIM = Claim(
    sentence="Beyond the training length, taking the encoding of heads that are chosen by their matrix entropy finds "
    "more needles under NTK: of high entropy by the truncated one, and of low entropy by the whole.",
    quote="For the truncated variant, we sort values in descending order and prune the low-entropy heads; for the "
    "matrix entropy, we sort in ascending order and prune the high-entropy heads. Both strategies perform well, but "
    "truncated matrix entropy typically achieves better results.",
    paper="DoPE, section 5.2 on Table 1, whose caption has the orders the other way",
    arms=(ROPE,),
    criteria=tuple(
        Criterion(
            f"needles at 4x: heads by {name} find more than NTK alone",
            f"rope: needles {name}",
            ("rope: needles NTK",),
            by=0.02,
            unit=FOUND,
        )
        for name in ("key 8 descending", "key full ascending")
    ),
    preconditions=(
        Precondition(
            f"there are at least {32 * HEADS} heads, of which {HEADS} are one in 32 (DoPE takes 1 to 32 of 1,024)",
            "shape: heads",
            least=32 * HEADS,
        ),
    ),
    references={"shape": Reference("rope", shape)},
    evaluation=None,
    recipes={"rope": "configs/table1.py:method=rope"},
    measure=denoised,
    curves={
        "needles found at 4x": {
            "NTK": "rope: needles NTK",
            "random": "rope: needles random",
            **{name.replace("ending", ""): f"rope: needles {name}" for name in SELECTIONS if " 8 " in name},
        },
        "text loss at 4x, nats": {
            "NTK": "rope: text NTK",
            "random": "rope: text random",
            **{name.replace("ending", ""): f"rope: text {name}" for name in SELECTIONS if " 8 " in name},
        },
    },
)

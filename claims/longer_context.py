"""A longer context for the demo's model at equal FLOPs: a searched table and a late drop of slow pairs against YaRN."""

from pe_lab.config import DataConfig
from pe_lab.lab.claims import Arm, Claim, Criterion, Precondition
from pe_lab.lab.extend.extension import data_of, load
from pe_lab.lab.extend.methods import Chosen
from pe_lab.lab.extend.numbers import At
from pe_lab.lab.extend.screening import screen
from pe_lab.storage import path

# The demo's RoPE model: 64 tokens, base 200. An arm at 512 tokens reads 1.5M of them, 3.2e12 FLOPs; one at 64 tokens
# reads as many FLOPs in 2.0M. The search takes 64 candidates of 8,192 tokens, 11% of that.
TRAINED, TARGET, STEPS, SHORT_STEPS, SEARCH = 64, 512, 732, 968, 0.116
LENGTHS = (TRAINED, 2 * TRAINED, 4 * TRAINED, TARGET)
OPTIONS = {"documents": 16, "windows": 64, "tokens": 16384, "fit_tokens": 8192}
RECIPE = "configs/extend.py:from={parent},data=own"


def long(name: str, positional: str, steps: int = STEPS, surgery: str = "") -> Arm:
    """An arm at 512 tokens."""
    kept = "kept" if surgery else positional
    return Arm(name, f"{RECIPE},positional='{kept}',length={TARGET},batch=4,steps={steps},rate=3e-4", ROPE, surgery)


def measure(directory) -> dict[str, float]:
    """The losses and the needles found at each length, with the logit scale that fits other text best."""
    model, run = load(str(directory)), path("the run", directory)
    parent = load(model.checkpoint.metadata["config"]["phases"][0]["init_from"])
    data: DataConfig = data_of(None, parent)
    as_trained = Chosen("unchanged", model.lm.layers)
    found = screen(model, data, [as_trained], LENGTHS, run / "longer", OPTIONS).numbers["unchanged"]
    names = {"text": "text", "answers": "loss of needles", "found": "needles"}
    metrics = {
        f"{title} {length // TRAINED}x": found[At(name, length)].mean
        for name, title in names.items()
        for length in LENGTHS
    }
    at_target = [metrics[f"{title} {TARGET // TRAINED}x"] for title in ("text", "loss of needles")]
    return metrics | {"score 8x": sum(at_target)}


ROPE = Arm("demo_rope", "configs/drope_laptop.py:rope")
UNCHANGED = long("longer_unchanged", "kept")
YARN = long("longer_yarn", f"rope:base=200,scaling=yarn,factor=8,original_length={TRAINED}")
SEARCHED = long(
    "longer_searched",
    "kept",
    round(STEPS * (1 - SEARCH)),
    "--search --length=8x --population=16 --iterations=6 --sequences=8",
)
SLOW_HALF = Arm(
    "longer_slow_half",
    f"{RECIPE},positional='rope:base=200,fraction=0.5',length={TRAINED},batch=32,steps={SHORT_STEPS},rate=3e-3",
    ROPE,
)

CLAIM = Claim(
    sentence="At eight times the training length and equal FLOPs, a table that an evolution found is at least as good "
    "as YaRN after further training, and YaRN is better than a drop of the slower half of the pairs.",
    paper="ours: LongRoPE2's abstract (arXiv 2502.20082), of models of 3.8B and 8B, has 'an effective RoPE rescaling "
    'algorithm that adopts evolutionary search guided by "needle-driven" perplexity\'',
    arms=(UNCHANGED, YARN, SEARCHED, SLOW_HALF),
    criteria=(
        Criterion(
            "the searched table at 8x: at least as low a loss on text and needles as YaRN",
            "longer_searched: score 8x",
            ("longer_yarn: score 8x",),
            lower=True,
            unit="nats",
            tolerance=0.05,
        ),
        Criterion(
            "YaRN at 8x: a lower loss on text and needles than without the slow half",
            "longer_yarn: score 8x",
            ("longer_slow_half: score 8x",),
            lower=True,
            unit="nats",
            by=0.01,
        ),
    ),
    preconditions=(
        Precondition(
            "further training under YaRN keeps 95% of the needles of 1x", "longer_yarn: needles 1x", least=0.95
        ),
        Precondition(
            "without a change, further training at 8x does not reach YaRN",
            "longer_unchanged: score 8x - longer_yarn: score 8x",
            least=0.0,
        ),
    ),
    help="fitted",
    evaluation=None,
    measure=measure,
    curves={
        f"{title}, by length": {
            "unchanged": f"longer_unchanged: {metric} {{x}}x",
            "YaRN": f"longer_yarn: {metric} {{x}}x",
            "searched": f"longer_searched: {metric} {{x}}x",
            "slow half dropped": f"longer_slow_half: {metric} {{x}}x",
        }
        for title, metric in (("text loss in nats", "text"), ("needles found", "needles"))
    },
    tried="FLOPs are equal as pe_lab.extend counts them, of visible keys and with the search's; the table of arms has "
    "those of all keys, without it. The rule was written before the three seeds, after one run of pe_lab.extend with "
    "0.3M tokens an arm and two seeds, whose models were the demo's at seed 0.",
)

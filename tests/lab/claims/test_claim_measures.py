"""What claims measure: spikes of the loss, onsets, scores, and the numbers of a config. 5 s."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pe_lab.config import Config, from_dict
from pe_lab.errors import DataError
from pe_lab.lab.claims import onset, scores, shape, spikes, trigram
from pe_lab.lab.claims.measures import TrigramTable, largest_excess, lasting_spikes
from pe_lab.recipes import load_config

WINDOW, LASTS = 20, 5


def falling(steps=400, noise=0.05, seed=0):
    """A loss that falls from 5 to 3, with noise."""
    rng = np.random.default_rng(seed)
    return 3 + 2 * np.exp(-np.arange(steps) / 60) + rng.normal(0, noise, steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_has_no_spike(seed):
    assert lasting_spikes(falling(seed=seed), WINDOW, LASTS) == 0
    assert largest_excess(falling(seed=seed), LASTS) < 0.15


def test_single_high_losses_are_no_spikes():
    """A stable run of RoPE has 31 to 43 steps whose loss or gradient norm is far above those before them."""
    loss = falling()
    loss[np.arange(30, 400, 10)] += 2
    assert lasting_spikes(loss, WINDOW, LASTS) == 0
    assert largest_excess(loss, LASTS) < 0.2


def test_a_loss_that_jumps_and_stays_is_one_spike():
    """Also beyond the window, which an ordinary running median would follow."""
    loss = falling()
    loss[200:] += 2
    assert lasting_spikes(loss, WINDOW, LASTS) == 1
    assert largest_excess(loss, LASTS) == pytest.approx(2, abs=0.2)


def test_losses_that_come_back_are_counted_each():
    loss = falling()
    for at, steps in ((100, 4), (200, 5), (300, 30)):
        loss[at : at + steps] += 2
    assert lasting_spikes(loss, WINDOW, LASTS) == 2  # four steps do not last


def test_a_diverged_loss_is_a_spike():
    loss = falling()
    loss[300:] = math.nan
    assert lasting_spikes(loss, WINDOW, LASTS) == 1
    assert largest_excess(loss, LASTS) == pytest.approx(2, abs=0.2)  # 3 at the end, and up to 5 that is known
    assert lasting_spikes(loss[290:], WINDOW, LASTS) == 1  # before there is anything to compare with
    assert largest_excess(np.full(9, math.nan), LASTS) == 0


def write_log(directory, phases):
    """A run with phases of these losses, one each ten steps, and warnings at steps of their own."""
    (directory / "run.json").write_text(json.dumps({"name": "run", "config": {}}))
    for name, losses in phases.items():
        (directory / name).mkdir()
        about = {"phase": name, "steps": 4000, "tokens_per_step": 1, "status": "complete"}
        (directory / name / "phase.json").write_text(json.dumps(about))
        records = [{"step": 10 * n, "loss": loss} for n, loss in enumerate(losses, 1)]
        warned = [{"step": n, "loss": 99.0, "event": "spike"} for n in range(300, 360)]
        validated = [{"step": n + 1, "validation_loss": 4.0} for n in range(0, 4000, 500)]
        logged = sorted([*records, *warned, *validated], key=lambda one: one["step"])
        (directory / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in logged))


def test_spikes_of_a_run_are_those_of_its_log(tmp_path):
    """Every phase is judged by itself, and warnings, which are logged at steps of their own, are not losses."""
    jumps = falling()
    jumps[200:] += 2
    write_log(tmp_path, {"short": falling() + 3, "pretrain": jumps})
    found = spikes(tmp_path)
    assert found["loss spikes"] == 1 and found["loss excess"] == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize("lost", [math.nan, math.inf, None, 1e200])
def test_a_run_that_diverged_has_a_spike_and_a_finite_excess(tmp_path, lost):
    """Logs have null for what is not finite; an infinite excess would leave the seed without a number."""
    write_log(tmp_path, {"pretrain": [*falling()[:300], *[lost] * 100]})
    found = spikes(tmp_path)
    assert found["loss spikes"] == 1 and found["loss excess"] == pytest.approx(2, abs=0.2)


def test_a_table_of_three_tokens_is_a_distribution():
    rng, vocabulary = np.random.default_rng(0), 7
    table = TrigramTable([rng.integers(0, 5, (20, 9)), rng.integers(0, 5, (3, 30))], vocabulary)
    for context in ([1, 2], [6, 6], [0, 6]):  # seen, unseen, seen with an unseen token
        tokens = np.asarray([context] * vocabulary)
        targets = np.stack([np.full(vocabulary, context[1]), np.arange(vocabulary)], 1)
        assert np.exp(-table.losses(tokens, targets)).sum(0)[1] == pytest.approx(1)


def test_a_table_predicts_what_follows_two_tokens():
    """b follows a a, and c follows b a: one token of context cannot tell them apart."""
    windows = np.asarray([[0, 0, 1, 0, 2] * 40])
    losses = TrigramTable([windows], 3).losses(windows[:, :-1], windows[:, 1:])
    assert losses[0, 6] < 0.1 and losses[0, 3] < 0.1  # b after a a; c after b a
    assert losses[0, 0] > 0.2  # the first has one token of context: a, b or c


def test_by_witten_and_bells_rule():
    """By hand: b follows a twice and c once, so two of five parts are left to single tokens."""
    table = TrigramTable([np.asarray([[0, 1], [0, 1], [0, 2]])], 4)
    uniform = (2 + 3 * 0.25) / (6 + 3)  # b is two of six tokens, of which three differ
    expected = (2 + 2 * uniform) / (3 + 2)
    assert np.exp(-table.losses(np.asarray([[0]]), np.asarray([[1]])))[0, 0] == pytest.approx(expected)


def test_numbers_of_a_config():
    assert shape(load_config("configs/claims.py:method=rope")) == {"heads": 16, "rotated pairs": 16}
    assert shape(load_config("configs/claims.py:method=partial_rope_10")) == {"heads": 16, "rotated pairs": 2}
    assert shape(load_config("configs/claims.py:method=nope"))["rotated pairs"] == 0
    wide = "width=64,head_dim=64,heads=2"  # 6 of a head's 64 channels are a tenth
    assert shape(load_config(f"configs/ladder.py:{wide},method=partial_rope_10")) == {"heads": 16, "rotated pairs": 3}
    assert shape(load_config("configs/ladder.py:width=96,method=p_rope_25")) == {"heads": 24, "rotated pairs": 4}


def test_the_table_reads_what_the_phases_train_on(tmp_path, monkeypatch):
    """1 s. Its losses have the names of a run's validation losses; needles have none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join("the key of night is seven and gone" for _ in range(3000)))
    source = {"source": "text:a.txt", "name": "prose", "weight": 0.5}
    data = {"sources": [source, {"source": "needles", "weight": 0.5}], "tokenizer": "bytes"}
    phase = {"name": "pretrain", "steps": 8, "positional": "rope", "sequence_length": 64, "batch_size": 4}
    tree = {
        "model": {"layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "kv_heads": 2},
        "data": data | {"validation_fraction": 0.3},
        "phases": [phase],
        "log": {"validation_batches": 2},
    }
    found = trigram(from_dict(Config, tree))
    assert list(found) == ["validation prose"] and found["validation prose"] < 0.5  # five bytes repeat


def logged_run(root, tree, losses):
    """A run directory of a config whose validation losses were these, one for each 1,000 tokens."""
    sources = [one["source"] for one in tree["data"]["sources"]]
    names = ("validation_loss", *(f"validation_loss/{source}" for source in sources))
    (root / "pretrain").mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"name": "run", "config": tree}))
    (root / "pretrain" / "phase.json").write_text(json.dumps({"phase": "pretrain", "steps": 8}))
    records = ({"step": n, "tokens": 1000 * n} | dict.fromkeys(names, loss) for n, loss in enumerate(losses))
    (root / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return root


def test_an_onset_is_where_the_loss_passes_the_tables(tmp_path, monkeypatch):
    """1 s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join("the key of night is seven and gone" for _ in range(3000)))
    phase = {"name": "pretrain", "steps": 8, "positional": "nope", "sequence_length": 64, "batch_size": 4}
    tree = {
        "model": {"layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "kv_heads": 2},
        "data": {"sources": [{"source": "text:a.txt"}], "tokenizer": "bytes", "validation_fraction": 0.3},
        "phases": [phase],
        "log": {"validation_batches": 2},
    }
    (table,) = trigram(from_dict(Config, tree)).values()
    found = onset(logged_run(tmp_path / "run", tree, [table + 9, table + 3, table + 1, table - 1, table - 2]))
    assert found == {"onset": pytest.approx(math.sqrt(2000 * 3000))}  # halfway between two and three thousand
    assert onset(logged_run(tmp_path / "never", tree, [table + 9, table + 3, table + 1])) == {}
    tree["data"]["sources"].append({"source": "needles", "weight": 1.0})
    with pytest.raises(DataError, match="one source of text"):
        onset(logged_run(tmp_path / "two", tree, [table + 9, table - 1]))


def scores_of(run, suite, records):
    """The numbers of a run with these records of a suite."""
    for name, content in {
        "run.json": json.dumps({"name": "run", "config": {}}),
        "pretrain/phase.json": json.dumps({"phase": "pretrain", "steps": 1, "tokens_per_step": 1}),
        f"evaluation/{suite}.jsonl": "".join(json.dumps(one) + "\n" for one in records),
    }.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(content)
    return scores(run)


def test_the_number_of_a_suite_is_the_mean_of_its_tasks(tmp_path):
    """1 s."""
    about = {"suite": "niah", "phase": "pretrain", "step": 1, "variant": "YaRN", "length": 8, "factor": 2, "samples": 4}
    rows = [
        {**about, "source": task, "score": score} for task, score in {"multi_key": 0.25, "multi_query": 0.75}.items()
    ]
    found = scores_of(tmp_path, "niah", rows)
    assert found == {"niah:multi_key 2x YaRN": 0.25, "niah:multi_query 2x YaRN": 0.75, "niah 2x YaRN": 0.5}


def test_passkeys_with_distractors_have_three_numbers_by_window(tmp_path):
    """1 s. Of other needles, by another number of distractors, are other windows."""
    about = {"suite": "passkeys", "phase": "pretrain", "step": 1, "length": 8, "factor": 2, "seed": 0, "queries": 4}
    about |= {"source": "manuals", "accuracy": 0.25, "stderr": 0.1, "accuracy_by_window": [0.5, 0.0]}
    about |= {"choice": 0.75, "choice_by_window": [1.0, 0.5], "key_gain": 1.75, "key_gain_by_window": [3.0, 0.5]}
    rows = [
        {**about, "variant": variant, "settings": {"data": "d", "passkey_windows": 2, "distractors": distractors}}
        for variant, distractors in (("as trained", 1), ("yarn:factor=2 + beta", 1), ("YaRN", 3))
    ]
    found = scores_of(tmp_path, "passkeys", rows)
    assert found["passkeys 2x"] == 0.25 and found["passkeys 2x"].windows == (0.5, 0.0)
    assert found["passkeys choice 2x"].windows == (1.0, 0.5) and found["passkeys key gain 2x"].windows == (3.0, 0.5)
    assert found["passkeys:manuals choice 2x yarn:factor=2 + beta"] == 0.75
    assert found["passkeys 2x"].text == found["passkeys 2x yarn:factor=2 + beta"].text
    assert found["passkeys 2x"].text != found["passkeys 2x YaRN"].text

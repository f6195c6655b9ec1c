"""The report of a run that met spikes and kills: marks, the table of events, and where its time went."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from run_directories import make_run

from pe_lab.page.run_charts import duration, event_table, loss_chart, time_chart
from pe_lab.results.runs import read_run

EVENT = {
    "step": 300,
    "tokens": 300 * 128,
    "event": "rewind",
    "cause": "nonfinite",
    "batches": [299],
    "at": {"loss": "nan", "grad_norm": 7.5},
    "before": {"loss": 2.25, "grad_norm": 0.5},
}
LEDGER = [
    {"start": 1, "created": 1000.0, "time": 1100.0, "seconds": {"start_up": 20.0, "step": 80.0}},
    {"start": 2, "created": 1200.0, "time": 1400.0, "seconds": {"step": 150.0, "replayed_steps": 50.0}},
]


@pytest.fixture
def run(tmp_path):
    directory = make_run(tmp_path)
    log = directory / "pretrain" / "metrics.jsonl"
    log.write_text(log.read_text() + json.dumps(EVENT) + "\n")
    (directory / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in LEDGER) + '{"start": 2, "')
    return read_run(directory)


def test_an_event_is_marked_and_in_a_table(run):
    chart = ElementTree.fromstring(str(loss_chart(run)))
    assert "rewound" in [text.text for text in chart.iter("text")]
    cells = [cell.text for cell in ElementTree.fromstring(str(event_table(run))).iter("td")]
    assert cells[-5:] == ["300", "rewound", "nan (2.25)", "7.5 (0.5)", "299"]


def test_the_file_of_batches_left_out_is_named_where_there_is_one(run):
    (event,) = [one for phase in run.phases for one in phase.events]
    assert "spikes.jsonl" in str(event_table(run))
    event["event"] = "warn"
    assert "300" in str(event_table(run)) and "spikes.jsonl" not in str(event_table(run))


def test_a_bar_for_each_start_is_as_long_as_its_parts(run):
    figure = ElementTree.fromstring(str(time_chart(run)))
    bars = [(rect.find("title").text, float(rect.get("x")), float(rect.get("width"))) for rect in figure.iter("rect")]
    # The second start is the longer one: 100 s down and 200 s of steps are 640 pixels. The sum is 400 s.
    expected = [
        ("start up: 20 s", 64, 640 * 20 / 300),
        ("step: 80 s", 64 + 640 * 20 / 300, 640 * 80 / 300),
        ("step: 2.5 min", 64, 320),
        ("replayed steps: 50 s", 64 + 320, 640 * 50 / 300),
        ("down: 100 s", 64 + 640 * 200 / 300, 640 * 100 / 300),
        ("start up: 20 s", 64, 32),
        ("step: 3.8 min", 64 + 32, 640 * 230 / 400),
        ("replayed steps: 50 s", 64 + 32 + 368, 80),
        ("down: 100 s", 64 + 32 + 368 + 80, 160),
    ]
    assert bars == [(name, pytest.approx(x, abs=0.02), pytest.approx(w, abs=0.02)) for name, x, w in expected]
    assert "goodput 57.5%" in figure.find("figcaption").text


def test_runs_without_a_ledger_or_events_are_drawn_without(tmp_path):
    run = read_run(make_run(tmp_path))
    assert str(time_chart(run)) == str(event_table(run)) == ""


@pytest.mark.parametrize(("seconds", "words"), [(7.0, "7 s"), (119.0, "119 s"), (120.0, "2.0 min"), (9000.0, "2.5 h")])
def test_durations(seconds, words):
    assert duration(seconds) == words

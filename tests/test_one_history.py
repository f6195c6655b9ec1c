"""A mixture run that is killed, extended and changed: its log, lineage and report are one history."""

import json

import pytest
from test_resume import finish, kill, line_count, wait_until
from tiny_runs import REPOSITORY, records, start, write_recipe

import pe_lab.report
from pe_lab.checkpoints import open_checkpoint

pytestmark = pytest.mark.slow


def test_three_kills_two_extensions_and_a_batch_size_are_one_history(tmp_path):
    """Five processes of about 8 s: 45 s."""
    sources = {"data": 3.0, "training": 2.0, "model": 1.0}
    for name in sources:
        text = "\n".join(path.read_text() for path in sorted((REPOSITORY / "pe_lab" / name).glob("*.py")))
        documents = [json.dumps({"text": part}) for part in text.split("\n\n\n")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(documents))
    mixture = [{"source": f"jsonl:{name}.jsonl", "weight": weight} for name, weight in sources.items()]
    phase = {
        "name": "pretrain",
        "steps": 120,
        "sequence_length": 32,
        "batch_size": 8,
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 10, "final_fraction": 0.1},
    }
    argv = [
        "pe_lab.train",
        f"--config={write_recipe(tmp_path / 'recipe')}",
        "--workdir=run",
        f"--config.data.sources={mixture}",
        "--config.data.cache_dir=cache",
        f"--config.phases=[{phase}]",
        "--config.checkpoint.every_steps=10",
        "--config.log.validate_every_steps=60",
    ]
    log = tmp_path / "run/pretrain/metrics.jsonl"
    extended = [*argv, "--extend=150", "--config.phases.0.batch_size=12"]
    for command, lines in ((argv, 20), (argv, 70), (extended, 125)):
        process = start(command, tmp_path)
        wait_until(process, lambda lines=lines: line_count(log) >= lines)
        kill(process)
    finish(start(extended, tmp_path))  # as a launcher does after a preemption
    finish(start([*argv, "--extend=170", "--config.phases.0.batch_size=12"], tmp_path))

    trained = [record for record in records(log) if "loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 171))
    metadata = open_checkpoint(tmp_path / "run").metadata
    whats = [(entry["what"], entry["step"]) for entry in metadata["lineage"]]
    changes = [(what, step) for what, step in whats if "extended" in what or "continued" in what]
    assert [what.partition(";")[0] for what, _ in changes] == [
        "extended from 120 to 150 steps (rewarm)",
        "extended from 150 to 170 steps (rewarm)",
    ]
    assert changes[0][0].endswith("continued with phases.0.batch_size 8 -> 12")
    since = changes[0][1]
    assert since % 10 == 0 and 0 < since < 120
    tokens = [32 * (8 * min(step, since) + 12 * max(step - since, 0)) for step in range(1, 171)]
    assert [record["tokens"] for record in trained] == tokens
    assert metadata["tokens"] == tokens[-1] and metadata["data_state"]["sequences"] == tokens[-1] // 32
    assert [record["source"] for record in metadata["mixture"]] == [item["source"] for item in mixture]

    assert pe_lab.report.main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert all(what.partition(" (")[0] in page for what, _ in changes) and "170 steps" in page
    keys = [change["keys"] for change in json.loads((tmp_path / "run/run.json").read_text())["changes"]]
    assert [change.get("phases.0.steps") for change in keys] == [[120, 150], [150, 170]]

"""A mixture run that is killed, made longer and changed: its log, lineage, tokens and report are one history."""

import json

import pytest
from test_resume import finish, kill, line_count, wait_until
from tiny_runs import REPOSITORY, records, start, write_recipe

import pe_lab.report
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.results.formatting import count

pytestmark = pytest.mark.slow
# Weights by step; the last start changes those from step 130 on, and has trained 150 steps by then. Every stage has a
# multiple of 4 sequences at any step, so that its tokens are exactly in the ratio of its weights.
STAGES = [(0, (2, 1, 1)), (60, (1, 1, 2)), (130, (0, 1, 1))]
LATER, SINCE = (1, 0, 1), 150


def test_three_kills_two_longer_ends_and_a_batch_size_are_one_history(tmp_path):
    """Five processes of about 8 s: 45 s."""
    sources = ("data", "training", "model")
    for name in sources:
        text = "\n".join(path.read_text() for path in sorted((REPOSITORY / "pe_lab" / name).glob("*.py")))
        documents = [json.dumps({"text": part}) for part in text.split("\n\n\n")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(documents))
    mixture = [{"source": f"jsonl:{name}.jsonl", "name": name} for name in sources]

    def weights(stages):
        return {name: [[step, weights[i]] for step, weights in stages] for i, name in enumerate(sources)}

    phase = {
        "name": "pretrain",
        "steps": 120,
        "sequence_length": 32,
        "batch_size": 8,
        "weights": weights(STAGES),
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
    longer = [*argv, "--until=150", "--config.phases.0.batch_size=12"]
    for command, lines in ((argv, 20), (argv, 70), (longer, 125)):
        process = start(command, tmp_path)
        wait_until(process, lambda lines=lines: line_count(log) >= lines)
        kill(process)
    finish(start(longer, tmp_path))  # as a launcher does after a preemption
    later = f"--config.phases.0.weights={weights([*STAGES[:2], (130, LATER)])}"
    finish(start([*argv, "--until=170", "--config.phases.0.batch_size=12", later], tmp_path))

    trained = [record for record in records(log) if "loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 171))
    metadata = open_checkpoint(tmp_path / "run").metadata
    whats = [(entry["what"], entry["step"]) for entry in metadata["lineage"]]
    changes = [(what, step) for what, step in whats if "prolonged" in what or "continued" in what]
    assert "continued with phases.0.weights.data.2.1 0 -> 1" in changes[-1][0]
    assert [what.partition(";")[0] for what, _ in changes] == [
        "prolonged from 120 to 150 steps (rewarm)",
        "prolonged from 150 to 170 steps (rewarm)",
    ]
    assert changes[0][0].endswith("continued with phases.0.batch_size 8 -> 12")
    since = changes[0][1]
    assert since % 10 == 0 and 0 < since < 120
    tokens = [32 * (8 * min(step, since) + 12 * max(step - since, 0)) for step in range(1, 171)]
    assert [record["tokens"] for record in trained] == tokens
    assert metadata["tokens"] == tokens[-1] and metadata["data_state"]["sequences"] == tokens[-1] // 32
    assert [record["source"] for record in metadata["mixture"]] == [item["source"] for item in mixture]

    def read(step):
        """The tokens of each source up to a step."""
        sums = [0, 0, 0]
        stages = [*STAGES, (SINCE, LATER)]
        for (first, stage), (last, _) in zip(stages, [*stages[1:], (170, ())], strict=True):
            first, last = (min(bound, step) for bound in (first, last))
            tokens_of_stage = (tokens[last - 1] if last else 0) - (tokens[first - 1] if first else 0)
            sums = [sum_ + tokens_of_stage * part // sum(stage) for sum_, part in zip(sums, stage, strict=True)]
        return sums

    counted = [record for record in records(log) if "read_tokens/data" in record]
    assert [record["step"] for record in counted] == [60, 120, 150, 170]
    for record in counted:
        expected = read(record["step"])
        assert sum(expected) == record["tokens"]
        for kind in ("read_tokens", "expected_tokens"):
            assert [record[f"{kind}/{name}"] for name in sources] == expected
    assert [source["read_tokens"] for source in metadata["data_state"]["sources"]] == read(170)
    assert [source["sequences"] * 32 for source in metadata["data_state"]["sources"]] == read(170)

    assert pe_lab.report.main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert all(what.partition(" (")[0] in page for what, _ in changes) and "170 steps" in page
    assert all(f">{count(tokens_read)}<" in page for tokens_read in read(170))
    keys = [change["keys"] for change in json.loads((tmp_path / "run/run.json").read_text())["changes"]]
    assert [change.get("phases.0.steps") for change in keys] == [[120, 150], [150, 170]]

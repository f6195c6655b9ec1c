"""What `report`, `sweep --table` and `evaluate` read of results: the files of a run, and sweep.json."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from .kind import Kind
from .mutations import ABSURD, damage_bytes, damage_json, places


def damage_lines(rng: random.Random, content: bytes) -> bytes:
    """JSON lines of which one, or every one in one key, has another value; or bytes of which some are damaged."""
    if rng.random() < 0.1:
        return damage_bytes(rng, content)
    records = [json.loads(line) for line in content.splitlines()]
    if rng.random() < 0.5:
        at = rng.randrange(len(records))
        lines = [json.dumps(record) for record in records]
        lines[at] = damage_json(rng, records[at])
    else:
        key, absurd = rng.choice(list(records[-1])), rng.choice(ABSURD)
        lines = [json.dumps(record | {key: absurd}) for record in records]
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def damage_one(rng: random.Random, content: bytes) -> bytes:
    """A JSON object with one absurd value, or damaged otherwise."""
    found = json.loads(content)
    if rng.random() < 0.6:
        parent, key = rng.choice(places(found))
        parent[key] = rng.choice(ABSURD)
        return json.dumps(found).encode()
    return damage_json(rng, found).encode("utf-8", "surrogatepass")


def json_files(directory: Path) -> list[Path]:
    """The files of JSON in a directory that are not empty."""
    return [path.relative_to(directory) for path in sorted(directory.rglob("*.json*")) if path.stat().st_size]


class Run(Kind):
    """A run that was evaluated, by the report."""

    name = "run"

    def prepare(self, directory: Path) -> None:
        from run_directories import make_run

        phases = (("pretrain", "rope(base=10000)", 24), ("recalibrate", "nope", 24))
        self.whole, self.target = make_run(directory, "whole", phases=phases), directory / "run"
        start = {"event": "start", "session": "a", "time": 1.0, "world": {"processes": 1}}
        ledger = [start, {"event": "interval", "session": "a", "time": 9.0, "seconds": {"step": 8.0}, "steps": 24}]
        (self.whole / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ledger))
        plan = [json.loads(line) for line in (self.whole / "evaluation" / "needles.jsonl").read_text().splitlines()]
        (self.whole / "evaluation" / "unfinished").mkdir()
        planned = json.dumps({"planned": [one | {"length": 512} for one in plan[:4]]})
        (self.whole / "evaluation" / "unfinished" / "plan.json").write_text(planned)
        shutil.copytree(self.whole, self.target)
        self.files = json_files(self.whole)

    def write(self, rng: random.Random) -> None:
        for file in self.files:
            shutil.copyfile(self.whole / file, self.target / file)
        for file in rng.sample(self.files, rng.choice((1, 1, 2))):
            damage = damage_lines if file.suffix == ".jsonl" else damage_one
            (self.target / file).write_bytes(damage(rng, (self.whole / file).read_bytes()))

    def read(self) -> None:
        from pe_lab.page.document import build_page, headline
        from pe_lab.results.runs import read_runs

        alone = read_runs([self.target])
        build_page(alone)
        headline(alone)
        build_page(read_runs([self.target, self.whole]))


class SweepFile(Kind):
    """sweep.json and the runs of its cells, by `sweep --table`."""

    name = "sweep"

    def prepare(self, directory: Path) -> None:
        from run_directories import write_evaluation
        from tiny_runs import write_recipe

        from pe_lab.lab.sweeps import make_sweep, save_sweep

        recipe = str(write_recipe(directory / "recipe"))
        phase = (
            "[{'name': 'only', 'steps': 4, 'sequence_length': 16, 'batch_size': 8, 'optimizer': {'warmup_steps': 2}}]"
        )
        grid = {"phases.0.optimizer.learning_rate": ["0.1", "0.2"]}
        made = make_sweep(recipe, grid, 2, directory / "whole", {"phases": phase})
        for n, cell in enumerate(made.cells):
            run = made.directory / cell.name
            (run / "only").mkdir(parents=True)
            info = {"phase": "only", "steps": 4, "tokens_per_step": 128, "status": "complete", "sequence_length": 16}
            (run / "only" / "phase.json").write_text(json.dumps(info))
            records = [{"step": s, "tokens": 128 * s, "loss": 3.0 + n - s / 10} for s in range(1, 5)]
            records.append({"step": 4, "validation_loss": 3.0 + n})
            (run / "only" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
            (run / "run.json").write_text(json.dumps({"name": "tiny", "config": {}}))
            methods = {("RoPE", "as trained", "RoPE"): ((0.5, 0.2), (8.0, 9.0))}
            write_evaluation(run, cell.name, methods, 16, ["only"])
        save_sweep(made)
        self.whole, self.target = made.directory, directory / "sweep"
        shutil.copytree(self.whole, self.target)
        self.files = json_files(self.whole)

    def write(self, rng: random.Random) -> None:
        for file in self.files:
            shutil.copyfile(self.whole / file, self.target / file)
        sweep = next(file for file in self.files if file.name == "sweep.json")
        file = sweep if rng.random() < 0.6 else rng.choice(self.files)
        damage = damage_lines if file.suffix == ".jsonl" else damage_one
        (self.target / file).write_bytes(damage(rng, (self.whole / file).read_bytes()))

    def read(self) -> None:
        from pe_lab.lab.sweeps import load_sweep, read_states
        from pe_lab.lab.sweeps.results import shown, write_results
        from pe_lab.lab.sweeps.state import counts, failures

        sweep = load_sweep(self.target)  # as `sweep --table` does
        table = write_results(sweep)
        if table.records:
            shown(table)
        states = read_states(sweep)
        counts(states), failures(sweep, states)


class Results(Kind):
    """The result records beside which a model is evaluated, and the sample records."""

    name = "result records"

    def prepare(self, directory: Path) -> None:
        from run_directories import make_run

        run = make_run(directory, "whole")
        self.whole, self.target = run / "evaluation" / "perplexity.jsonl", directory / "perplexity.jsonl"
        shutil.copyfile(self.whole, self.target)

    def write(self, rng: random.Random) -> None:
        self.target.write_bytes(damage_lines(rng, self.whole.read_bytes()))

    def read(self) -> None:
        from pe_lab.results.records import RecordFile, SampleFile

        wanted = json.loads(self.whole.read_text().splitlines()[3])
        file = RecordFile(self.target)
        file.find(wanted)
        file.put([wanted])
        samples = SampleFile(self.target)
        samples.add([wanted])
        samples.forget(list(samples.records)[:2])

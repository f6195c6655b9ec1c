"""Which slow tests CI runs."""

import slow_budget

COSTS = {"tests/a.py": 100.0, "tests/b.py": 300.0, "tests/c.py": 50.0, "tests/d.py": 500.0}


def test_changed_files_come_first_and_the_budget_holds():
    for commit in map(str, range(20)):
        chosen, left = slow_budget.choose(COSTS, {"tests/b.py"}, 460.0, commit)
        assert chosen[0] == "tests/b.py" and set(chosen) == {"tests/a.py", "tests/b.py", "tests/c.py"}
        assert left == ["tests/d.py"]


def test_every_file_runs_sooner_or_later():
    assert set().union(*(slow_budget.choose(COSTS, set(), 500.0, str(n))[0] for n in range(40))) == COSTS.keys()


def test_what_a_change_concerns():
    source = 'import tiny_runs\nfrom pe_lab.training import step\nstart(["pe_lab.train", "--config=configs/table1.py"])'
    for path in ("tests/x.py", "pe_lab/training/loop.py", "pe_lab/train.py", "configs/table1.py", "tests/tiny_runs.py"):
        assert slow_budget.concerns([path], "tests/x.py", source), path
    assert slow_budget.concerns(["launch/slurm.sh"], "tests/x.py", '"""launch/slurm.sh on a real SLURM."""')
    assert not slow_budget.concerns(["launch/slurm.sh"], "tests/x.py", source)
    for path in ("pe_lab/data/shards.py", "pe_lab/tra.py", "configs/p_rope.py", "docs/log.md", "tests/tiny.py"):
        assert not slow_budget.concerns([path], "tests/x.py", source), path

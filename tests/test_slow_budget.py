"""Which slow tests CI runs."""

import slow_budget

COSTS = {
    "tests/a.py": {"a": 100.0},
    "tests/b.py": {"b[1]": 100.0, "b[2]": 200.0},
    "tests/c.py": {"c": 50.0},
    "tests/d.py": {"d[1]": 200.0, "d[2]": 200.0, "d[3]": 400.0},
}


def test_changed_files_come_first_and_the_budget_holds():
    for commit in map(str, range(20)):
        chosen, left = slow_budget.choose(COSTS, {"tests/b.py"}, 620.0, commit)
        assert next(iter(chosen)) == "tests/b.py" and chosen["tests/b.py"] == COSTS["tests/b.py"]
        assert sum(sum(tests.values()) for tests in chosen.values()) <= 620.0
        assert set(chosen) | set(left) == COSTS.keys() and not set(chosen) & set(left)


def test_a_part_of_a_large_file_runs_and_no_part_of_another_one():
    for commit in map(str, range(20)):
        chosen, _ = slow_budget.choose(COSTS, {"tests/d.py"}, 620.0, commit)
        assert sum(chosen["tests/d.py"].values()) in (200.0, 400.0)  # d[3] alone is above half
        assert all(tests == COSTS[file] for file, tests in chosen.items() if file != "tests/d.py")


def test_every_test_runs_sooner_or_later():
    runs = [slow_budget.choose(COSTS, set(), 620.0, str(n))[0] for n in range(40)]
    found = {test for chosen in runs for tests in chosen.values() for test in tests}
    assert found == {test for tests in COSTS.values() for test in tests}


def test_what_a_change_concerns():
    source = 'import tiny_runs\nfrom pe_lab.training import step\nstart(["pe_lab.train", "--config=configs/table1.py"])'
    for path in ("tests/x.py", "pe_lab/training/loop.py", "pe_lab/train.py", "configs/table1.py", "tests/tiny_runs.py"):
        assert slow_budget.concerns([path], "tests/x.py", source), path
    assert slow_budget.concerns(["launch/slurm.sh"], "tests/x.py", '"""launch/slurm.sh on a real SLURM."""')
    assert not slow_budget.concerns(["launch/slurm.sh"], "tests/x.py", source)
    for path in ("pe_lab/data/shards.py", "pe_lab/tra.py", "configs/p_rope.py", "docs/log.md", "tests/tiny.py"):
        assert not slow_budget.concerns([path], "tests/x.py", source), path

"""How far it is from a config to the first step; see config_way.py."""

import os
import subprocess
import sys

import pytest
from tiny_runs import REPOSITORY, write_recipe

LIMIT = 12  # files


@pytest.mark.slow
def test_a_config_passes_few_files_before_the_first_step(tmp_path):
    """A process whose functions are watched: 15 s."""
    script, recipe = REPOSITORY / "tests/config_way.py", write_recipe(tmp_path / "recipe")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, str(script), f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    way = done.stdout[done.stdout.index("a config passes") :].splitlines()
    files = [line.split()[0] for line in way if line.startswith("  ")]
    assert {"training/plan.py", "model/decoder.py", "data/mixture.py"} <= set(files)
    assert len(files) <= LIMIT, "\n".join(way)

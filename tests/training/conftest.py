"""A run that nothing disturbed, its config, and a copy of it to disturb."""

import shutil
from pathlib import Path

import pytest
from tiny_runs import tiny, trained  # noqa: F401


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def whole(trained):  # noqa: F811
    """A run that nothing disturbed."""
    return trained


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))

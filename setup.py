"""Puts the recipes of configs/ and the claims into the wheel. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# where in the package: which files
BESIDE = {
    "configs": "configs/*.py",
    "lab/claims/files": "claims/*.py",
    "lab/claims/files/results": "claims/results/*.json",
}


class BuildWithRecipes(build_py):
    """Copies what lies beside the package into it; an editable installation finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for place, files in BESIDE.items():
                target = Path(self.build_lib, "pe_lab", place)
                self.mkpath(str(target))
                for file in sorted(Path().glob(files)):
                    self.copy_file(str(file), str(target / file.name))


setup(cmdclass={"build_py": BuildWithRecipes})

"""Puts the recipes of configs/ into the wheel, as pe_lab/configs. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes beside the modules; an editable installation finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "pe_lab", "configs")
            self.mkpath(str(target))
            for recipe in sorted(Path("configs").glob("*.py")):
                self.copy_file(str(recipe), str(target / recipe.name))


setup(cmdclass={"build_py": BuildWithRecipes})

"""Copies the folders `recipes` and `configs` into the package that is built.

Everything else is in setup.cfg. In a checkout and an editable install the folders are read where they
are; see `hf_dpzero.shipped`.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds `hf_dpzero/_recipes` and `hf_dpzero/_configs` beside the modules."""

    def run(self) -> None:
        """Builds the modules, then copies the folders, unless the install is editable."""
        super().run()
        if self.editable_mode:
            return
        for name in ("recipes", "configs"):
            target = Path(self.build_lib, "hf_dpzero", f"_{name}")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target)


setup(cmdclass={"build_py": BuildWithRecipes})

"""Maps ops/, tools/ and recipes/ into the package telechat_moe, and compiles the native libraries."""

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOTS = ("ops", "tools", "recipes")
HERE = Path(__file__).resolve().parent

packages = find_packages(include=["telechat_moe", "telechat_moe.*"])
package_dir = {}
for root in ROOTS:
    package_dir[f"telechat_moe.{root}"] = root
    packages.append(f"telechat_moe.{root}")
    packages += [f"telechat_moe.{root}.{p}" for p in find_packages(root)]


class BuildNative(build_py):
    """Compile the operators and the planner with g++ where the package goes.

    Without a compiler everything but the native libraries is installed, and their first use says what to do.
    """

    def run(self) -> None:  # noqa: D102
        super().run()
        builder = runpy.run_path(str(HERE / "ops" / "build.py"))
        where = HERE if self.editable_mode else Path(self.build_lib, "telechat_moe")
        try:
            builder["compiler"]()
        except builder["BuildError"] as error:
            sys.stderr.write(f"warning: {error}\n")
            return
        for library in builder["SOURCES"]:
            builder["build"](library, out=where / library.relative_to(HERE))


class NativeDistribution(Distribution):
    """Its wheel is tagged with the platform: it holds a shared library."""

    def has_ext_modules(self) -> bool:  # noqa: D102
        return True


setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "telechat_moe": ["py.typed", "*.css"],
        "telechat_moe.recipe.mode1": ["*.txt"],
        "telechat_moe.recipe.schema": ["*.txt", "*.json"],
        "telechat_moe.graph": ["*.cc"],
        "telechat_moe.tools.plan": ["*/*.js", "*/*.yaml", "*/*.json", "native/*.cc", "native/*.h"],
        "telechat_moe.recipes": ["*/*.yaml", "sweeps/*/*.yaml", "*/*.json", "*.json"],
        "telechat_moe.ops": ["csrc/*", "csrc/*/*"],
    },
    cmdclass={"build_py": BuildNative},
    distclass=NativeDistribution,
)

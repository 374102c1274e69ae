"""The planner is usable without MindSpore, and loads no solver before one is needed."""

import pkgutil
import subprocess
import sys

from telechat_moe.tools import plan


def test_no_module_of_the_planner_loads_mindspore_or_a_solver() -> None:
    modules = pkgutil.walk_packages(plan.__path__, "telechat_moe.tools.plan.")
    names = [m.name for m in modules if not m.name.endswith(".libtelechat_planner")]
    assert len(names) > 30
    heavy = ("mindspore", "torch", "scipy", "ortools", "matplotlib", "rich")
    code = (
        f"import importlib, sys\nfor name in {heavy}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The long tests in groups, and the rooms whose changes call for them: ``make test-slow GROUP=NAME``.

A test marked ``slow`` belongs to the group that its mark names, else to that with the longest path that it is below.
``slow_choice.py`` chooses what CI runs.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Group(NamedTuple):
    """Long tests that run together.

    ``minutes``: on two quiet cores, rounded up. CI prints what each took: renew what is far off.
    """

    minutes: int
    paths: tuple[str, ...]


PAGE = "tests/test_pages.py::test_a_page_runs_as_printed"
IN_CI: dict[str, Group] = {
    "recipe": Group(8, ("tests/recipe", "tests/data", "tests/model", "tests/cli", "tests/sweep")),
    "interrupts": Group(12, ("tests/cli/test_interrupts",)),
    "formats": Group(8, ("tests/formats",)),
    "tour": Group(8, (f"{PAGE}[README", f"{PAGE}[tour")),
    "pages": Group(10, ("tests/test_pages.py",)),
    "pages_align": Group(10, (f"{PAGE}[align",)),
    "pages_plan": Group(10, (f"{PAGE}[plan", f"{PAGE}[ops")),
    "pages_ranks": Group(
        12,
        (
            f"{PAGE}[experts",
            f"{PAGE}[long_seq",
            f"{PAGE}[mindformers",
            f"{PAGE}[operations",
            f"{PAGE}[performance",
            f"{PAGE}[sharded_runs",
        ),
    ),
    "train": Group(
        10, ("tests/train", "tests/analysis", "benchmarks/balance_pilot", "benchmarks/placement")
    ),
    "resume": Group(
        12,
        (
            "tests/train/test_growing_runs",
            "tests/train/test_mixture_runs",
            "tests/train/test_other_batches",
            "tests/train/test_sharded_average",
            "tests/train/test_sharded_growing",
            "tests/train/test_sharded_train",
            "tests/train/test_trainer",
        ),
    ),
    "moves": Group(10, ("tests/train/test_moving_runs",)),
    "device": Group(10, ("tests/train/test_device", "tests/checkpoint/test_device")),
    "launch": Group(10, ("tests/launch",)),
    "checkpoint": Group(
        12,
        (
            "tests/checkpoint",
            "tests/checkpoint/test_checkpoint_kills.py::test_ten_kills[0]",
            "tests/checkpoint/test_checkpoint_kills.py::test_ten_kills[1]",
        ),
    ),
    "mindformers": Group(10, ("tests/interop/test_mindformers",)),
    "mindformers_callbacks": Group(4, ("tests/interop/test_mindformers_callbacks",)),
    "upstream": Group(10, ("tests/interop",)),
    "graph": Group(
        10,
        (
            "tests/graph",
            "tests/sharding/test_host_operators",
            "tests/sharding/test_place.py",
            "tests/sharding/test_swap_cells",
        ),
    ),
    "pipeline": Group(10, ("tests/sharding/test_pipeline_schedules.py",)),
    "swap": Group(10, ("tests/sharding/test_swap_runs", "tests/train/test_swapped_states")),
    "align": Group(
        10,
        (
            "tests/align",
            "tests/loss",
            "tests/phases",
            "benchmarks/align_",
            "benchmarks/align_faults/test_layout_pairs",
            "benchmarks/peers",
        ),
    ),
    "align_bugs": Group(14, ("tests/align/test_hf_bugs", "tests/align/test_megatron")),
    "align_faults": Group(10, ("benchmarks/align_faults",)),
    "mindtorch": Group(8, ("tests/align/test_mindtorch",)),
    "plan": Group(10, ("tests/plan", "benchmarks/plan_", "benchmarks/overlap")),
    "ops": Group(9, ("tests/ops",)),
    "mindspore210": Group(16, ("tests/test_versions.py",)),
    "mindformers21": Group(
        18, ("tests/interop/test_mindformers_pairs", "tests/recipe/mode1/test_mode1_mindformers")
    ),
    "compiled_keys": Group(10, ("tests/recipe/test_compiled_keys.py",)),
    "keys": Group(2, ("tests/recipe/test_keys.py",)),
    "workflow": Group(6, ("tests/align/test_wiring", "tests/align/test_workflow")),
}

TURNS = 15
LAYOUTS = {f"layouts-{turn}": Group(7, ()) for turn in range(TURNS)}
"""Eight layouts each, of two, four and eight processes: test_layouts.py deals them out, CI runs them by turns."""

BY_HAND: dict[str, tuple[str, ...]] = {
    "kills": ("tests/checkpoint/test_checkpoint_kills",),
    "programs": ("tests/ops/dvm",),
    "schedules": ("tests/plan/schedules/",),
    "wiring": ("tests/align/test_wiring.py::test_a_doubled_input_is_seen_in_every_layout",),
    "faults": ("benchmarks/align_faults/test_faults.py::test_the_whole",),
    "diagnose": ("tests/diagnose",),
    "arm": ("tests/ops/test_arm.py",),
}
"""More than half an hour on two cores; `diagnose` wants a machine that does nothing else, `arm` a cross compiler."""

GROUPS = [*IN_CI, *LAYOUTS, *BY_HAND]

# By path; the longest counts. The first group of a room matters most to it.
ROOMS: dict[str, tuple[str, ...]] = {
    "telechat_moe": ("train", "launch"),
    "telechat_moe/checkpoint": ("checkpoint", "resume"),
    "telechat_moe/cli": ("recipe", "tour"),
    "telechat_moe/cli/align": ("align", "workflow"),
    "telechat_moe/cli/plan": ("plan",),
    "telechat_moe/data": ("train", "resume"),
    "telechat_moe/graph": ("graph", "pipeline", "swap"),
    "telechat_moe/interop": ("upstream",),
    "telechat_moe/interop/mindformers": (
        "mindformers",
        "mindformers_callbacks",
        "mindformers21",
        "upstream",
    ),
    "telechat_moe/launch": ("launch", "resume"),
    "telechat_moe/moe": ("moves", "train"),
    "telechat_moe/model": ("recipe", "align_bugs", "train"),
    "telechat_moe/recipe": ("keys", "recipe", "compiled_keys"),
    "telechat_moe/recipe/mode1": ("mindformers21", "recipe"),
    "telechat_moe/sharding": ("graph", "pipeline", "swap"),
    "telechat_moe/train": ("train", "resume", "swap", "moves"),
    "ops": ("ops", "graph"),
    "ops/fingerprint.py": ("workflow", "ops"),
    "ops/tap.py": ("workflow", "ops"),
    "tools": ("plan", "align"),
    "tools/align": ("align", "workflow", "align_faults", "align_bugs"),
    "tools/align/capture/mindtorch": ("mindtorch",),
    "tools/diagnose": ("launch",),
    "tools/loss": ("align",),
    "tools/phases": ("align",),
    "tools/plan": ("plan",),
    "tools/sweep": ("recipe",),
    "recipes": ("keys", "tour"),
    "docs": ("pages",),
    "docs/tour": ("tour",),
    "docs/align": ("pages_align",),
    "docs/experts": ("pages_ranks",),
    "docs/long_seq": ("pages_ranks",),
    "docs/mindformers": ("pages_ranks",),
    "docs/operations": ("pages_ranks",),
    "docs/performance": ("pages_ranks",),
    "docs/plan": ("pages_plan",),
    "docs/s": ("pages_ranks",),
    "README.md": ("tour",),
    "Makefile": ("tour",),
    "setup.py": ("tour", "mindspore210"),
    "pyproject.toml": ("tour", "mindspore210", "mindformers21"),
}


def group_of(test: str) -> str | None:
    """Return the group of a test file or of a test, by its node id; None if it has none."""
    paths = {**{name: group.paths for name, group in IN_CI.items()}, **BY_HAND}
    return _longest({path: name for name, below in paths.items() for path in below}, test)


def groups_for(file: str) -> tuple[str, ...]:
    """Return CI's groups that a change of a file calls for, the most important first."""
    if file.startswith(("tests/", "benchmarks/")):
        group = group_of(file)
        return (group,) if group in IN_CI else ()
    return _longest(ROOMS, file) or ()


def _longest(table: Mapping[str, T], path: str) -> T | None:
    """Return what a table has for the longest beginning of a path."""
    return table.get(max((p for p in table if path.startswith(p)), key=len, default=""))

"""The long tests in groups: ``make test-slow GROUP=NAME``; ``python tests/support/slow_groups.py`` lists CI's.

A test marked ``slow`` belongs to the group with the longest path that its file is below.
"""

import sys

IN_CI: dict[str, tuple[str, ...]] = {
    "recipe": ("tests/recipe", "tests/data", "tests/model", "tests/cli"),
    "formats": ("tests/formats",),
    "tour": ("tests/test_readme.py",),
    "train": ("tests/train", "benchmarks/balance_pilot", "benchmarks/placement"),
    "resume": (
        "tests/train/test_growing_runs",
        "tests/train/test_mixture_runs",
        "tests/train/test_sharded_average",
        "tests/train/test_sharded_growing",
        "tests/train/test_sharded_train",
        "tests/train/test_trainer",
    ),
    "moves": ("tests/train/test_moving_runs",),
    "launch": ("tests/launch",),
    "checkpoint": (
        "tests/checkpoint",
        "tests/checkpoint/test_checkpoint_kills.py::test_ten_kills[0]",
        "tests/checkpoint/test_checkpoint_kills.py::test_ten_kills[1]",
    ),
    "mindformers": ("tests/interop/test_mindformers",),
    "upstream": ("tests/interop",),
    "graph": (
        "tests/graph",
        "tests/sharding/test_host_operators",
        "tests/sharding/test_place.py",
        "tests/sharding/test_swap_cells",
    ),
    "pipeline": ("tests/sharding/test_pipeline_schedules.py",),
    "swap": ("tests/sharding/test_swap_runs", "tests/train/test_swapped_states"),
    "align": (
        "tests/align",
        "benchmarks/align_",
        "benchmarks/align_faults/test_layout_pairs",
        "benchmarks/peers",
    ),
    "align_bugs": ("tests/align/test_hf_bugs", "tests/align/test_megatron"),
    "align_faults": ("benchmarks/align_faults",),
    "plan": ("tests/plan", "benchmarks/plan_", "benchmarks/overlap"),
    "ops": ("tests/ops",),
    "mindspore210": ("tests/test_versions.py",),
    "compiled_keys": ("tests/recipe/test_compiled_keys.py",),
    "keys": ("tests/recipe/test_keys.py",),
    "workflow": ("tests/align/test_wiring", "tests/align/test_workflow"),
}
"""One of these runs with every commit."""

BY_HAND: dict[str, tuple[str, ...]] = {
    "sharding": ("tests/sharding",),
    "exchange": (
        "tests/sharding/test_layouts.py::test_an_exchange",
        "tests/sharding/test_layouts.py::test_what_is",
    ),
    "kills": ("tests/checkpoint/test_checkpoint_kills",),
    "programs": ("tests/ops/dvm",),
    "schedules": ("tests/plan/test_schedules",),
    "wiring": ("tests/align/test_wiring.py::test_a_doubled_input_is_seen_in_every_layout",),
    "faults": ("benchmarks/align_faults/test_faults.py::test_the_whole",),
    "diagnose": ("tests/diagnose",),
    "arm": ("tests/ops/test_arm.py",),
}
"""More than half an hour on two cores; `diagnose` wants a machine that does nothing else, `arm` a cross compiler."""

GROUPS = IN_CI | BY_HAND


def group_of(path: str) -> str | None:
    """Return the group of a test file, None if it has none."""
    fitting = [
        (len(p), name) for name, paths in GROUPS.items() for p in paths if path.startswith(p)
    ]
    return max(fitting)[1] if fitting else None


if __name__ == "__main__":
    sys.stdout.write("\n".join(IN_CI) + "\n")

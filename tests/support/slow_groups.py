"""The long tests in groups, each within half an hour on two cores: ``make test-slow GROUP=NAME``.

A test marked ``slow`` belongs to the group whose path, the longest of all that fit, its file lies below.
"""

import sys

GROUPS: dict[str, tuple[str, ...]] = {
    "align": ("tests/align", "benchmarks/align_", "benchmarks/peers"),
    "ops": ("tests/ops", "tests/recipe", "tests/model", "tests/data"),
    "plan": ("tests/plan", "benchmarks/plan_", "benchmarks/overlap", "tests/pipeline"),
    "graph": ("tests/graph", "tests/sharding"),
    "train": ("tests/train", "tests/launch", "tests/checkpoint", "tests/test_readme.py"),
    "interop": ("tests/interop",),
}


def group_of(path: str) -> str | None:
    """Return the group of a test file, None if it has none."""
    fitting = [
        (len(p), name) for name, paths in GROUPS.items() for p in paths if path.startswith(p)
    ]
    return max(fitting)[1] if fitting else None


if __name__ == "__main__":
    sys.stdout.write("\n".join(GROUPS) + "\n")

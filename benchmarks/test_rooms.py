"""Test that every benchmark has a page and a command, and stays out of the package."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOMS = [
    "attention_documents", "balance_pilot", "checkpoint", "claims", "cluster", "data_balance", "data_loader", "data_packing", "diagnose", "dryrun_mindformers", "exchange_overlap", "host_syncs", "mutants", "ops", "overlap",
    "placement", "plan_memory", "plan_published", "plan_speed", "plan_this_machine", "process_memory", "swap", "train_step", "upstream",
]  # fmt: skip


@pytest.mark.parametrize("name", ROOMS)
def test_a_benchmark_says_what_it_measures_and_how_to_run_it(name: str) -> None:
    page = (HERE / name / "README.md").read_text(encoding="utf-8")
    assert f"python -m benchmarks.{name}" in page
    for word in ("**Measures**", "**Against**", "**Prints**"):
        assert word in page
    assert (HERE / name / "__main__.py").is_file()
    assert (HERE / name / "__init__.py").read_text(encoding="utf-8").startswith('"""')

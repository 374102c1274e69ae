"""Published architectures have their published sizes."""

import csv
from pathlib import Path

import pytest

from benchmarks.plan_published.models import published

TABLES = Path(__file__).parent / "data"


def test_mpt_parameters_are_those_that_mosaicml_published():
    with (TABLES / "llmfoundry_fsdp.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) > 100
    for row in rows:
        seq = int(row["SeqLen (T)"])
        a = published(f"mpt{row['Model']}", seq=seq, positions=seq)
        assert a is not None
        assert a.parameters == int(float(row["NumParams"])), row["Model"]


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama 3.1 8b", 8.03, 8.03), ("LLAMA3.1_405B", 405.9, 405.9), ("Qwen3_30B_a3B", 30.5, 3.3),
        ("DeepSeekV3 (w/ MTP)", 682.6, 37.6), ("Kimi_K2", 1026, 32.9), ("Mixtral-8x7B", 46.7, 12.9),
        ("Nemotron4 340b FP8", 341, 341), ("Grok1 314b BF16", 315.7, 83.8), ("gpt-oss 120B", 116.8, 5.7),
        ("TeleChat2_115b", 113.3, 113.3),
    ],
)  # fmt: skip
def test_published_models_have_their_published_sizes(name, billions, active):
    a = published(name)
    assert a is not None
    assert a.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert a.active_parameters / 1e9 == pytest.approx(active, rel=2e-2)

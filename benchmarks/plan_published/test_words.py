"""Words of published tables: read as what they mean, or an error that says where."""

import csv
from pathlib import Path

import pytest

from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.words import recompute_of
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.score import MeasuredStep

TABLES = Path(__file__).parent / "data"


def _changed(name: str, folder: Path, pick: str, /, **cells: str) -> Path:
    """Write a table with the header and one row, the first that holds `pick`, with these cells changed or added."""
    with (TABLES / f"{name}.csv").open() as stream:
        row = next(row for row in csv.DictReader(stream) if pick in row.values())
    row |= cells
    file = folder / f"{name}.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([list(row), list(row.values())])
    return file


def _read(name: str, folder: Path, pick: str, /, **cells: str) -> MeasuredStep:
    (row,) = read_table(_changed(name, folder, pick, **cells))
    return row


@pytest.mark.parametrize(
    ("table", "pick", "column", "word"),
    [
        ("mindspeed_llm_ascend", "Bloom-176B", "recompute", "full_uniform"),
        ("mindspeed_llm_ascend", "Bloom-176B", "dispatcher", "deepep"),
        ("mindformers_ascend", "llama3_8b", "recompute", "true"),
        ("mindformers_ascend", "llama3_8b", "select_recompute", "true"),
        ("megatron_bridge_perf", "MXFP8", "precision", "mxfp8"),
        ("megatron_bridge_perf", "MXFP8", "dispatcher", "hybridep"),
        ("megatron_bridge_perf", "MXFP8", "recompute", "moe_act"),
        ("llmfoundry_fsdp", "FULL_SHARD", "Precision", "amp_fp8"),
        ("llmfoundry_fsdp", "FULL_SHARD", "Sharding Strategy", "full_shard"),
        ("megatron_functional_golden", "bert", "moe-token-dispatcher-type", "allgather"),
        ("megatron_functional_golden", "bert", "recompute-granularity", "selective"),
        ("megatron_functional_golden", "bert", "family", "mimo"),
        ("megatron_functional_golden", "bert", "fp8-format", "e4m3"),
    ],
)
def test_an_unknown_word_is_an_error_that_says_where(table, pick, column, word, tmp_path):
    file = _changed(table, tmp_path, pick, **{column: "sometimes"})
    with pytest.raises(BadInputError) as error:
        read_table(file)
    for part in (f"{file}:2:", f"column {column}:", "'sometimes'", word):
        assert part in str(error.value)


def test_an_unknown_word_of_a_set_names_its_line(tmp_path):
    file = tmp_path / "sets.yaml"
    row = "  - {model: llama3 8b, gpus: 8, tp: 1, pp: 1, gbs: 8, mbs: 1, seq: 8192, step: 1, "
    start = f"sets:\n- id: h100_set\n  rows:\n{row}recompute: full_uniform}}\n"
    for cell in ("recompute: often", "precision: bf17", "dispatcher: pigeons"):
        file.write_text(f"{start}{row}{cell}}}\n")
        with pytest.raises(
            BadInputError, match=rf"sets.yaml:5: set h100_set, row 2: column {cell[:6]}"
        ):
            read_table(file)
    file.write_text(f"{start}{row}dispatcher: deepep, recompute: 'norm,act', precision: mxfp8}}\n")
    uniform, other = (r.layout for r in read_table(file))
    assert uniform
    assert other
    assert (uniform.recompute, uniform.stack.hierarchical) == ("full", False)
    assert (other.recompute, other.stack.hierarchical) == ("norm+activation", True)
    assert other.compute == "fp8"


def test_words_of_recomputation():
    for text, policy in {
        "full_uniform": "full", "norm,act": "norm+activation", "selective": "selective", "": "none",
        "[layernorm mlp moe_act]": "norm+mlp+activation", "core_attn": "core_attention",
    }.items():  # fmt: skip
        assert recompute_of({"x": text}, "x") == policy


def test_methods_and_lists_of_recomputation(tmp_path):
    bloom = ("mindspeed_llm_ascend", tmp_path, "Bloom-176B")
    block = _read(*bloom, recompute="full_block", recompute_layers="3").layout
    assert block
    assert (block.recompute, block.recompute_layers) == ("full", (3,) * 12)
    uniform = _read(*bloom, recompute="full_uniform").layout
    assert uniform
    assert (uniform.recompute, uniform.recompute_layers) == ("full", None)
    select = _read("mindformers_ascend", tmp_path, "llama2_70b_64p").layout
    assert select
    assert (select.recompute, select.recompute_layers) == ("activation", (10, 8, 6, 4, 2, 0, 0, 0))
    short = _read("mindformers_ascend", tmp_path, "llama2_70b_64p", select_recompute="[1, 2]")
    assert "2 numbers for 8 chunks" in short.reason


def test_a_mixture_is_not_read_as_dense(tmp_path):
    llama = ("mindformers_ascend", tmp_path, "llama3_8b")
    row = _read(*llama, name="TeleChat2_39b_a12b", expert_num="16")
    assert row.architecture
    assert row.architecture.layers == ("moe",) * 30
    # 30 layers of 16 experts of three 4096 x 6144 matrices, and all parameters 39 billion
    assert row.architecture.experts * row.architecture.expert_weights * 30 == pytest.approx(
        36.2e9, rel=0.01
    )
    for cells in ({"name": "another_39b_a12b"}, {"name": "another", "expert_num": "8"}):
        assert "architecture of the mixture another" in _read(*llama, **cells).reason


def test_multimodal_rows_are_left_out_with_a_reason(tmp_path):
    for name in ("qwenvl_9.6b", "internvl2_8b", "cogvlm2_13b"):
        row = _read("mindformers_ascend", tmp_path, "llama3_8b", name=name)
        assert "multimodal" in row.reason
    rows = read_table(TABLES / "mindformers_ascend.csv")
    assert sum("multimodal" in row.reason for row in rows) == 2


def test_dispatchers_of_a_mixture(tmp_path):
    def stack(**cells: str):
        layout = _read("megatron_bridge_perf", tmp_path, "Qwen3_30B_a3B", **cells).layout
        assert layout
        return layout.stack.hierarchical, layout.stack.permute_bytes

    assert stack() == stack(dispatcher="hybridep") == (True, 8)
    assert stack(dispatcher="deepep") == (True, 16)
    assert stack(dispatcher="alltoall") == (False, 16)

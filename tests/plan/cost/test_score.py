"""`plan score` on a user's table of measured steps."""

import json
from pathlib import Path

import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.measured_steps import COLUMNS, read_measured_steps
from telechat_moe.tools.plan.cost.score import checked, score
from telechat_moe.tools.plan.cost.step import evaluate

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
TABLE = f"""\
model,recipe,hidden,layers,heads,kv_heads,ffn,vocab,seq,dp,tp,micro_batch,micro_batches,recompute,device,step_s,memory_gib
as it is,{RECIPE},,,,,,,,,,,,,,40.0,50
narrower,{RECIPE},,,,,,,,16,,,,full,ascend-910b,40.0,
llama,,4096,32,32,8,14336,128256,8192,8,1,1,2,full,a100,3.5,
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "mine.csv"
    file.write_text(TABLE)
    return file


def test_a_row_is_the_recipe_or_the_dimensions_that_it_gives(table: Path) -> None:
    recipe = load(RECIPE, [])
    same, changed, llama = read_measured_steps(table)
    assert same.layout == Layout.from_recipe(recipe)
    assert same.architecture == Architecture.from_model(recipe.model_config, RECIPE)
    assert (same.step_s, same.memory_bytes) == (40.0, 50 * 2**30)
    assert changed.layout == Layout.from_recipe(recipe).with_changes(dp=16, recompute="full")
    assert changed.device == "ascend-910b"
    assert llama.layout == Layout(dp=8, micro_batches=2, recompute="full")
    assert llama.architecture == Architecture(
        name="llama", hidden=4096, layers=("dense",) * 32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192,
    )  # fmt: skip


def test_report_holds_what_the_step_model_says(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "score.json"
    assert main(["plan", "score", str(table), "--device", "ascend-910b", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = read_measured_steps(table)
    for row, scored in zip(rows, report["rows"], strict=True):
        device = load_device(row.device or "ascend-910b")
        expected = evaluate([row.architecture], [row.layout], device)  # type: ignore[list-item]
        assert scored["predicted_s"] == pytest.approx(float(expected.step_s[0]), rel=1e-12)
        assert scored["error"] == pytest.approx(scored["predicted_s"] / row.step_s - 1)  # type: ignore[operator]
    assert report["overall"]["rows"] == 3
    assert report["memory"]["rows"] == 1
    assert report["tables"]["mine"]["of"] == 3


def test_rows_are_predicted_by_a_device_file_as_by_the_device(table: Path, tmp_path: Path) -> None:
    device = tmp_path / "our-cluster.yaml"
    device.write_text("base: ascend-910b\n")
    predicted: list[list[float]] = []
    for name in ("ascend-910b", str(device)):
        out = tmp_path / "score.json"
        assert main(["plan", "score", str(table), "--device", name, "--json", str(out)]) == 0
        predicted.append([row["predicted_s"] for row in json.loads(out.read_text())["rows"]])
    assert predicted[0] == predicted[1]
    assert all(predicted[0])
    row = tmp_path / "row.csv"
    row.write_text(f"recipe,device,step_s\n{RECIPE},{device},40\n")
    assert main(["plan", "score", str(row)]) == 0


def test_columns_of_mixtures_float8_fsdp_and_gpt(tmp_path: Path) -> None:
    file = tmp_path / "kinds.csv"
    file.write_text(
        "hidden,layers,heads,vocab,seq,experts,top_k,moe_ffn,shared_experts,dense_layers,family,dp,ep,fsdp,compute,device,step_s\n"
        "2048,4,16,32000,4096,64,6,1408,2,1,,8,8,,fp8,h100,1\n"
        "2048,4,16,32000,4096,,,,,,gpt,8,,true,,h100,1\n"
        "2048,4,16,32000,4096,,,,,,,8,,,fp8,a100,1\n"
        "2048,4,16,32000,4096,64,,,,,,8,,,,h100,1\n"
    )
    mixture, gpt, old, half = checked(read_measured_steps(file), "h100")
    assert mixture.architecture
    assert mixture.layout
    assert mixture.architecture.layers == ("dense", "moe", "moe", "moe")
    assert mixture.architecture.shared_experts == 2
    # three layers of 64 experts, three matrices of 2048 x 1408 each
    assert (
        mixture.architecture.experts * mixture.architecture.expert_weights == 64 * 3 * 2048 * 1408
    )
    assert (mixture.layout.ep, mixture.layout.compute) == (8, "fp8")
    assert gpt.architecture
    assert gpt.layout
    assert (gpt.architecture.gated, gpt.architecture.biases, gpt.architecture.tied) == (
        False,
        True,
        True,
    )
    assert gpt.architecture.positions == 4096
    assert (gpt.layout.zero, gpt.layout.fsdp) == (3, True)
    assert old.reason == "device without a description of fp8: a100"
    assert half.reason == "missing: top_k, moe_ffn of a mixture of experts"
    assert all(step.step_s for step in score([mixture, gpt], "h100"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("recipe,step_s\nno_such.yaml,1", "missing: "),
        ("hidden,layers,step_s\n64,2,1", "a recipe, or heads, vocab, seq"),
        (f"recipe,hidden,step_s\n{RECIPE},64,1", "one model (a recipe and hidden are given)"),
        (f"recipe,dp,step_s\n{RECIPE},eight,1", "missing: a readable dp (eight)"),
        (f"recipe,dp,step_s\n{RECIPE},0,1", "missing: a readable dp (0)"),
        (f"recipe,step_s\n{RECIPE},-3", "missing: a readable step_s (-3)"),
        (f"recipe,step_s\n{RECIPE},", "missing: a measured time or memory"),
        (f"recipe,schedule,step_s\n{RECIPE},fastest,1", "missing: a readable schedule (fastest)"),
        (f"recipe,recompute,step_s\n{RECIPE},much,1", "missing: a readable recompute (much)"),
        (f"recipe,ep,step_s\n{RECIPE},7,1", "ep x etp = 7"),
        (f"recipe,device,step_s\n{RECIPE},tpu,1", "device without a description: tpu"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(line + "\n")
    assert main(["plan", "score", str(file), "--rows"]) == 3
    out, err = capsys.readouterr()
    assert said in out
    assert "no row could be scored" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("a,step_s\n1,2\n", "no column is called a; there are model, recipe"),
        ("\udcff\udcfe\x00", "not a CSV table"),
    ],
)
def test_files_that_are_no_table_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInputError, match=said):
        read_measured_steps(file)
    assert main(["plan", "score", str(file)]) == 3
    assert main(["plan", "score", str(tmp_path / "none.csv")]) == 3


def test_page_and_help_describe_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "score", "--help"]) == 0
    told = capsys.readouterr().out
    page = (Path(__file__).parents[3] / "docs" / "plan_step.md").read_text(encoding="utf-8")
    for name in COLUMNS:
        assert f"`{name}`" in page, name
        assert f"\n  {name} " in told, name

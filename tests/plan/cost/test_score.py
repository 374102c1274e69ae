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

"""Model search: rules, budget and front, against a plain loop."""

from pathlib import Path

import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.search.model_search import (
    architectures,
    plan_models,
    read_space,
    refusal,
    search_models,
)

SPACE = """\
recipe: telechat3_moe/pretrain_105b_a4b_4k.yaml
devices: 64
memory_gib: 55
global_batch: 128
choices: {hidden: [2048, 2500, 2560], layers: [8, 12], experts: [32, 64, 96], top_k: [2, 4]}
budget: {parameters: [5.e+9, 16.e+9]}
layouts: 4
"""


def _space(tmp_path: Path, text: str = SPACE):
    file = tmp_path / "space.yaml"
    file.write_text(text)
    return read_space(str(file))


def test_search(tmp_path: Path) -> None:
    space = _space(tmp_path)
    result = search_models(space)
    assert result.number == 36
    assert result.refused["hidden is not a multiple of 256"] == 12
    assert len(result.scored) + sum(result.refused.values()) == 36
    for c in result.scored:
        assert refusal(space, c.architecture) is None
        assert 5e9 <= c.architecture.parameters <= 16e9
        assert c.tokens_per_s == pytest.approx(128 * 4096 / 64 / c.step_s)
    beaten = [
        c
        for c in result.scored
        if any(
            d.tokens_per_s >= c.tokens_per_s
            and d.architecture.parameters >= c.architecture.parameters
            and d.architecture != c.architecture
            for d in result.scored
        )
    ]
    assert {c.architecture for c in result.front} == {
        c.architecture for c in result.scored if c not in beaten
    }


def test_models_are_planned(tmp_path: Path) -> None:
    """Placed steps are the simulator's, in blocks of each device, and not slower than the same degrees spread evenly."""
    space = _space(tmp_path, SPACE.replace("top_k: [2, 4]", "top_k: [2]"))
    scored = search_models(space).front[:1]
    (plans,) = plan_models(space, scored, 20.0)
    assert plans is not None
    a, layout = scored[0].architecture, plans.layout
    assert simulate_step(a, layout, space.device).step_s == pytest.approx(plans.step_s)
    assert plans.tokens_per_s == pytest.approx(128 * 4096 / 64 / plans.step_s)
    assert plans.gap >= -1e-9
    assert a.hidden % (layout.tp * space.block) == a.vocab % (layout.tp * space.block) == 0
    even = simulate_step(a, scored[0].layout, space.device)
    assert plans.step_s / (1 + plans.gap) <= even.step_s * (1 + 1e-9)
    assert plan_models(space, scored, 1e-9) == [None]


def test_shared_width_follows(tmp_path: Path) -> None:
    text = SPACE.replace("top_k: [2, 4]", "shared_experts: [1, 2], moe_ffn: [1024]")
    assert {a.shared_width for a in architectures(_space(tmp_path, text))} == {1024, 2048}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("top_k: [2, 4]", "topk: [2]", "choices.topk is unknown"),
        ("top_k: [2, 4]", "top_k: [two]", "expected whole numbers"),
        ("[5.e+9, 16.e+9]", "5", r"expected \[least, most\]"),
        ("devices: 64\n", "", "devices is missing"),
    ],
)
def test_bad_spaces(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        _space(tmp_path, SPACE.replace(old, new))


def test_verbs(tmp_path: Path, capsys) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(SPACE)
    words = ["plan", "search", str(file), "--html", str(tmp_path / "m.html")]
    assert main([*words, "--place", "0.5", "--top", "1"]) == 0
    assert "placed: tokens/s" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "m.html").read_text()
    out, why = tmp_path / "r.yaml", tmp_path / "why.txt"
    words = [
        "plan",
        "layout",
        "telechat3_moe/pretrain_105b_a4b_4k.yaml",
        "--devices",
        "64",
        "--memory",
        "60GiB",
    ]
    words += ["--fix", "tp=2", "--fix", "vpp=1", "--top", "2", "--out", str(out), "--why", str(why)]
    assert main(words) == 0
    # More than the recipe gives to MindSpore: `check` says so.
    memory = ["--set", "context.max_device_memory=64GB"]
    assert main(["check", str(out), "--devices", "64", *memory]) == 0
    assert "optimal under the event simulation" in capsys.readouterr().out
    assert why.read_text().count("\n") > 100
    assert main(["plan", "layout", words[2], "--devices", "4", "--memory", "1GiB"]) == 1
    assert main([*words[:5], "--fix", "tq=2"]) == 2

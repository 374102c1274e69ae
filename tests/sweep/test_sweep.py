"""`telechat-moe sweep`: what a sweep file may say, what it is told, and how results are compared. Nothing is trained here."""

import json
import re
from pathlib import Path
from typing import Any

import mini_sweep as mini
import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.cli.sweep import VERB
from telechat_moe.recipe import load
from telechat_moe.recipe.arithmetic import flops_per_token
from telechat_moe.recipe.load import shipped_dir
from telechat_moe.tools.sweep import file, results
from telechat_moe.train import metrics

Capture = pytest.CaptureFixture[str]
SHIPPED = "sweeps/telechat3_moe/pilot.yaml"
LARGE = {"recipe": "pangu_ultra_moe/pilot_20b.yaml", "device": "ascend-910b"}


def refused(folder: Path, capsys: Capture, **changes: Any) -> tuple[Path, str]:
    """Return a sweep file that is refused, and what is said."""
    path = mini.write(folder, mini.sweep(folder, **changes))
    assert main(["sweep", str(path)]) == 3
    return path, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "start", "said"),
    [
        ({"variant": {}}, "variant:", "variant: unknown key; a sweep file has no such key; did you mean 'variants'?"),
        ({"seeds": []}, "seeds", "seeds: a list of 0 items; expected a list of 1 or more x an integer >= 0"),
        ({"seeds": [1, 1]}, "seeds", "seeds: 1 twice"),
        ({"variants": {}}, "recipe", "variants: no variants; one or more"),
        ({"variants": {"a": mini.row(4, 1, 32), "b": mini.row(4, 1, 32)}}, '"b"', "variants.b: the same recipe as a"),
        ({"variants": {"../a": mini.row(4, 1, 32)}}, '"../a"', "the name '../a'; a folder's name"),
        ({"variants": {"a": mini.row(4, 5, 32)}}, '"a"', "variants.a: model.model_config.num_experts_per_tok: 5 of 4 experts"),
        ({"variants": {"a": mini.row(4, "x", 32)}}, '"a"', "num_experts_per_tok: the text 'x'; expected an integer"),
        ({"variants": {"a": ["seed=1"]}}, '"a"', "variants.a: sets seed; seeds, from which"),
        ({"set": ["output_dir=x"]}, "set", "set: sets output_dir; output_dir, from which"),
        ({"larger": {"big": {**LARGE, "variants": {}}}}, "recipe", "larger.big.variants: no variants"),
        ({"keys": mini.KEYS}, "keys", "each variant as a list of overrides, NAME: [KEY=VALUE, ...]"),
        ({"axes": {"optimizer.eps": [0.001]}}, "axes", "each variant as a list of overrides"),
        ({"variants": {"a": ["optimizer.esp=0.001"]}}, '"a"', "did you mean 'optimizer.eps'?"),
        ({"set": ["optimizer.eps"]}, "set", "optimizer.eps"),
        # a key that `telechat-moe train` does not have makes no variant
        ({"variants": {"a": ["context.memory_optimize_level=O1"]}}, '"a"', "which `telechat-moe train` does not have"),
        ({"studies": {"s": {"variants": ["few", "lots"]}}}, '"s"', "studies.s.variants: lots, no such variant; one of few, more, many"),
        ({"studies": {"s": {"variants": ["few", "few"]}}}, '"s"', "studies.s.variants: few twice; each once"),
        ({"larger": {"big": {**LARGE, "variants": {"lots": mini.row(64, 2, 512)}}}}, '"big"', "larger.big.variants.lots: no such variant"),
        ({"larger": {"big": {**LARGE, "device": "abacus", "variants": {"few": mini.row(64, 2, 512)}}}}, '"big"', "larger.big.device: abacus; device abacus: no such"),
        ({"larger": {"big": {**LARGE, "variants": {"few": mini.row(64, 2, -1)}}}}, '"big"', "moe_intermediate_size: -1; expected an integer >= 1"),
    ],
)  # fmt: skip
def test_a_problem_is_named_with_line_and_key(
    changes: dict[str, Any], start: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    path, text = refused(tmp_path, capsys, **changes)
    line = mini.line_of(path, start)
    assert re.search(rf"^(error: )?\S*sweep\.yaml:{line}: .*{re.escape(said)}", text, re.M), text
    assert "nothing was started" in text
    assert not (tmp_path / "sweep").exists()


def test_all_problems_are_named_at_once(tmp_path: Path, capsys: Capture) -> None:
    variants = {"a": mini.row(4, 5, 32), "b": mini.row(4, 1, -1), "c": mini.row(4, 1, 32)}
    _, text = refused(tmp_path, capsys, variants=variants)
    assert "variants.a: " in text
    assert "variants.b: " in text
    assert "2 problems" in text


def test_what_is_wrong_with_the_recipe_itself_is_said_once(tmp_path: Path, capsys: Capture) -> None:
    _, text = refused(tmp_path, capsys, recipe="pretrain_tinny.yaml")
    assert text.count("pretrain_tinny.yaml: ") == 1
    assert "did you mean 'telechat3_moe/pretrain_tiny.yaml'" in text
    assert "1 problem; nothing was started." in text


def test_what_all_runs_lack_is_said_once(tmp_path: Path, capsys: Capture) -> None:
    _, text = refused(tmp_path, capsys)
    assert "2 problems" in text  # the data of training and of evaluation
    assert f"{tmp_path}/train" in text


def test_variants_that_are_not_equal_are_refused(tmp_path: Path, capsys: Capture) -> None:
    equal = {"parameters": 0.1, "active": 0.1, "flops": 0.1}
    study = {"s": {"variants": ["few", "many"], "equal": equal}}
    variants = {"few": mini.row(4, 1, 32), "many": mini.row(16, 4, 16)}
    path, text = refused(tmp_path, capsys, variants=variants, studies=study)
    small, large = (
        load(mini.TINY, _overrides(tmp_path, variants[name])).model_config for name in variants
    )
    apart = flops_per_token(large).training / flops_per_token(small).training - 1
    assert f"equal.flops: few has {flops_per_token(small).training:,.0f}" in text
    assert f"{apart:.2%} more; at most 10.00% more" in text
    line = mini.line_of(path, '"s"')
    assert text.count(f"{path.name}:{line}: studies.s.equal") == 3


def _overrides(folder: Path, variant: list[str]) -> list[str]:
    return [*mini.sweep(folder)["set"], *variant]


def test_structures_of_larger_recipes_must_be_equal_too(tmp_path: Path, capsys: Capture) -> None:
    study = {"s": {"variants": ["few", "many"], "equal": {"active": 0.1}}}
    larger = {
        "big": {**LARGE, "variants": {"few": mini.row(64, 2, 2048), "many": mini.row(256, 8, 2048)}}
    }
    _, text = refused(tmp_path, capsys, studies=study, larger=larger)
    assert "studies.s.equal.active: larger.big: few has 1," in text


def test_a_run_has_its_variant_s_overrides_after_those_of_all(tmp_path: Path) -> None:
    rates = {"slow": 0.1, "fast": 0.2}
    variants = {name: [f"lr_schedule.learning_rate={rate}"] for name, rate in rates.items()}
    plain = mini.sweep(tmp_path, variants=variants)
    plain["set"] = [*plain["set"], "lr_schedule.learning_rate=0.3", "optimizer.eps=0.01"]
    sweep = file.read_sweep(str(mini.write(tmp_path, plain)))
    runs = [(run.variant, run.seed) for run in sweep.runs]
    assert runs == [(name, seed) for seed in (1, 2) for name in rates]
    for run in sweep.runs:
        assert run.recipe.lr_schedule is not None
        assert run.recipe.lr_schedule.learning_rate == rates[run.variant]
        assert run.recipe.optimizer.eps == 0.01
        assert run.recipe.seed == run.seed
        assert run.recipe.train_dataset.data_loader.config.seed == run.seed  # pyright: ignore
        assert Path(run.recipe.output_dir) == tmp_path / "sweep" / run.variant / f"seed-{run.seed}"


def test_the_shipped_sweep_is_right_and_every_structure_has_its_counterparts() -> None:
    names = [p.relative_to(shipped_dir()).as_posix() for p in shipped_dir().glob("sweeps/*/*.yaml")]
    assert names == [SHIPPED]
    sweep = file.read_sweep(SHIPPED)
    names = {name for study in sweep.studies.values() for name in study.variants}
    assert names == {*sweep.keys.variants}
    assert all({*recipes} == names for recipes in sweep.larger.values())
    pilot = {m: {v: r.model_config for v, r in rs.items()} for m, rs in sweep.larger.items()}
    for name in names:
        config = next(run.recipe.model_config for run in sweep.runs if run.variant == name)
        for (
            large
        ) in pilot.values():  # as many experts in proportion to the base's, as many for a token
            base = large["E32-top4"]
            assert (
                base.n_routed_experts / large[name].n_routed_experts == 32 / config.n_routed_experts
            )
            wide = large[name].moe_intermediate_size / base.moe_intermediate_size
            assert wide == config.moe_intermediate_size / 48


# ------------------------------------------------------------------------------------ results


def recorded(folder: Path, losses: dict[tuple[str, int], float], **changes: Any) -> Path:
    """Write a sweep and the folders of its runs, as if they had been trained to these losses."""
    path = mini.write(folder, mini.sweep(folder, seeds=[1, 2, 3], **changes))
    for run in file.read_sweep(str(path)).runs:
        run.folder.mkdir(parents=True)
        (run.folder / "recipe.json").write_text(json.dumps(run.recipe.to_dict()))
        last = losses.get((run.variant, run.seed))
        if last is None:
            continue
        lines = [metrics.encode("evaluation", 0, {"loss": 4.2})]
        for step in range(1, 13):
            values = {"lm_loss": last + step / 10, "tokens_per_second": 100.0 * step}
            lines.append(metrics.encode("step", step, values))
            if step % 4 == 0:
                lines.append(metrics.encode("evaluation", step, {"loss": last + (12 - step) / 10}))
        (run.folder / "metrics.jsonl").write_bytes(b"".join(lines))
        (run.folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 12}))
    return path


LOSSES = {
    **{("few", 1): 3.10, ("few", 2): 3.30, ("few", 3): 3.20},
    **{("more", 1): 3.05, ("more", 2): 3.20, ("more", 3): 3.19},
    **{("many", 1): 3.00, ("many", 2): 3.40, ("many", 3): 3.10},
}


def test_losses_are_compared_seed_by_seed(tmp_path: Path, capsys: Capture) -> None:
    path = recorded(tmp_path, LOSSES)
    assert main(["sweep", str(path), "--report", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "sweep/sweep.json").read_text())
    table = np.array([[LOSSES[name, seed] for seed in (1, 2, 3)] for name in mini.VARIANTS])
    apart = table - table[0]
    for i, name in enumerate(mini.VARIANTS):
        loss, against = (
            report["variants"][name]["loss"],
            report["studies"]["all"]["against_first"][name],
        )
        np.testing.assert_allclose([loss["mean"], loss["low"], loss["high"]], [table[i].mean(), table[i].min(), table[i].max()])  # fmt: skip
        np.testing.assert_allclose(against["each"], apart[i], atol=1e-12)
    verdicts = {n: v["verdict"] for n, v in report["studies"]["all"]["against_first"].items()}
    assert verdicts["more"] == "lower"  # with every seed, though the ranges overlap
    assert verdicts["many"] == "not told apart"
    run = report["runs"][0]
    config = load(mini.TINY, _overrides(tmp_path, mini.row(4, 1, 32))).model_config
    assert run["tokens"] == 12 * 4 * 16
    assert run["flops"] == pytest.approx(run["tokens"] * flops_per_token(config).training)
    assert run["train_loss"] == pytest.approx(3.1 + np.arange(1, 13).mean() / 10)
    assert run["tokens_per_second"] == 650.0


def test_one_seed_is_no_judgement() -> None:
    assert results.difference({1: 3.0}, {1: 3.1})["verdict"] == "not judged"
    assert results.difference({1: 3.0, 2: 3.0}, {3: 3.1})["verdict"] == "not judged"
    assert results.difference({1: 3.0, 2: 3.0}, {1: 3.1, 2: 3.1})["verdict"] == "lower"
    assert results.difference({1: 3.2, 2: 3.2}, {1: 3.1, 2: 3.1})["verdict"] == "higher"
    assert results.difference({1: 3.2, 2: 3.1}, {1: 3.1, 2: 3.1})["verdict"] == "not told apart"


def test_what_is_not_finished_counts_for_nothing(tmp_path: Path, capsys: Capture) -> None:
    some = {key: loss for key, loss in LOSSES.items() if key != ("more", 2)}
    path = recorded(tmp_path, some)
    torn = tmp_path / "sweep/many/seed-3/summary.json"
    torn.write_text('{"finished": true, "ste')
    assert main(["sweep", str(path), "--report", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["variants"]["more"]["loss"]["each"] == [3.05, 3.19]
    states = {(r["variant"], r["seed"]): r["state"] for r in report["runs"]}
    assert states["more", 2] == "not begun"
    assert states["many", 3] == "unfinished"
    assert "2 of 9 runs are not finished" in err


def test_a_loss_that_is_not_finite_at_the_end_is_none(tmp_path: Path, capsys: Capture) -> None:
    path = recorded(tmp_path, LOSSES)
    with (tmp_path / "sweep/more/seed-2/metrics.jsonl").open("ab") as log:
        log.write(metrics.encode("step", 12, {"lm_loss": float("nan")}))
        log.write(metrics.encode("evaluation", 12, {"loss": float("inf")}))
    assert main(["sweep", str(path), "--report", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["variants"]["more"]["loss"]["each"] == [3.05, 3.19]
    run = next(r for r in report["runs"] if (r["variant"], r["seed"]) == ("more", 2))
    assert run["state"] == "finished"
    assert run["loss"] is run["train_loss"] is None


def test_the_json_s_keys_are_documented(tmp_path: Path, capsys: Capture) -> None:
    larger = {"big": {**LARGE, "variants": {"few": mini.row(64, 2, 2048)}}}
    path = recorded(tmp_path, LOSSES, larger=larger)
    assert main(["sweep", str(path), "--report", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {
        *report,
        *report["runs"][0],
        *report["variants"]["few"],
        *report["variants"]["few"]["loss"],
    }
    keys |= {*report["studies"]["all"], *report["studies"]["all"]["against_first"]["few"]}
    keys |= {*report["larger"]["big"], *report["larger"]["big"]["variants"]["few"]}
    words = set(re.findall(r"\w+", VERB.json_keys))
    assert keys <= words, keys - words


def test_predicted_costs_are_those_of_plan(tmp_path: Path, capsys: Capture) -> None:
    row = [64, 2, 2048]
    larger = {"big": {**LARGE, "variants": {"few": mini.row(*row)}}}
    path = recorded(tmp_path, LOSSES, larger=larger)
    assert main(["sweep", str(path), "--report", "--json", "-"]) == 0
    cost = json.loads(capsys.readouterr().out)["larger"]["big"]["variants"]["few"]
    sets = [x for key, v in zip(mini.KEYS, row, strict=True) for x in ("--set", f"{key}={v}")]
    assert main(["plan", "simulate", LARGE["recipe"], "--device", LARGE["device"], *sets, "--json", "-"]) == 0  # fmt: skip
    planned = json.loads(capsys.readouterr().out)
    assert cost["step_s"] == planned["step_s"]
    assert cost["mfu"] == next(u["share"] for u in planned["utilisation"] if u["convention"] == "model")  # fmt: skip
    assert cost["device_hours"] == pytest.approx(64 * 1e12 / planned["tokens_per_s"] / 3600)


def test_the_page_shows_every_variant_and_fetches_nothing(tmp_path: Path, capsys: Capture) -> None:
    larger = {
        "big": {**LARGE, "variants": {"few": mini.row(64, 2, 2048), "many": mini.row(256, 8, 512)}}
    }
    study = {"a <b>": {"about": "x & y", "variants": ["few", "many", "more"]}}
    path = recorded(tmp_path, LOSSES, larger=larger, studies=study)
    assert main(["sweep", str(path), "--report"]) == 0
    text = (tmp_path / "sweep/sweep.html").read_text()
    assert "a &lt;b&gt;" in text
    assert "x &amp; y" in text
    assert not re.search(r"https?://|src=|nan|inf\b", text)
    assert text.count("<svg") == 4  # losses, curves, all variants, cost at big
    for name in mini.VARIANTS:
        assert f">{name}</text>" in text
    curves = re.findall(r"<path class=s\d stroke-width=2 d='(M[^']+)'", text)
    assert len(curves) == 3
    assert all(len(re.findall(r"[ML]", c)) == 3 for c in curves)  # steps 4, 8 and 12

"""`check --host-syncs`: which waits a recipe has, their places, and the exit code."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import host_syncs, load
from telechat_moe.recipe.host_syncs import HostSync
from telechat_moe.recipe.uses import OUR_TRAINER

TINY = "telechat3_moe/pretrain_tiny.yaml"
LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
BIAS = "{type: TopkBiasBalanceCallback}"
HOST = "telechat_moe.operators.host"
THEIRS = "trainer.type=CausalLanguageModelingTrainer"
ROOT = Path(__file__).parents[2]
LAYERS = 45
"""Routers of the large recipe: 44 layers after the dense one, and MTP's."""


def syncs(name: str, *sets: str) -> dict[str, HostSync]:
    return {one.key: one for one in host_syncs.of_recipe(load(name, sets))}


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", "--host-syncs", *words, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_our_trainer_waits_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, TINY)
    assert code == 0
    [entry] = found["recipes"]
    assert (entry["use"], entry["waits_in_every_step"]) == ("train", 1)
    first, evaluation, save = entry["syncs"]
    assert (first["waits"], first["fetches"], first["every"]) == (1, 5, 1)
    assert (evaluation["waits"], evaluation["every"]) == (16, 100)
    assert (save["waits"], save["every"]) == (1, 200)
    lines = (ROOT / "recipes" / TINY).read_text().splitlines()
    for one in entry["syncs"]:
        assert one["file"] == f"recipes/{TINY}"
        assert one["key"].rpartition(".")[2] in lines[one["line"] - 1]
    cost = found["costs"]["min_us"]
    assert evaluation["cost_us"] == pytest.approx(0.16 * (cost["wait"] + cost["fetch"]))


@pytest.mark.parametrize(
    "override",
    [
        "callbacks.2.save_checkpoint_steps=1",
        "telechat_moe.evaluation.interval=1",
        "telechat_moe.moe.placement={every: 1}",  # how many rows move is not known
    ],
)
def test_another_wait_in_every_step_is_exit_1(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = report(capsys, TINY, "--set", override)
    assert code == 1
    assert found["recipes"][0]["waits_in_every_step"] > 1


def test_an_average_fetches_every_weight(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, TINY, "--set", "telechat_moe.ema={decay: 0.99}")
    assert code == 0  # it fetches what is ready
    average = next(one for one in found["recipes"][0]["syncs"] if one["key"] == "telechat_moe.ema")
    assert average["waits"] == 0
    assert average["fetches"] > 100


def test_several_sources_fetch_a_loss_of_each_micro_batch() -> None:
    two = "train_dataset.data_loader.config.data_path=['1', 'a/train', '1', 'b/train']"
    four = "runner_config.gradient_accumulation_steps=4"
    more = (four, "callbacks.1.gradient_accumulation_steps=4")
    assert syncs(TINY, *more, two)["trainer.type"].fetches == 9
    assert syncs(TINY, *more)["trainer.type"].fetches == 5


def test_mindformers_waits_layer_by_layer_for_the_bias() -> None:
    ours, theirs = syncs(LARGE), syncs(LARGE, THEIRS)
    assert ours["callbacks.0"].fetches == theirs["callbacks.0"].fetches == 10
    assert (ours["callbacks.1"].waits, ours["callbacks.1"].fetches) == (1, 2 * LAYERS + 1)
    assert (theirs["callbacks.1"].waits, theirs["callbacks.1"].fetches) == (LAYERS, LAYERS)
    assert OUR_TRAINER in theirs["callbacks.1"].move


def test_what_interval_and_sink_size_change() -> None:
    rarely = syncs(LARGE, THEIRS, "runner_config.sink_size=4", "callbacks.0.per_print_times=100")
    assert [rarely[f"callbacks.{i}"].every for i in (0, 1)] == [4, 4]
    assert rarely["callbacks.2.save_checkpoint_steps"].every == 1000
    no_queue = ("runner_config.sink_size=4", "runner_config.sink_mode=False")
    assert syncs(LARGE, *no_queue)["callbacks.0"].every == 1


@pytest.mark.parametrize(
    ("override", "key", "every"),
    [
        ("weight_state_format: log", "monitor_config.weight_state_format", 7),
        ("optimizer_state_format: log", "monitor_config.optimizer_state_format", 7),
        ("max_attention_logit_format: log", "monitor_config.max_attention_logit_format", 7),
        ("device_local_loss_format: log", "monitor_config.device_local_loss_format", 7),
        ("local_norm_format: log", "monitor_config.local_norm_format", 7),
        ("invert: False", "monitor_config", 1),
    ],
)
def test_the_monitor_waits_for_what_it_writes(override: str, key: str, every: int) -> None:
    given = f"monitor_config={{monitor_on: True, step_interval: 7, {override}}}"
    found = syncs(LARGE, given)
    assert found["monitor_config"].fetches == 3
    assert found[key].every == every
    assert "monitor_config" not in syncs(LARGE)


@pytest.mark.parametrize(
    ("item", "key", "waits", "every"),
    [
        ("{type: MoEDropRateCallback}", "callbacks.1", LAYERS, 1),
        (
            "{type: ExpertMigrateCallback, print_expert_load: True}",
            "callbacks.1.print_expert_load",
            1,
            1,
        ),
        ("{type: SDCMonitor}", "callbacks.1.step_interval", 1, 10),
        ("{type: EvalCallBack, step_interval: 50}", "callbacks.1.step_interval", None, 50),
        (
            "{type: StressDetectCallBack, detection_interval: 20, num_detections: 1}",
            "callbacks.1.detection_interval",
            1,
            20,
        ),
        ("{type: TrainingStateMonitor}", "callbacks.1", 0, 1),
        (
            "{type: TrainingStateMonitor, check_for_nan_in_loss_and_grad: True}",
            "callbacks.1",
            0,
            1,
        ),
        ("{type: TrainCallBack, stop_step: 10}", "", 0, 0),
    ],
)
def test_callbacks(item: str, key: str, waits: int | None, every: int) -> None:
    found = syncs(LARGE, f"callbacks=[{{type: MFLossMonitor}}, {item}, {BIAS}]")
    if not key:
        assert not [one for one in found if one.startswith("callbacks.1")]
        return
    assert (found[key].waits, found[key].every) == (waits, every)
    if "TrainingStateMonitor" in item:
        assert found[key].fetches == (6 if "nan" in item else 3)


def test_an_exchange_whose_sizes_the_router_decides_waits() -> None:
    key = "model.model_config.moe_token_dispatcher_type"
    recipe = load(LARGE)
    pieces = recipe.global_batch // recipe.micro_batch_samples
    layers = -(-LAYERS // recipe.parallel_config.pipeline_stage)
    assert syncs(LARGE)[key].waits == layers * pieces
    assert syncs(LARGE, f"{key}=alltoall_zero_redundancy")[key].waits == 2 * layers * pieces
    assert key not in syncs(LARGE, "telechat_moe.sharding.dispatcher=alltoall")
    drops = ("model.model_config.moe_token_drop_policy=probs",)
    drops += ("model.model_config.moe_expert_capacity_factor=1.5",)
    assert key not in syncs(LARGE, *drops)
    assert key not in syncs(TINY)


def test_operators_on_the_host_wait_in_every_pass() -> None:
    """A wait of each part in each expert layer of a stage, micro-batch by micro-batch."""
    recipe, drops = load(LARGE), "model.model_config.moe_"
    passes = -(-LAYERS // recipe.parallel_config.pipeline_stage)
    passes *= recipe.global_batch // recipe.micro_batch_samples

    def counts(*sets: str) -> list[tuple[int | None, int | None]]:
        found = [one for key, one in syncs(LARGE, *sets).items() if key.startswith(HOST)]
        return [(one.waits, one.fetches) for one in found]

    one, two = (passes, passes), (2 * passes, 2 * passes)
    padded, every = "telechat_moe.sharding.dispatcher=alltoall", f"{HOST}=[top_k, sort, histogram]"
    assert counts() == []
    assert counts(every, padded) == [one] * 3
    assert counts(f"{HOST}=[histogram]") == [two]  # where rows are sorted, too
    dropping = (f"{drops}token_drop_policy=probs", f"{drops}expert_capacity_factor=1.5")
    assert counts(every, *dropping) == [one, (passes, 2 * passes), one]  # and the weights
    found, took = syncs(LARGE, every, padded), host_syncs.costs()["min_us"]
    for i, part in enumerate(("top_k", "sort", "histogram")):
        assert f"takes {took[part]:,.0f} us" in found[f"{HOST}.{i}"].move


def every_source() -> set[str]:
    monitor = "monitor_config={monitor_on: True, " + ", ".join(
        f"{name}_format: log"
        for name in (
            "weight_state",
            "optimizer_state",
            "max_attention_logit",
            "device_local_loss",
            "local_norm",
        )
    )
    callbacks = ("MFLossMonitor", "TopkBiasBalanceCallback", "MoEDropRateCallback", "SDCMonitor")
    callbacks += ("EvalCallBack", "StressDetectCallBack", "CheckpointMonitor")
    items = ", ".join(f"{{type: {name}}}" for name in callbacks)
    items += ", {type: ExpertMigrateCallback, print_expert_load: True}"
    items += ", {type: TrainingStateMonitor, check_for_nan_in_loss_and_grad: True}"
    sets = f"callbacks=[{items}]", f"{monitor}}}", f"{HOST}=[top_k, sort, histogram]"
    own = ("telechat_moe.ema={decay: 0.9}", "telechat_moe.moe.placement={every: 5}")
    found = [*syncs(LARGE, *sets).values(), *syncs(LARGE, THEIRS, *sets).values()]
    return {one.source for one in [*found, *syncs(TINY, *own).values()]}


def test_the_code_that_is_named_is_there() -> None:
    installed = importlib.util.find_spec("mindformers") is not None
    checked = 0
    for source in every_source():
        name, *functions = source.split(", ")
        ours = name.startswith(("telechat_moe/", "ops/"))
        if not ours and not installed:
            continue
        spec = importlib.util.find_spec("telechat_moe" if ours else "mindformers")
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin).parents[1] / name
        if functions == ["hierarchical.py"]:
            functions = []
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        defined = {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for function in functions:
            assert set(function.split(".")) <= defined, source
            checked += 1
    assert checked > 5


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--host-syncs", LARGE, TINY]) == 0
    said = capsys.readouterr().out
    assert f"{LARGE}: MindFormers' trainer, waits in every step: " in said
    assert f"{TINY}: our trainer, waits in every step: 1" in said
    assert said.rstrip().endswith("an NPU's are not measured")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((TINY, "--graph", "rank_0.mindir"), 2, "--graph goes with --host-syncs"),
        ((TINY, "--host-syncs", "--graph", "absent.mindir"), 3, "absent.mindir: cannot be read"),
        ((TINY, "--host-syncs", "--graph", "words"), 3, "words: not a graph"),
        ((TINY, "--host-syncs", "--graph", "empty"), 3, "empty: not a graph (no operators in it)"),
        (("absent.yaml", "--host-syncs"), 3, "absent.yaml"),
        ((TINY, "--host-syncs", "--set", "optimizer.lr=1"), 3, "optimizer.lr"),
    ],
)
def test_bad_input(
    words: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("google.protobuf")
    (tmp_path / "words").write_text("these are words")
    (tmp_path / "empty").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert main(["check", *words]) == code
    assert message in capsys.readouterr().err


def test_the_page_quotes_what_was_measured() -> None:
    """One row a measurement, in their order: minimum and median."""
    page = (ROOT / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    costs = host_syncs.costs()
    assert [(int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in rows] == [
        (round(low), round(middle))
        for low, middle in zip(costs["min_us"].values(), costs["median_us"].values(), strict=True)
    ]


def test_the_commands_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    lines = re.findall(r"^telechat-moe (.*)$", page, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)) == 0
        assert "waits in every step: " in capsys.readouterr().out

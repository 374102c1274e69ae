"""What is done beside the steps: in MindFormers' trainer and in ours the same numbers and files."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindformers_runs as runs
import mini_recipe as mini
import numpy as np
import pytest
import spiky_data

from telechat_moe import timings
from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.cli import main
from telechat_moe.errors import CheckFailedError
from telechat_moe.interop.mindformers_config import PLUGIN
from telechat_moe.recipe import load
from telechat_moe.tensor_files import read_header

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
STEPS, SPIKE, SAVED = 80, spiky_data.SPIKE, 40
TIMES = ("seconds", "data_seconds", "tokens_per_second", "stall_ms")
GUARD = "{action: skip, window: 20, min_steps: 10, loss_factor: 1.5, norm_factor: null}"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are the numbers of the tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0} | {str(i): i for i in range(1, 64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_recipe(folder: Path, processes: int = 1, **changes: object) -> Path:
    """Write a recipe with all that is done beside the steps, and data with a spike in one step."""
    data, other = folder / "data", folder / "other"
    for path in (data, other):
        path.mkdir(parents=True)
    spiky_data.write(data, [SPIKE])
    mini.write_data(other)
    write_tokenizer(data)
    values = {
        **spiky_data.changes(lr_schedule__learning_rate=0.006),
        "callbacks__2__save_checkpoint_steps": SAVED,
        "telechat_moe__evaluation__interval": 30,
        "telechat_moe__evaluation__data_path": f"['3', '{data}/valid', '1', '{other}/valid']",
        "telechat_moe__sample": "{prompts: ['1 2 3', '7'], max_new_tokens: 8, temperature: 0.5}",
        "telechat_moe__ema__decay": 0.9,
        "telechat_moe__moe__load_interval": 20,
        "telechat_moe__loss_guard": GUARD,
        "model__model_config__num_nextn_predict_layers": 2,
        **changes,
    }
    return runs.write_recipe(folder, processes, **values)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def numbers(value: Any, key: str = "") -> dict[str, Any]:
    """Return what a line holds, flat, without times."""
    if isinstance(value, dict):
        parts = [numbers(x, f"{key}.{name}") for name, x in value.items() if name not in TIMES]
        return {k: v for part in parts for k, v in part.items()}
    return {key: value}


def assert_same_lines(upstream: list[dict[str, Any]], native: list[dict[str, Any]]) -> None:
    """The same events in the same order, with numbers to 1e-5 and counts exactly."""
    assert [(x["event"], x["step"]) for x in upstream] == [(x["event"], x["step"]) for x in native]
    for a, b in zip(upstream, native, strict=True):
        if a["event"] == "expert_loads":  # the time is of a machine
            assert (a["loads"], a["steps"]) == (b["loads"], b["steps"])
            continue
        x, y = numbers(a), numbers(b)
        assert x.keys() == y.keys()
        for key, value in x.items():
            if isinstance(value, float | list):
                np.testing.assert_allclose(value, y[key], rtol=1e-5, err_msg=f"{key} of {a}")
            else:
                assert value == y[key], f"{key} of {a}"


def assert_same_run(upstream: Path, native: Path) -> None:
    """Lines, averages of the weights, and what the model writes."""
    assert_same_lines(lines(upstream), lines(native))
    for step, bound in ((SAVED, 1e-6), (STEPS, 3e-6)):  # rounding grows with the steps
        name = f"step-{step:08d}"
        a, b = (
            checkpoint.load(upstream / "callbacks" / name),
            checkpoint.load(native / "checkpoints" / name),
        )
        assert a.tensors.keys() == {"ema"}
        assert a.tensors["ema"].keys() == b.tensors["ema"].keys()
        for weight, average in a.tensors["ema"].items():
            np.testing.assert_allclose(average, b.tensors["ema"][weight], atol=bound)
        assert len(a.state["guard"]["losses"]) == len(b.state["guard"]["losses"]) == 20
    assert (upstream / "sample.txt").read_text() == (native / "sample.txt").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a recipe and the output of the run of it through MindFormers."""
    recipe = write_recipe(tmp_path_factory.mktemp("one"))
    runs.through_mindformers(recipe)
    return recipe, recipe.parent / "trained"


def test_one_process(trained: tuple[Path, Path], tmp_path: Path, capfd: Any) -> None:
    """Evaluation of two sources, loads, a step that is skipped, averages, text; pages and tools read the run."""
    recipe, upstream = trained
    runs.through_ours(recipe, tmp_path / "ours")
    assert_same_run(upstream, tmp_path / "ours")
    records = lines(upstream)
    assert [x["step"] for x in records if x["event"] == "guard"] == [SPIKE]
    evaluated = [x for x in records if x["event"] == "evaluation"]
    assert [x["step"] for x in evaluated] == [0, 30, 60, 80]
    assert all(len(x["loss_by_source"]) == 2 for x in evaluated)
    assert evaluated[-1]["loss"] < evaluated[0]["loss"] - 0.5

    about, rows = timings.read(timings.file_of(upstream, 0))
    columns = dict(zip(about["columns"], rows.T, strict=True))
    assert columns["step"].tolist() == list(range(1, STEPS + 1))
    assert columns["graph"].all()
    assert columns["data"].all()
    assert (columns["evaluation"][29] > 10 * np.median(columns["evaluation"])).all()
    assert columns["save"][SAVED - 1] > 10 * np.median(columns["save"])
    assert main(["diagnose", str(upstream)]) in (0, 1)  # 1: this machine is busy
    average = tmp_path / "average.safetensors"
    newest = upstream / f"callbacks/step-{STEPS:08d}"
    assert main(["ckpt", "average", str(newest), "--ema", "--out", str(average)]) == 0
    saved = checkpoint.load(newest).tensors["ema"]
    names = read_header(average).keys()
    assert names == {name.removeprefix("ema.") for name in saved}


def test_a_resumed_run_goes_on_with_averages_and_window(trained: tuple[Path, Path]) -> None:
    """From the checkpoint of the middle every line and every average comes out as before."""
    recipe, output = trained
    before, last = lines(output), output / f"callbacks/step-{STEPS:08d}"
    averages = checkpoint.load(last).tensors["ema"]
    (output / "checkpoint/latest_checkpointed_iteration.txt").write_text(str(SAVED))
    runs.through_mindformers(recipe, 1, "--resume")
    assert_same_lines(lines(output), before)
    resumed = checkpoint.load(last).tensors["ema"]
    for name, average in averages.items():
        np.testing.assert_array_equal(average, resumed[name])


def test_two_processes(tmp_path: Path) -> None:
    half = {"runner_config__batch_size": 2, "model__model_config__batch_size": 2}
    recipe = write_recipe(tmp_path, 2, **half, lr_schedule__learning_rate=0.003)
    runs.through_mindformers(recipe, 2)
    runs.through_ours(recipe, tmp_path / "ours")
    assert_same_run(tmp_path / "trained", tmp_path / "ours")
    for rank in range(2):
        about, rows = timings.read(timings.file_of(tmp_path / "trained", rank))
        assert (about["rank"], about["ranks"], len(rows)) == (rank, 2, STEPS)


def test_a_run_stops_and_outlives_failed_saves(tmp_path: Path) -> None:
    """Files where checkpoints are to be folders; then more spikes in a row than the recipe allows."""
    never = "{min_steps: 8, window: 8, loss_factor: null, norm_factor: 1.000001}"
    recipe = write_recipe(
        tmp_path,
        callbacks__2__save_checkpoint_steps=4,
        telechat_moe__saving__max_failed=5,
        telechat_moe__loss_guard=never,
        telechat_moe__max_skipped_steps=1,
        telechat_moe__evaluation__interval=0,
        telechat_moe__ema="null",
    )
    (tmp_path / "trained/checkpoint").mkdir(parents=True)
    for step in (4, 5):  # MindFormers tries again in the next step
        (tmp_path / f"trained/checkpoint/iteration_{step:08d}").write_text("")
    command = ["python", "-m", "telechat_moe.run", str(recipe), "--through", "mindformers"]
    text = runs.run(command, tmp_path, check=False)
    events = lines(tmp_path / "trained")
    skipped = [x["step"] for x in events if x["event"] == "guard"]
    assert skipped[-2] + 1 == skipped[-1] == events[-1]["step"]
    assert f"error: stopped at step {skipped[-1]}: 2 steps in a row" in text
    assert "warning: MindFormers could not write the checkpoint" in text
    assert "2 save(s) in a row failed" in text


def test_a_fixed_threshold_of_the_norm(tmp_path: Path) -> None:
    """What MindFormers' step skips is a skipped step to our callbacks; the others move expert biases and averages."""
    off = ("sample", "ema", "loss_guard")
    recipe = write_recipe(
        tmp_path,
        use_skip_data_by_global_norm=True,
        monitor_config="{global_norm_spike_threshold: 1.4}",
        train_dataset__data_loader__sizes="[48, 0, 0]",
        telechat_moe__evaluation__interval=0,
        **{f"telechat_moe__{name}": "null" for name in off},
    )
    runs.through_mindformers(recipe)
    runs.through_ours(recipe, tmp_path / "ours")
    assert_same_lines(lines(tmp_path / "trained"), lines(tmp_path / "ours"))
    steps = [x["skipped"] for x in lines(tmp_path / "ours") if x["event"] == "step"]
    assert len(steps) == 12
    assert 0 < sum(steps) < 12


def test_where_each_device_has_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Times are taken, failed saves outlived, and skipped steps counted; nothing asks for the whole model."""
    from telechat_moe.interop import mindformers_callbacks as plugin

    monkeypatch.chdir(tmp_path)
    changes = {"max_skipped_steps": 2, "saving": "{max_failed: 1}", "ema": "null"}
    values = {f"telechat_moe__{name}": value for name, value in changes.items()}
    recipe = load(write_recipe(tmp_path, telechat_moe__loss_guard="null", **values))
    model: Any = SimpleNamespace(model=None, needs_loads=False, by_source=lambda: None)
    hooks = plugin.TrainingHooks(recipe, model, begun=0, split=True)
    hooks._begin(None)

    def fail(context: Any) -> None:
        raise OSError("no space left")

    saves: Any = SimpleNamespace(on_train_step_end=fail, _last_triggered_step=0)
    weights = {"w": SimpleNamespace(asnumpy=lambda: np.array(np.nan))}
    monkeypatch.setattr(plugin.parameters, "saved_weights", lambda _: weights)

    def step(number: int, overflow: bool) -> Any:
        values = [SimpleNamespace(asnumpy=lambda x=x: np.array(x)) for x in (2.0, overflow, 1.0)]
        outputs = (values[0], values[1], None, 1e-3, values[2])
        params = SimpleNamespace(net_outputs=outputs, cur_step_num=number)
        context = SimpleNamespace(original_args=lambda: params)
        for call in (hooks._step_begin, hooks._fetch, hooks._beside):
            call(context)
        return context

    for number, overflow in enumerate([False, True, True, False, True, True], 1):
        context = step(number, overflow)
        if number == 4:
            hooks._save(saves, context, last=False)
        hooks._step_done(context)
    assert "warning: MindFormers could not write the checkpoint: no space" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="no space left"):
        hooks._save(saves, context, last=False)
    with pytest.raises(CheckFailedError, match="stopped at step 7: 3 steps in a row"):
        step(7, True)
    hooks._close()
    _, rows = timings.read(timings.file_of(Path(recipe.output_dir), 0))
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in Path(recipe.output_dir).iterdir()) == ["timings"]


BY_TYPE = """
import sys
import numpy as np, mindspore as ms
from mindspore import nn, Tensor, dataset
from mindspore.train import Callback, Model
from mindformers.core.callback import build_callback
from mindformers.core.optim import AdamW
from mindformers.utils.file_utils import set_output_path
import mindformers.wrapper.wrapper as wrapper
from telechat_moe.errors import CheckFailedError
from telechat_moe.interop.mindformers_bridges import TelechatMoeTrainOneStep
ms.set_context(mode=0, device_target="CPU")
wrapper.is_legacy_model = lambda: True
set_output_path(sys.argv[1])
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.ones((2, 2), np.float32)), name="w")
    def construct(self, x):
        return (x * self.w).sum().reshape((1,))
class Print(Callback):
    def on_train_step_end(self, context):
        loss, overflow, _, _, norm = context.original_args().net_outputs
        print("STEP", float(loss.asnumpy()[0]), bool(overflow.asnumpy()), float(norm.asnumpy()))
net = Net()
cell = TelechatMoeTrainOneStep(net, AdamW(net.trainable_params()), use_clip_grad=True, scale_sense=1.0)
x = np.stack([np.full((2, 2), v, np.float32) for v in (1, 2, np.inf, 3, np.inf, np.inf, 4)])
monitor = build_callback({"type": "TelechatMoeMonitor", "auto_register": "telechat_moe_plugin.TelechatMoeMonitor", "max_skipped_steps": 1})
try:
    Model(cell).train(1, dataset.NumpySlicesDataset({"x": x}, shuffle=False), callbacks=[Print(), monitor], dataset_sink_mode=False)
except CheckFailedError as error:
    print("STOPPED", error)
"""


def test_a_recipe_of_another_model_names_the_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MindFormers' registry, with any step of MindFormers: what MindSpore returns is what is recorded."""
    (tmp_path / "code.py").write_text(BY_TYPE)
    monkeypatch.setenv("REGISTER_PATH", str(PLUGIN))
    text = runs.run([sys.executable, "code.py", str(tmp_path / "out")], tmp_path)
    printed = [line.split()[1:] for line in text.splitlines() if line.startswith("STEP")]
    records = lines(tmp_path / "out")
    steps = [x for x in records if x["event"] == "step"]
    assert [x["step"] for x in steps] == [1, 2, 3, 4, 5, 6]
    for step, (loss, overflow, norm) in zip(steps, printed, strict=True):
        assert step["skipped"] == (overflow == "True")
        if not step["skipped"]:
            assert (step["loss"], step["grad_norm"]) == (float(loss), float(norm))
        assert step["lm_loss"] is None  # not known
    assert [x["step"] for x in records if x["event"] == "guard"] == [3, 5, 6]
    assert "STOPPED stopped at step 6: 2 steps in a row" in text
    assert "max_skipped_steps of TelechatMoeMonitor in callbacks is 1" in text

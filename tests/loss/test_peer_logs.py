"""Loss curves as other programs leave them: logs of Megatron-LM and torchtitan, a Trainer's state, exports of W&B.

The forms are those of public files; the numbers are ours.
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.loss.curve import LossCurve
from telechat_moe.tools.loss.read import read

RUNS = Path(__file__).parents[1] / "fixtures" / "align_loss"
NAN = float("nan")

# epfLLM/Megatron-LLM issue 11, with the rank's prefix of bigscience-workshop; and bigscience-workshop/Megatron-DeepSpeed issue 396, where a
# loss that is NaN is not printed
MEGATRON = """\
[after dataloaders are built] datetime: 2026-11-20 10:00:00
[default3]: iteration       10/     500 | consumed samples:          960 | elapsed time per iteration (ms): 723.1 | learning rate: 4.438E-07 | \
global batch size:    96 | lm loss: 1.050967E+01 | mtp_1 loss: 1.060000E+01 | loss scale: 4096.0 | grad norm: 178.553 | \
number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 13.276 |
 [2026-11-20 10:00:09] iteration       20/     500 | consumed samples:         1920 | elapsed time per iteration (ms): 535.5 | \
learning rate: 8.876E-07 | global batch size:    96 | loss scale: 2048.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
 validation loss at iteration 20 | lm loss value: 9.100000E+00 | lm loss PPL: 8.955E+03 |
 iteration       30/     500 | consumed samples:         2880 | elapsed time per iteration (ms): 535.5 | learning rate: 1.331E-06 | \
global batch size:    96 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       40/     500 | consumed samples:         3840 | elapsed time per iteration (ms): 535.5 | learning rate: 1.775E-06 | \
global batch size:    96 | lm loss: 8.250000E+00 | loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       50/     500 | consumed samples:         4800 | lm loss: 8.125000E+00 | grad norm: 12.345 | number of skipped iterations:   0 |
"""
# pytorch/torchtitan pull request 2389 (a line of each rank); the colours and `validate step` of its metrics.py; `640/644 = 99.3789%` of a fork
TITAN = """\
[rank0]:[titan] 2026-11-20 10:00:00,897 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.12345  \x1b[38;2;180;60;0mgrad_norm:  3.6855  \
\x1b[38;2;54;234;195mmemory:  2.47GiB(3.12%)  \x1b[34mtps: 3,502  \x1b[36mtflops: 1.90  \x1b[35mmfu: 0.19%\x1b[39m
[titan] 2026-11-20 10:00:00,897 - root - INFO - Synchronizing and adjusting timeout for all ProcessGroups to 0:01:40
[titan] 2026-11-20 10:00:01,501 - root - INFO - step: 20  loss:  nan  grad_norm:  inf  memory: 66.91GiB(37.51%)  tps: 10,050  mfu: 13.99%
[titan] 2026-11-20 10:00:01,502 - root - INFO - step: 20  loss:  nan  grad_norm:  inf  memory: 66.91GiB(37.51%)  tps: 10,049  mfu: 13.98%
[titan] 2026-11-20 10:00:02,502 - root - INFO - validate step: 20  loss:  7.1000  memory: 66.91GiB(37.51%)  tps: 10,049
[rank0]:2026-11-20 10:00:03,084 - root - INFO - step: 40/80 = 50.0%  loss:  6.2116  memory: 87.04GiB(93.48%)  tps: 52,142  mfu: 3.09%
[titan] 2026-11-20 10:00:04,000 - root - INFO - step: 60  loss:  5.12345  grad_norm: 12.3456  memory: 66.91GiB(37.51%)  tps: 10,050
"""
# trainer_state.json of aigoncharov/trainer_state_viz, in which evaluations stand between
STATE = {
    "best_metric": None,
    "global_step": 1200,
    "log_history": [
        {"epoch": 0, "eval_loss": 5.25, "eval_runtime": 5.7, "step": 0},
        {"epoch": 1.0, "grad_norm": 5.5, "learning_rate": 1e-05, "loss": 1.125, "step": 400},
        {"epoch": 1.0, "eval_loss": 1.5, "eval_runtime": 5.7, "step": 400},
        {"epoch": 2.0, "learning_rate": 1e-05, "loss": NAN, "step": 800},
        {"epoch": 2.0, "train_loss": 0.9, "train_runtime": 99.0, "step": 800},
    ],
}
# A chart of W&B that draws two runs, and the history of one
CHART = """\
"Step","calm-sun-1, again - train/loss","calm-sun-1, again - train/loss__MIN","calm-sun-1, again - train/loss__MAX",\
"dark-moon-2 - train/loss","dark-moon-2 - train/loss__MIN","dark-moon-2 - train/loss__MAX"
"10","8.5","8.5","8.5","","",""
"20","7.5","7.5","7.5","7.25","7.25","7.25"
"30","","","","NaN","NaN","NaN"
"""
HISTORY = """\
_step,train/loss,train/grad_norm,train/global_step,eval/loss
0,8.5,1.5,10,
1,,,10,8.125
2,7.5,2.5,20,
"""


def write(folder: Path, text: str, name: str = "run.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def same(curve: LossCurve, steps: list[int], loss: list[float], norm: list[float]) -> None:
    assert curve.steps.tolist() == steps
    np.testing.assert_array_equal(curve.loss, loss)
    np.testing.assert_array_equal(curve.norm, norm)


def test_log_of_megatron(tmp_path: Path):
    curve = read(write(tmp_path, MEGATRON))
    assert (curve.kind, curve.metric) == ("Megatron-LM log", "lm loss")
    same(curve, [10, 30, 40, 50], [10.50967, NAN, 8.25, 8.125], [178.553, NAN, NAN, 12.345])
    assert "1 lines of skipped iterations" in curve.notes[0]
    assert "each value is the mean of the steps since" in curve.notes[1]
    first = "".join(MEGATRON.splitlines(keepends=True)[:2])
    assert read(write(tmp_path, first), "mtp_1 loss").loss.tolist() == [10.6]
    with pytest.raises(
        BadInputError, match=r"run.txt:2: no z loss in this line .* found .*lm loss"
    ):
        read(write(tmp_path, first), "z loss")


def test_log_of_torchtitan(tmp_path: Path):
    curve = read(write(tmp_path, TITAN))
    assert curve.kind == "torchtitan log"
    same(curve, [1, 20, 40, 60], [8.12345, NAN, 6.2116, 5.12345], [3.6855, np.inf, NAN, 12.3456])
    assert "1 steps are in the log more than once" in curve.notes[0]
    with pytest.raises(BadInputError, match="has no z"):
        read(write(tmp_path, TITAN), "z")


@pytest.mark.parametrize("log", [MEGATRON, TITAN], ids=["Megatron-LM", "torchtitan"])
def test_a_line_that_is_torn(tmp_path: Path, log: str):
    """The last one is left out wherever a kill has cut it, and no part of a number is a number; in the middle it is refused."""
    whole = read(write(tmp_path, log))
    before = log.rstrip("\n").rpartition("\n")[0] + "\n"
    last = log.removeprefix(before).rstrip("\n")
    for end in range(len(last)):
        part = read(write(tmp_path, before + last[:end]))
        count = len(part.steps)
        assert count in (len(whole.steps) - 1, len(whole.steps))
        np.testing.assert_array_equal(part.loss, whole.loss[:count])
        np.testing.assert_array_equal(part.norm, whole.norm[:count])
    torn = last[: last.index("loss: ") + 7]
    with pytest.raises(BadInputError, match=r"run.txt:\d+: "):
        read(write(tmp_path, f"{before}{torn}\n{last}\n"))


def test_state_of_a_trainer(tmp_path: Path):
    path = write(tmp_path, json.dumps(STATE, indent=2), "trainer_state.json")
    for place in (path, tmp_path, write(tmp_path, json.dumps(STATE), "in_one_line.json")):
        curve = read(place)
        same(curve, [400, 800], [1.125, NAN], [5.5, NAN])
        assert "up to 400" in curve.notes[0]
    same(read(path, "eval_loss"), [0, 400], [5.25, 1.5], [NAN, NAN])
    with pytest.raises(
        BadInputError, match=r"no entry of log_history has 'z'; there are epoch, eval_loss"
    ):
        read(path, "z")
    for wrong in (
        {"log_history": 3},
        {"log_history": [{"loss": 1.0}]},
        {"log_history": [{"loss": "x", "step": 1}]},
    ):
        with pytest.raises(BadInputError, match=r"state.json:1: .*log_history"):
            read(write(tmp_path, json.dumps(wrong), "state.json"))


def test_chart_of_wandb(tmp_path: Path):
    path = write(tmp_path, CHART, "wandb_export.csv")
    with pytest.raises(
        BadInputError,
        match=r"csv:1: 2 columns of a loss; name one with --metric: calm-sun-1, again - train/loss, dark",
    ):
        read(path)
    for name in ("dark-moon-2", "dark-moon-2 - train/loss"):
        curve = read(path, name)
        assert (curve.kind, curve.metric) == ("export of W&B", "dark-moon-2 - train/loss")
        same(curve, [20, 30], [7.25, NAN], [NAN, NAN])
    one = [",".join(f'"{cell}"' for cell in row[:4]) for row in csv.reader(io.StringIO(CHART))]
    same(read(write(tmp_path, "\n".join(one) + "\n")), [10, 20], [8.5, 7.5], [NAN, NAN])
    with pytest.raises(BadInputError, match="no column of a loss; name one with --metric"):
        read(path, "z")
    text = CHART.replace('"Step"', '"Relative Time (Process)"')
    with pytest.raises(BadInputError, match="no column of a step"):
        read(write(tmp_path, text), "dark-moon-2")


def test_history_of_wandb(tmp_path: Path):
    path = write(tmp_path, HISTORY, "history.csv")
    same(read(path), [10, 20], [8.5, 7.5], [1.5, 2.5])
    same(read(path, "eval/loss"), [10], [8.125], [NAN])


def test_notes_are_true(tmp_path: Path):
    """Nothing is a mean of one step; a line that is left out is named; without a norm there is none."""
    line = " iteration {:8d}/    1200 | {}number of skipped iterations:   {} |\n"
    lines = [line.format(s, "lm loss: 2.5 | " * (s != 3), int(s == 3)) for s in (1, 2, 3, 4)]
    notes = read(write(tmp_path, "".join(lines))).notes
    assert notes == ("1 lines of skipped iterations have no loss and are left out",)
    torn = "".join(lines) + " iteration 5/ 1200 | lm loss: 2.5 | grad"
    assert "line 5 is torn off and left out" in read(write(tmp_path, torn)).notes
    twice = "".join(lines[:2] * 3)
    assert read(write(tmp_path, twice)).notes[0].startswith("2 steps are in the log more than once")
    history = [{"step": s, "loss": 1.0, "grad_norm": None, "eval_loss": 1.0} for s in (2, 4)]
    path = write(tmp_path, json.dumps({"log_history": history}), "state.json")
    assert "mean" in read(path).notes[0]
    assert read(path, "eval_loss").notes == ()
    same(read(path), [2, 4], [1.0, 1.0], [NAN, NAN])


def as_megatron(rows: list[tuple[int, float, float]]) -> str:
    line = " iteration {:8d}/    1200 | lm loss: {:.6E} | grad norm: {:.3f} | number of skipped iterations:   0 |\n"
    return "".join(line.format(*row) for row in rows)


def as_titan(rows: list[tuple[int, float, float]]) -> str:
    line = (
        "[titan] - INFO - step: {:2}  loss: {:8.5f}  grad_norm: {:7.4f}  memory: 1.00GiB(1.00%)\n"
    )
    return "".join(line.format(*row) for row in rows)


def as_state(rows: list[tuple[int, float, float]]) -> str:
    history = [{"step": s, "loss": x, "grad_norm": n} for s, x, n in rows]
    return json.dumps({"log_history": history})


def as_chart(rows: list[tuple[int, float, float]]) -> str:
    head = '"Step","a - train/loss","a - train/loss__MIN","a - train/loss__MAX","a - train/grad_norm"\n'
    return head + "".join(f'"{s}","{x}","{x}","{x}","{n}"\n' for s, x, n in rows)


@pytest.mark.parametrize("form", [as_megatron, as_titan, as_state, as_chart])
def test_a_real_curve_in_each_form(
    form: Callable[[list[tuple[int, float, float]]], str], tmp_path: Path
):
    curve = read(RUNS / "fused.csv")
    rows = list(zip(curve.steps.tolist(), curve.loss.tolist(), curve.norm.tolist(), strict=True))
    other = read(write(tmp_path, form(rows)))
    assert other.steps.tolist() == curve.steps.tolist()
    np.testing.assert_allclose(other.loss, curve.loss, rtol=2e-6)
    np.testing.assert_allclose(other.norm, curve.norm, atol=6e-4)
    if form is as_chart:  # by the run's name, which has a column of norms, too
        assert read(tmp_path / "run.txt", "a").loss.tolist() == other.loss.tolist()

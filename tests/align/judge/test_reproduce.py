"""A wrong call by itself: the script fails while it is wrong, and passes once it is right."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.align_faults.faults import CLASSES
from benchmarks.align_faults.score import plant, run
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe
from telechat_moe.tools.align.judge import reproduce

# class of fault, layout, what is wrong
CASES = [
    ("doubled", "one", "call"),
    ("gradient doubled", "one", "call"),
    ("rate doubled", "one", "call"),
    ("least likely expert chosen", "one", "call"),
    ("gradient not reduced", "dp2", "call"),
    ("gathered in another order", "tp2 sp", "call"),
    ("received rolled", "pp2", "call"),
    ("handed a scaled tensor", "one", "input"),
    ("handed a doubled gradient", "one", "input"),
    ("bit of a weight", "one", "input"),
    ("weight of the step before", "one", "input"),
    ("call left out", "one", "missing"),
]


def first_wrong(name, layout, seed=3):
    base, planted = plant(CLASSES[name], [layout], seed)
    return bisect(run(base).dump(), run(base, planted, seed).dump()).findings[0]


@pytest.mark.parametrize(("name", "layout", "wrong"), CASES)
def test_it_is_wrong_again(name, layout, wrong, tmp_path):
    finding = first_wrong(name, layout)
    script = reproduce.write(finding, tmp_path / "wrong")
    verdict = reproduce.check(script.parent)
    assert verdict.status == "diverged"
    assert (verdict.key == finding.verdict.key) == (wrong != "input")
    if wrong == "call":
        assert verdict.ratio == finding.verdict.ratio
    assert finding.verdict.key in script.read_text()


@pytest.mark.parametrize(("name", "layout", "wrong"), CASES)
def test_it_is_right_where_the_target_is_as_the_reference(name, layout, wrong, tmp_path):
    finding = first_wrong(name, layout)
    folder = reproduce.write(finding, tmp_path / "wrong").parent
    ours, theirs = (msprobe.read(folder / side).ranks for side in ("target", "reference"))
    whole = run(plant(CLASSES[name], [layout], 3)[0]).dump().ranks
    for at, dump in ours.items() if wrong != "input" else ():
        for key, call in dump.calls.items():
            right = whole[at].calls.get(key)
            for place, record in call.tensors() if right else ():
                if record.path is not None:
                    np.save(record.path, dict(right.tensors())[place].load())
            if (
                right is None and wrong == "input"
            ):  # a call of its own computes what the input must be
                parts = [record.load() for _, record in call.given()]
                np.save(call.made()[0][1].path, sum(parts[1:], parts[0]))
    if wrong == "input":  # a call of its own computes what the input must be
        calls = [call for dump in ours.values() for call in dump.calls.values()]
        parts = [call.given()[0][1].load() for call in calls]
        np.save(calls[0].made()[0][1].path, sum(parts[1:], parts[0]))
    if wrong == "missing":
        assert [len(theirs[at].calls) - len(ours[at].calls) for at in ours] == [1]
    else:
        assert reproduce.check(folder).status == "pass"


def script_of(tmp_path, name="doubled", layout="one"):
    return reproduce.write(first_wrong(name, layout), tmp_path / "wrong")


def test_the_script_runs_alone_and_is_content_with_the_right_result(tmp_path):
    script = script_of(tmp_path)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert "observed / bound" in found.stdout
    (data,) = script.parent.rglob("*.output.0.npy")
    np.save(data, np.load(data) / 2)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (found.returncode, "pass" in found.stdout) == (0, True)


def test_a_collective_holds_what_all_ranks_gave(tmp_path):
    folder = script_of(tmp_path, "gradient not reduced", "dp4").parent
    target = msprobe.read(folder / "target")
    assert [rank for _, rank in target.ranks] == [0, 1, 2, 3]
    assert [len(dump.calls) for dump in target.ranks.values()] == [1] * 4


def test_an_input_holds_both_tensors_and_the_statement(tmp_path):
    script = script_of(tmp_path, "handed a scaled tensor")
    ((_, dump),) = msprobe.read(script.with_name("target")).ranks.items()
    ((_, call),) = dump.calls.items()
    (_, part), (_, observed) = call.tensors()
    assert np.array_equal(observed.load(), 2 * part.load())
    assert "must be what" in script.read_text()


def test_only_numpy_is_needed(tmp_path):
    script = script_of(tmp_path)
    code = (
        "import sys, runpy\n"
        "for name in ('torch', 'mindspore', 'scipy'): sys.modules[name] = None\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


def test_nothing_is_overwritten_and_broken_files_are_said(tmp_path):
    folder = script_of(tmp_path).parent
    with pytest.raises(BadInputError, match="not empty"):
        reproduce.write(first_wrong("doubled", "one"), folder)
    (data,) = folder.rglob("*.output.0.npy")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(BadInputError, match="npy"):
        reproduce.check(folder)
    with pytest.raises(BadInputError, match="none"):
        reproduce.check(tmp_path / "none")

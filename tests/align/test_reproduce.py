"""A wrong call by itself: the script fails while it is wrong, and passes once it is right."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.align_faults.faults import CLASSES
from benchmarks.align_faults.score import plant, run
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.judge import reproduce
from telechat_moe.tools.align.judge.bisect import bisect

# class of fault, layout, kind of reproducer
CASES = [
    ("doubled", "one", "operator"),
    ("gradient doubled", "one", "operator"),
    ("rate doubled", "one", "operator"),
    ("least likely expert chosen", "one", "operator"),
    ("gradient not reduced", "dp2", "exchange"),
    ("gathered in another order", "tp2 sp", "exchange"),
    ("received rolled", "pp2", "exchange"),
    ("handed a scaled tensor", "one", "input"),
    ("handed a doubled gradient", "one", "input"),
    ("bit of a weight", "one", "input"),
    ("weight of the step before", "one", "input"),
    ("call left out", "one", "calls"),
]


def first_wrong(name, layout, seed=3):
    base, planted = plant(CLASSES[name], [layout], seed)
    return bisect(run(base).dump(), run(base, planted, seed).dump()).findings[0]


@pytest.mark.parametrize(("name", "layout", "kind"), CASES)
def test_it_is_wrong_again(name, layout, kind, tmp_path):
    finding = first_wrong(name, layout)
    script = reproduce.write(finding, tmp_path / "wrong")
    about, verdict = reproduce.check(script.with_name("call.npz"))
    assert (about["kind"], about["key"], verdict.status) == (kind, finding.verdict.key, "diverged")
    if kind in ("operator", "exchange"):
        assert verdict.ratio == finding.verdict.ratio
    assert finding.verdict.key in script.read_text()


def script_of(tmp_path, name="doubled", layout="one"):
    return reproduce.write(first_wrong(name, layout), tmp_path / "wrong")


def test_the_script_runs_alone_and_is_content_with_the_right_result(tmp_path):
    script = script_of(tmp_path)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert "observed / bound" in found.stdout
    data = script.with_name("call.npz")
    with np.load(data) as file:
        tensors = dict(file)
    tensors["result.0"] = tensors["result.0"] / 2
    np.savez(data, **tensors)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (found.returncode, "pass" in found.stdout) == (0, True)


def test_a_collective_holds_what_all_ranks_gave(tmp_path):
    script = script_of(tmp_path, "gradient not reduced", "dp4")
    with np.load(script.with_name("call.npz")) as file:
        names = set(file.files)
    assert {n.split(".")[0] for n in names} == {"about", "rank0", "rank1", "rank2", "rank3"}


def test_an_input_holds_both_tensors_and_the_statement(tmp_path):
    script = script_of(tmp_path, "handed a scaled tensor")
    with np.load(script.with_name("call.npz")) as file:
        assert np.array_equal(file["observed"], 2 * file["part.0"])
    assert "must be what" in reproduce.check(script.with_name("call.npz"))[0]["said"]


def test_only_numpy_is_needed(tmp_path):
    script = script_of(tmp_path)
    code = (
        "import sys, runpy\n"
        "for name in ('torch', 'mindspore', 'scipy'): sys.modules[name] = None\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


def test_nothing_is_overwritten_and_broken_files_are_said(tmp_path):
    script = script_of(tmp_path)
    with pytest.raises(BadInputError, match="not empty"):
        reproduce.write(first_wrong("doubled", "one"), script.parent)
    data = script.with_name("call.npz")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(BadInputError, match="no reproducer"):
        reproduce.check(data)
    with pytest.raises(BadInputError, match="no reproducer"):
        reproduce.check(tmp_path / "none.npz")

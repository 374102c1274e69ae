"""What was not judged is never a pass: the three verdicts, the shares that they rest on, maps that do not fit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.coverage import Coverage, advice, answer
from telechat_moe.tools.align.maps.links import Link
from telechat_moe.tools.align.report import bisect_page

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def tensor(values):
    values = np.asarray(values)
    return TensorRecord(values.dtype.name, values.shape, read=lambda: values)


def forward(name, inputs, output, number=0):
    given = [tensor(x) for x in inputs]
    key = f"{name}.{number}.forward"
    return Call(key, "api", name, number, Phase.FORWARD, given, {}, [tensor(output)])


def dump(*calls):
    return Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", {c.key: c for c in calls})})  # fmt: skip


@pytest.mark.parametrize(
    ("judged", "total", "sizes", "word"),
    [
        (95, 100, (1, 1), "pass"),
        (94, 100, (1, 1), "inconclusive"),  # too few calls
        (99, 100, (1, 40), "inconclusive"),  # enough calls, too few bytes
        (0, 100, (1, 1), "inconclusive"),
    ],
)
def test_a_pass_needs_95_percent_of_calls_and_of_bytes(judged, total, sizes, word):
    coverage = Coverage()
    for i in range(total):
        known = i < judged
        size = sizes[not known]
        coverage.count("forward", size, {} if known else {"no formula for Torch.x": size})
    coverage.count("backward", 10, {})
    assert answer(False, coverage)[0] == word
    assert answer(True, coverage)[0] == "diverged"
    share = judged / (judged + sizes[1] * (total - judged))
    assert (judged / total >= 0.95 and share >= 0.95) == (word == "pass")


def test_each_phase_counts_for_itself():
    coverage = Coverage()
    for _ in range(1000):
        coverage.count("forward", 1000, {})
    coverage.count("optimizer", 1, {"its forward call is not in the dump": 1})
    word, why = answer(False, coverage)
    assert word == "inconclusive"
    assert (
        why == "optimizer: 0 of 1 calls and 0% of the bytes were judged; a pass needs 95% of both"
    )


def test_nothing_is_no_pass():
    assert answer(False, Coverage()) == ("inconclusive", "not a single tensor could be judged")


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("values of this tensor were not dumped", "task `tensor`"),
        ("linear: argument 'weight' is not in the dump", "weights"),
        ("its forward call is not in the dump", "forward pass"),
        ("rank 3 of its group is not in the dump", "every rank"),
        ("nothing in the dump says where an input comes from", "calls between"),
    ],
)
def test_what_to_dump_is_said(reason, word):
    assert word in advice(reason)


def test_a_run_that_cannot_be_recomputed_is_inconclusive_everywhere(tmp_path, capsys):
    """A vendor's operator next to a known one: one run passes only by what it recomputed."""
    calls = [forward("Functional.relu", [X], np.maximum(X, 0)), forward("NPU.my_op", [X], 3 * X)]
    msprobe_write.write(dump(*calls), tmp_path / "one")
    report = tmp_path / "replay.json"
    assert main(["align", str(tmp_path / "one"), "--json", str(report)]) == 4
    said = capsys.readouterr().out
    assert "1 of 2" in said
    assert "to have more judged, dump values of this call" in said
    found = json.loads(report.read_text())
    share = {"calls": 2, "judged_calls": 1, "bytes": 256, "judged_bytes": 128}
    assert (found["verdict"], found["coverage"]) == ("inconclusive", {"forward": share})
    assert [(o["calls"], o["bytes"]) for o in found["to_dump"]] == [(1, 128)]
    page = bisect_page.page(found)
    assert "What to dump to have the rest judged" in page
    assert "1 of 2, 50%" in page


def test_wrong_in_both_runs_is_not_judged():
    """`bisect` cannot tell which run is right where both exceed the bound alike."""
    from telechat_moe.tools.align.bisect import bisect

    outcome = bisect(*[dump(forward("Functional.relu", [X], np.maximum(X, 0) + 1))] * 2)
    assert outcome.verdict == "inconclusive"
    assert next(iter(outcome.unknown)).startswith("output.0: beyond its bound in both runs")


def two_frameworks(names, values):
    calls = [forward(name, [X], x) for name, x in zip(names, values, strict=True)]
    return dump(*[replace(c, kind="module") for c in calls])


def test_a_map_with_swapped_sides_is_an_error(tmp_path, capsys):
    one, two = ["Module.a", "Module.b", "Module.same"], ["Cell.p", "Cell.q", "Module.same"]
    reference, target = (two_frameworks(names, [X, 2 * X, 3 * X]) for names in (one, two))
    links = [
        Link(a, (f"{a}.0.forward output.0",), (f"{b}.0.forward output.0",))
        for a, b in zip(one, two, strict=True)
    ]
    assert not across(reference, target, links).findings
    with pytest.raises(BadInputError, match="sides are swapped"):
        across(target, reference, links)
    for name, run in (("one", reference), ("two", target)):
        msprobe_write.write(run, tmp_path / name)
    entries = [{"name": k.name, "reference": k.reference[0], "target": k.target[0]} for k in links]
    (tmp_path / "map.json").write_text(json.dumps(entries))
    given = [str(tmp_path / name) for name in ("two", "one")]
    (tmp_path / "empty.json").write_text("[]")
    for standard in ([], ["--standard", "torch"]):
        command = ["align", *given, *standard, "--map"]
        assert main([*command, str(tmp_path / "map.json")]) == 3
        assert "sides are swapped" in capsys.readouterr().err
        assert main([*command, str(tmp_path / "empty.json")]) == 3
        assert "the map is empty" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [False, True])
def test_a_gradient_that_only_the_target_lacks_is_not_left_out(lost):
    """A module whose inputs need no gradient has none in both runs; one that lost it is no pass."""

    def run(is_lost):
        calls = []
        for number in range(3):
            name, outputs = (
                f"Module.layers.{number}.Linear",
                [tensor(X)] * (not is_lost or number != 1),
            )
            calls.append(
                Call(
                    f"{name}.forward.0",
                    "module",
                    name,
                    0,
                    Phase.FORWARD,
                    [tensor(X)],
                    {},
                    [tensor(X)],
                )
            )
            calls.append(Call(f"{name}.backward.0", "module", name, 0, Phase.BACKWARD, [tensor(X)], {}, outputs))  # fmt: skip
        by_key = {call.key: call for call in calls}
        return Dump(Path(), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L0", by_key, Path())})

    outcome = bisect(run(False), run(lost))
    assert (outcome.verdict == "pass") is not lost

"""Targets of the operator benchmark from measurements worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ops import sets
from benchmarks.ops.__main__ import _show, main
from benchmarks.ops.report import page, targets
from benchmarks.ops.timing import Measurement, check_same, in_turns
from telechat_moe.errors import BadInputError
from telechat_moe.ops import native


def measurement(group: str, op: str, shape: str, **best: float) -> Measurement:
    return Measurement(group, op, shape, 1, best={k.replace("_", " "): v for k, v in best.items()})


def test_targets_are_ratios_of_best_times() -> None:
    cases = [
        measurement("vector", "gelu", "16x1024", ours=1.0, inductor=2.0, torch_eager=3.0),
        measurement("vector", "softmax", "16x1024", ours=2.0, inductor=1.0),
        measurement("adamw", "AdamW", "19M", ours=2.0, torch_fused=3.0),
    ]
    cases[0].compile = {"encode": 0.5, "trace, build, encode": 50.0}
    found = {t.name: t for t in targets(cases)}
    assert found["vector: TorchInductor's speed, geometric mean"].reached == 1.0
    worst = found["vector: TorchInductor's speed, worst case"]
    assert (worst.reached, worst.met) == (0.5, False)
    assert found["compile: encodings a microsecond, worst median"].reached == 2.0
    assert found["AdamW: torch fused"].met
    assert found["cross-entropy: torch"].met is None  # nothing measured is no pass
    result = {
        "machine": "a <machine>",
        "targets": [{**t._asdict(), "met": t.met} for t in targets(cases)],
        "cases": [c.as_dict() for c in cases],
    }
    assert "a &lt;machine&gt;" in page(result)


def test_a_peer_is_timed_only_after_its_results_were_compared() -> None:
    case = measurement("adamw", "AdamW", "19M")
    peers = {"ours": list, "torch": list}
    with pytest.raises(RuntimeError, match="not compared with ours: torch"):
        in_turns(case, peers, 0.0)
    ours = np.ones(3, np.float32)
    with pytest.raises(RuntimeError, match="torch differs from ours by"):
        check_same(case, "torch", ours, ours * 1.1, 1e-2)
    check_same(case, "torch", ours, ours * 1.1, 0.2)
    in_turns(case, peers, 0.0)
    assert case.compared["torch"] == pytest.approx(0.1, rel=1e-5)
    assert set(case.best) == {"ours", "torch"}


def test_without_a_peer_the_table_of_targets_says_why_it_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _show(
        {
            "cases": [],
            "targets": [t._asdict() | {"met": t.met} for t in targets([])],
            "machine": "m",
        }
    )
    assert "no target was judged: they compare with torch" in capsys.readouterr().out


def measured(isa: str, us: float, **other: str) -> dict:
    result = {"processor": "A", "isa": isa, "commit": "abc1234", "date": "2026-11-26", **other}
    return result | {"cases": [measurement("adamw", "AdamW", "19M", ours=us, torch=1.0).as_dict()]}


def test_a_set_that_is_not_measured_keeps_its_column(tmp_path: Path) -> None:
    file = tmp_path / "sets.json"
    for isa, us, commit in (
        ("avx512", 2.0, "old0000"),
        ("scalar", 9.0, "abc1234"),
        ("scalar", 8.0, "new0000"),
    ):
        file.write_text(json.dumps(sets.keep(file, measured(isa, us, commit=commit))))
    kept = json.loads(file.read_text())
    assert sets.table(kept) == (
        ["best us", "scalar (new0000, 2026-11-26) ", "avx512 (old0000, 2026-11-26) "],
        [["AdamW 19M, 1 threads", "8", "2"]],
    )
    assert sets.never(kept) == "never run on A: avx2, amx, neon"
    result = {"machine": "m", "targets": [], "cases": [], "sets": kept}
    assert "avx512 (old0000, 2026-11-26)" in page(result)


def test_two_kinds_of_processors_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sets.json"
    file.write_text(json.dumps(sets.keep(file, measured("avx2", 1.0))))
    with pytest.raises(BadInputError, match=r"its times are of A, this is B: numbers of two kinds"):
        sets.keep(file, measured("avx2", 1.0, processor="B"))
    assert (
        main(["--quick", "--only", "adamw", "--sets", str(file)]) == 3
    )  # before anything is measured
    assert "its times are of A, this is" in capsys.readouterr().err
    for content in ("[]", "{", '{"processor": "A", "sets": {"avx2": {}}}'):
        file.write_text(content)
        with pytest.raises(BadInputError, match="not a file of this option"):
            sets.keep(file, measured("avx2", 1.0))


def test_a_set_that_the_processor_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = next(isa for isa in reversed(native.ISAS) if isa not in native.isas())
    assert main(["--isa", lacking]) == 3
    assert f"this processor has no {lacking}" in capsys.readouterr().err

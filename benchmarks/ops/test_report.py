"""Targets of the operator benchmark from measurements worked out by hand."""

import numpy as np
import pytest

from benchmarks.ops.__main__ import _show
from benchmarks.ops.report import page, targets
from benchmarks.ops.timing import Measurement, check_same, in_turns


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

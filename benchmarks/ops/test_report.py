"""Targets of the operator benchmark from measurements worked out by hand."""

from benchmarks.ops.report import page, targets
from benchmarks.ops.timing import Measurement


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

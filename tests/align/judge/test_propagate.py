"""Roundings carried along the data flow, against the same run in double precision."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import planted
import tiny_moe
from recorded import rank_dump

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.capture.torch_functions import capture
from telechat_moe.tools.align.dump.records import Call, Phase, TensorRecord
from telechat_moe.tools.align.judge.propagate import Propagation

pytestmark = pytest.mark.torch


def wide(x):
    """Return weights as they are, in double precision."""
    if isinstance(x, dict):
        return {name: wide(value) for name, value in x.items()}
    if isinstance(x, list):
        return [wide(value) for value in x]
    return x.detach().double().requires_grad_()


def errors(dtype, seed):
    """Return for each tensor of a run the root of its mean square error over the derived deviation, and the phase."""
    low = planted.run(dtype=dtype, seed=seed).ranks[0, 0]
    with capture() as calls:
        tiny_moe.model(
            wide(tiny_moe.weights(dtype=dtype, seed=seed)), *tiny_moe.batch(seed)
        ).backward()
    high = rank_dump(calls)
    followed = Propagation([low])
    found, unknown = [], 0
    for key, call in low.calls.items():
        true = dict(high.calls[key].tensors()) if key in high.calls else {}
        for place, record in call.made():
            if not is_float(record.dtype) or not record.load().size:
                continue
            if (0, (key, place)) not in followed.made:
                unknown += 1
            elif place in true and true[place].shape == record.shape:
                error = np.sqrt(
                    np.mean((record.load().astype(np.float64) - true[place].load()) ** 2)
                )
                size = np.sqrt(np.mean(followed.made[0, (key, place)].sigma ** 2))
                found.append((error / size if size else np.inf if error else 0.0, call.phase.value))
    return found, unknown


@pytest.mark.parametrize("seed", [0, 1])
def test_errors_of_a_run_are_about_as_large_as_derived(seed, record_property):
    """Forward and backward, two layers with experts: none is beyond it, half of them are within a factor of 5."""
    found, unknown = errors(torch.float32, seed)
    ratios = [ratio for ratio, _ in found]
    record_property("largest", float(max(ratios)))
    record_property("median", float(np.median(ratios)))
    assert len(ratios) > 500
    assert not unknown
    assert {phase for _, phase in found} == {"forward", "backward"}
    assert max(ratios) < 1.5
    assert np.median(ratios) > 0.2


def test_in_a_narrow_type_too():
    found, unknown = errors(torch.bfloat16, 0)
    assert len(found) > 300
    assert unknown < len(found)  # sums that autograd adds up between calls are not always found
    assert max(ratio for ratio, _ in found) < 1.5


def tensor(name, values):
    return TensorRecord("float32", values.shape, path=Path(name), read=lambda: values)


def called(operator, number, terms, made):
    key = f"Primitive.{operator}.{number}.forward"
    return Call(key, "api", f"Primitive.{operator}", number, Phase.FORWARD, terms, {}, [made])


def added(number, terms, made):
    return called("Add", number, terms, made)


def test_equal_tensors_are_told_apart_by_their_files():
    """Two calls make the same in a dump, but not where the program is followed; a third takes the first one's."""
    one, two, equal = (np.arange(8, dtype=np.float32) * n for n in (1, 2, 7))
    outputs = [tensor(name, equal) for name in ("a.npy", "b.npy", "c.npy")]
    calls = [
        added(0, [tensor("x.npy", one), tensor("x.npy", one)], outputs[0]),
        added(1, [tensor("y.npy", two), tensor("y.npy", two)], outputs[1]),
        added(2, [outputs[0], tensor("x.npy", one)], outputs[2]),
    ]
    followed = Propagation([rank_dump({call.key: call for call in calls})])
    np.testing.assert_array_equal(followed.made[0, (calls[2].key, "output.0")].value, 3 * one)


def test_what_send_returns_is_not_taken_for_others():
    """What Send returns means nothing; it may be a zero, as an argument of another call is."""
    x, zero = np.arange(8, dtype=np.float32), np.zeros(1, np.float32)
    outputs = [
        tensor(name, values) for name, values in (("u.npy", zero), ("a.npy", x), ("b.npy", x))
    ]
    calls = [
        called("Send", 0, [tensor("x.npy", x)], outputs[0]),
        added(0, [tensor("x.npy", x), tensor("zero.npy", zero)], outputs[1]),
        added(1, [tensor("x.npy", x), outputs[0]], outputs[2]),
    ]
    made = Propagation([rank_dump({call.key: call for call in calls})]).made
    np.testing.assert_array_equal(made[0, (calls[1].key, "output.0")].value, x)
    assert (0, (calls[2].key, "output.0")) not in made


def test_a_zero_that_cannot_be_recomputed_is_not_taken_for_a_constant():
    """A gradient may be all zeros where another choice of experts makes it something else."""
    x, zeros = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    records = [TensorRecord("float32", (8,), read=lambda v=v: v) for v in (x, zeros, x)]
    calls = [called("Mystery", 0, records[:1], records[1]), added(0, records[:2], records[2])]
    made = Propagation([rank_dump({call.key: call for call in calls})]).made
    assert (0, (calls[1].key, "output.0")) not in made

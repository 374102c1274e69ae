"""Views, slices, rotations and roundings that no dump records are recognised by what they consist of; others are not."""

from pathlib import Path

import numpy as np
import pytest

from telechat_moe.numerics import round_to
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.data_flow import DataFlow
from telechat_moe.tools.align.judge.selections import common_selection

PLACE = "Torch.matmul.0.forward", "input.0"


def flow(output, view, seed, narrow=None):
    """Return a run in which one call makes a tensor and the next takes a view of it."""
    values = output(np.random.default_rng(seed))
    argument = view(values if narrow is None else round_to(values, narrow))

    def record(x, dtype):
        return TensorRecord(dtype, x.shape, read=lambda: x)

    kind = "float32" if values.dtype.kind == "f" else values.dtype.name
    first = Call("Torch.mul.0.forward", "api", "Torch.mul", 0, Phase.FORWARD, [], {}, [record(values, kind)])  # fmt: skip
    last = Call(PLACE[0], "api", "Torch.matmul", 0, Phase.FORWARD, [record(argument, narrow or kind)], {}, [])  # fmt: skip
    calls = {first.key: first, last.key: last}
    return DataFlow(RankDump(0, 0, "pytorch", "tensor", "L1", calls, Path()))


def heads(rng):
    return rng.standard_normal((2, 6, 4, 16)).astype(np.float32)


def hot(rng):
    return np.eye(4, dtype=np.int64)[rng.integers(0, 4, (24, 2))]


def turned(x):
    return np.concatenate([-x[..., 8:], x[..., :8]], -1).transpose(0, 2, 1, 3)


VIEWS = {
    "heads first": (heads, lambda x: x.transpose(0, 2, 1, 3)),
    "keys transposed": (heads, lambda x: x.transpose(0, 2, 3, 1)),
    "heads repeated": (heads, lambda x: np.repeat(x.transpose(0, 2, 1, 3), 2, 1)),
    "heads joined": (heads, lambda x: x.reshape(2, 6, 64)),
    "one head": (heads, lambda x: x[:, :, 1]),
    "rotated": (heads, turned),
    "masks of experts": (hot, lambda x: x.transpose(2, 1, 0)),
}


@pytest.mark.parametrize("narrow", [None, "bfloat16"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_recognised_and_another_order_is_not(name, narrow):
    output, view = VIEWS[name]
    narrow = narrow if output is heads else None
    reference, target = flow(output, view, 1), flow(output, view, 2, narrow)
    assert common_selection(PLACE, reference, target, False) is not None
    moved = flow(output, lambda x: np.roll(view(x), 1, 1), 2, narrow)
    assert common_selection(PLACE, reference, moved, False) is None
    other = flow(output, lambda x: view(output(np.random.default_rng(9))), 2, narrow)
    assert common_selection(PLACE, reference, other, True) is None


def test_tokens_of_an_expert_may_be_others_after_other_choices():
    rows = [lambda x: x.reshape(48, 16)[3:15], lambda x: x.reshape(48, 16)[4:17]]
    reference, target = (flow(heads, view, 1) for view in rows)
    assert common_selection(PLACE, reference, target, False) is None
    assert common_selection(PLACE, reference, target, True) is not None


def test_complex_numbers_are_not_told_by_their_real_parts():
    def rotations(rng):
        return np.exp(1j * heads(rng)).astype(np.complex64)

    reference = flow(rotations, lambda x: x.transpose(0, 2, 1, 3), 1)
    target = flow(rotations, lambda x: x.conj().transpose(0, 2, 1, 3), 1)
    assert common_selection(PLACE, reference, target, False) is None

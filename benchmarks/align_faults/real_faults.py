"""Define the faults of the real MindSpore step: one operator gives a wrong result, or the step gets wrong inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.align_faults.real import Array, Lie, Value

DENSE, MOE = "Primitive.*.layers.0.", "Primitive.*.layers.1."


def _off(row: int, column: int, by: float, right: float) -> Callable[[Value], Value]:
    """Multiply one element by a number, and all others by another."""

    def edit(x: Value) -> Value:
        factor = np.full(x.shape, right, np.float32)
        factor[row, column] = by
        return x * factor

    return edit


def _without(rows: list[int]) -> Callable[[Value], Value]:
    def edit(x: Value) -> Value:
        keep = np.ones((x.shape[0], *[1] * (len(x.shape) - 1)), np.float32)
        keep[rows] = 0
        return x * keep

    return edit


def _again(x: Value) -> Value:
    """Overwrite row 0 with row 1."""
    return x.taken([1, *range(1, x.shape[0])])


LIES = (
    Lie("doubled", "scale", DENSE + "ffn.down.*TelechatMatmul", 0, edit=lambda y: y * 2),
    Lie("sign", "sign", DENSE + "ffn.act.*TelechatDvm", 0, edit=lambda y: y * -1),
    Lie("offset", "offset", DENSE + "Add", 0, edit=lambda y: y + 0.25),
    Lie("rows rolled", "permutation", DENSE + "attention.q_up.*TelechatMatmul", 0, edit=Value.rolled),
    Lie("columns rolled", "permutation", MOE + "moe.router.MatMul", 0, edit=lambda y: y.rolled(1)),
    Lie("tokens lost", "dropped", MOE + "moe.dispatch.*Unpermute", 0, edit=_without([3, 9])),
    Lie("a token twice", "duplicated", MOE + "moe.dispatch.*TelechatPermute", 0, edit=_again),
    Lie("a bit of an exponent", "single element", MOE + "input_norm.*TelechatDvm", 0, edit=_off(5, 7, 4.0, 1.0)),
    Lie("not a number", "not finite", DENSE + "attention.out.*TelechatMatmul", 0, edit=_off(5, 7, np.nan, 1.0)),
    Lie("rounded to float16", "wrong dtype", "Primitive.*.head.*TelechatMatmul", 0, edit=Value.narrowed),
    Lie("experts exchanged", "expert swap", MOE + "moe.experts.*TelechatGroupedMatmul", argument=1, edit=Value.rolled),
    Lie("a weight read in the other order", "transpose", DENSE + "attention.q_up.*TelechatMatmul", argument=1, edit=Value.misread),
    Lie("gate and up exchanged", "wrong argument order", DENSE + "ffn.act.*TelechatDvm", exchanged=(0, 1)),
    Lie("sine and cosine exchanged", "wrong argument order", DENSE + "attention.assemble.*", exchanged=(3, 4)),
    Lie("scale of attention", "wrong setting", DENSE + "attention.core.*TelechatFlashAttention", settings={"scale": 0.0625}),
    Lie("scale of routing", "wrong setting | scale", MOE + "moe.router.*TelechatRouting", settings={"scale": 1.0}),
    Lie("weights of experts not normalised", "wrong setting", MOE + "moe.router.*TelechatRouting", settings={"normalize": False}),
    Lie("positions shifted", "permutation | wrong index", "Primitive.*.rope.Gather", argument=1, edit=lambda x: x.rolled(1)),
    Lie("gradient of a weight doubled", "scale", MOE + "moe.shared.down.*TelechatMatmulGrad", 1, edit=lambda y: y * 2),
    Lie("gradient of an expert lost", "dropped | part", MOE + "moe.experts.*TelechatGroupedMatmulGrad", 1, edit=_without([2])),
    Lie("gradient's sign", "sign", DENSE + "attention.core.*TelechatFlashAttentionGrad", 2, edit=lambda y: y * -1),
    Lie("backward with permuted experts", "expert swap | permutation", MOE + "moe.experts.*TelechatGroupedMatmulGrad", argument=1, edit=Value.rolled),
    Lie("loss doubled", "scale", "Primitive.*.loss.*TelechatCrossEntropy", 0, edit=lambda y: y * 2),
    Lie("moments decay faster", "wrong setting | scale", "Primitive.TelechatAdamW", settings={"beta1": 0.5, "new1": 0.5}, key="Optimizer.*"),
)  # fmt: skip
"""Faults between an operator and its taps."""


@dataclass(frozen=True)
class Given:
    """A fault in the step's inputs or weights.

    Attributes:
        families: What it may rightly be called.
        operator: Pattern of the key of the first call that takes it.
        weight: Which weight or moment is wrong before that step; empty: none.
        value: Function of the weight's first and present value that returns the wrong one.
        place: Number of the step's wrong input; negative: none.
        data: Function of the right input that returns the wrong one.
    """

    name: str
    families: str
    operator: str
    step: int = 0
    weight: str = ""
    value: Callable[[Array, Array], Array] = lambda first, now: now
    place: int = -1
    data: Callable[[Array], Array] = lambda x: x

    def between(self, first: Mapping[str, Array]) -> Callable[[int, dict[str, Any]], None]:
        """Return what changes the weight, for :meth:`RealStep.run`."""

        def change(step: int, weights: dict[str, Any]) -> None:
            from mindspore import Tensor, ops

            if step == self.step and self.weight:
                now = weights[self.weight].asnumpy().copy()
                new = Tensor(self.value(first[self.weight], now))
                # After the first run a graph's branches hold on to a parameter's memory.
                if step:
                    ops.assign(weights[self.weight], new)
                else:
                    weights[self.weight].set_data(new)

        return change

    def inputs(self, step: int, given: list[Any]) -> list[Any]:
        """Return the inputs of a step, for :meth:`RealStep.run`."""
        from mindspore import Tensor

        if step == self.step and self.place >= 0:
            given[self.place] = Tensor(self.data(given[self.place].asnumpy().copy()))
        return given


def _flipped(first: Array, now: Array) -> Array:
    """Flip one bit of one element's exponent."""
    bits = now.reshape(-1).view(np.uint32)
    bits[7] ^= np.uint32(1 << 25)
    return now


def _swapped(first: Array, now: Array) -> Array:
    return now[[1, 0, *range(2, len(now))]].copy()


GIVEN = (
    Given("tokens shifted by one", "permutation | wrong index", "*.embedding.*", place=3, data=lambda x: np.roll(x, 1, 1)),
    Given("labels shifted by one", "permutation | wrong index", "*.model.Reshape.*", place=4, data=lambda x: np.roll(x, 1, 1)),
    Given("stale weight", "stale weight", "*.layers.0.attention.out.matmul.TelechatMatmul.*", 2, "layers.0.attention.out.weight", lambda first, now: first),
    Given("a bit of a weight", "single element", "*.layers.0.ffn.up.matmul.TelechatMatmul.*", 1, "layers.0.ffn.up.weight", _flipped),
    Given("experts of another order", "permutation | expert swap", "*.experts.down_matmul.TelechatGroupedMatmul.*", 1, "layers.1.moe.experts.down", _swapped),
    Given("weights of another seed", "other input", "*.head.matmul.TelechatMatmul.*", 0, "head.weight", lambda first, now: np.roll(now, 1, 0)[::-1].copy() * np.float32(0.5)),
)  # fmt: skip
"""Faults of weights and data."""

"""Reproduce real silent bugs from the named issues and pull requests."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.align_faults.classes.distributed import all_kept, other_group, times
from benchmarks.align_faults.engine import Site
from benchmarks.align_faults.faults import (
    SUMS,
    Draw,
    Fault,
    always,
    collective,
    exchange,
    forward,
    given,
    result,
    setting,
)
from benchmarks.align_faults.kernels import Array, rounded


@dataclass(frozen=True)
class Bug:
    """A real bug from the past.

    Attributes:
        source: Where it was reported.
        quiet: The loss of the step does not change.
    """

    source: str
    said: str
    fault: Fault
    layout: str
    dtype: str = "bfloat16"
    quiet: bool = True


def _experts(site: Site) -> bool:
    return collective(SUMS, ("reduction",))(site) and len(site.shape) == 3


def _norms(site: Site) -> bool:
    return site.op == "square" and site.phase == "optimizer"


def _no_experts(x: Array, rng: np.random.Generator, engine: Any, rank: int) -> Array:
    """Leave the gradients of the experts' weights, w1 and w2, out of the norms."""
    names = [n for n, w in engine.weights.items() if rank in w.values]
    return np.where([n.endswith(("w1", "w2")) for n in names], 0, x).astype(x.dtype)


def _mixed_tokens(got: list[Array], parts: list[Array], rng: Any, info: Any) -> list[Array]:
    return [rounded(g + np.float32(0.05) * np.roll(g, 1, 0), info["x"].dtype) for g in got]


def _twice(parts: list[Array], engine: Any, group: list[int]) -> list[Array]:
    """Replace every second row that a rank sends by the row before it."""
    sent = parts[0].copy()
    sent[1::2] = sent[: 2 * (len(sent) // 2) : 2]
    return [sent, *parts[1:]]


def _off_by_one(y: Array, rng: Any) -> Array:
    """Change the last rows by one unit in the last place of bfloat16."""
    z = y.copy()
    bits = z[-1:].view(np.uint32)
    bits += np.uint32(1 << 16)
    return z


def _bug(
    source: str,
    said: str,
    layout: str,
    fault: tuple[str, Any, Draw],
    dtype: str = "bfloat16",
    quiet: bool = True,
) -> Bug:
    families, pick, draw = fault
    names = frozenset(families.split(" | "))
    kind = Fault(source, "history", names, draw.stage, pick, draw.change, (dtype,))
    return Bug(source, said, kind, layout, dtype, quiet)


BUGS = (
    _bug(
        "pytorch 160285",
        "with EP = 2 gradients of experts are exactly doubled, the loss curve unchanged",
        "ep2 dp2",
        ("doubled reduction | scale", _experts, exchange(times(lambda n: 2))),
    ),
    _bug(
        "Megatron-LM PR 5916, norm",
        "with EP and TP the norm of gradients leaves out the experts",
        "ep2 tp2",
        ("dropped | zero | part | wrong tensor", _norms, given(0, _no_experts)),
    ),
    _bug(
        "Megatron-LM PR 5916, groups",
        "gradients of experts are reduced over the group of dense weights",
        "dp4 tp2 ep2",
        ("wrong group | missing reduction", _experts, exchange(other_group)),
    ),
    _bug(
        "Megatron-LM issue 1628",
        "with expert TP and EP = 1 gradients are not synchronised",
        "zero dp2 tp2",
        ("missing reduction", _experts, exchange(all_kept)),
    ),
    _bug(
        "tpu-inference PR 2248",
        "the sum over EP mixes tokens: about 1.05 times as much each layer",
        "tp2",
        (
            "unknown | wrong exchange | accumulator",
            collective({"all_reduce"}, ("forward",)),
            exchange(_mixed_tokens),
        ),
        quiet=False,
    ),
    _bug(
        "Megatron-DeepSpeed PR 63",
        "ranks of TP send tokens twice to experts",
        "tp2 extends ep2",
        (
            "duplicated",
            lambda s: collective({"all_to_all_single"}, ("forward",), 32)(s) and s.shapes[0][0] > 1,
            always("send", _twice),
        ),
        quiet=False,
    ),
    _bug(
        "torchtitan 1750",
        "the loss depends on TP: one rank takes the mean over its own tokens",
        "tp2 sp",
        (
            "scale | wrong setting",
            lambda s: s.op == "mul" and s.tag == "head" and not s.is_backward,
            setting(other=lambda v: 2 * v),
        ),
        quiet=False,
    ),
    _bug(
        "torchtitan 3172",
        "experts do not reach parity: their outputs are added up in bfloat16",
        "ep2",
        (
            "wrong dtype | accumulator",
            forward({"npu_moe_token_unpermute"}),
            result(lambda y, r: rounded(y, "bfloat16")),
        ),
        "float32",
        False,
    ),
    _bug(
        "hyper-parallel issue 267",
        "with PP and sharded weights the loss is too low: divided once too often",
        "pp2 dp2 ep2",
        (
            "scale | wrong setting",
            lambda s: s.op == "mul" and s.tag == "head" and not s.is_backward,
            setting(other=lambda v: v / 2),
        ),
        quiet=False,
    ),
    _bug(
        "hyper-parallel, uneven shards",
        "copying back a cut weight costs one unit in the last place of bfloat16 each step",
        "zero dp2",
        (
            "part | accumulator | unknown | wrong dtype | single element | scale",
            lambda s: s.op == "to" and s.tag == "update" and len(s.shape) == 2,
            result(_off_by_one),
        ),
    ),
)

"""Faults of precision."""

from benchmarks.align_faults.classes.common import (
    BACK,
    F32,
    GEMM,
    PLAIN,
    add,
)
from benchmarks.align_faults.faults import (
    SUMS,
    argument,
    backward,
    collective,
    exchange,
    forward,
    narrowed,
    optimizer,
    result,
)
from benchmarks.align_faults.kernels import (
    rounded,
)

add(
    "rounded to bfloat16",
    "precision",
    "wrong dtype",
    "result",
    PLAIN,
    result(lambda y, r: rounded(y, "bfloat16")),
    **F32,
)
add(
    "rounded to float16",
    "precision",
    "wrong dtype",
    "result",
    PLAIN,
    result(lambda y, r: rounded(y, "float16")),
    **F32,
)
add(
    "gradient rounded to bfloat16",
    "precision",
    "wrong dtype",
    "result",
    BACK,
    result(lambda y, r: rounded(y, "bfloat16")),
    **F32,
)
add(
    "added up in bfloat16",
    "precision",
    "accumulator",
    "numerics",
    forward(GEMM),
    lambda r: lambda n: narrowed(n, "bfloat16"),
    **F32,
)
add(
    "added up in float16",
    "precision",
    "accumulator",
    "numerics",
    forward(GEMM),
    lambda r: lambda n: narrowed(n, "float16"),
    **F32,
)
add(
    "gradient added up in bfloat16",
    "precision",
    "accumulator",
    "numerics",
    backward(GEMM),
    lambda r: lambda n: narrowed(n, "bfloat16"),
    **F32,
)
add(
    "reduced in bfloat16",
    "precision",
    "wrong dtype | accumulator",
    "exchange",
    collective(SUMS),
    exchange(lambda got, p, r, i: [rounded(g, "bfloat16") for g in got]),
    whole=True,
    **F32,
)
add(
    "loss in bfloat16",
    "precision",
    "wrong dtype",
    "result",
    lambda s: s.op == "cross_entropy" and not s.is_backward,
    result(lambda y, r: rounded(y, "bfloat16")),
    **F32,
)
add(
    "update in bfloat16",
    "precision",
    "wrong dtype",
    "result",
    optimizer(),
    result(lambda y, r: rounded(y, "bfloat16")),
)
add(
    "cast in passing",
    "precision",
    "wrong dtype",
    "given",
    forward({"linear", "rms_norm"}),
    argument(0, lambda x, ins, e, k, r: rounded(x, "bfloat16")),
    **F32,
)

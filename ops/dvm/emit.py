"""Write a program as source for the upstream DVM's Python API on Ascend.

The source was never run on an NPU. The names are those of its published tests and documentation
(``k.load``, ``k.sum``, ``k.select``, ...); operations that this API lacks are composed of others.
"""

from __future__ import annotations

import math

from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.ir import Program, ProgramError, ProgramNode

DIRECT = {
    *("sqrt", "abs", "exp", "log", "reciprocal", "floor", "ceil", "round", "trunc"),
    *("isfinite", "logical_not", *ir.BINARY),
}
# DVM has no instructions of the exponential family but exp.
WRITTEN_OUT = {
    "neg": "k.mul({x}, -1.0)",
    "rsqrt": "k.reciprocal(k.sqrt({x}))",
    "sigmoid": "k.reciprocal(k.add(k.exp(k.mul({x}, -1.0)), 1.0))",
    "tanh": "k.sub(1.0, k.div(2.0, k.add(k.exp(k.mul({x}, 2.0)), 1.0)))",
}


def emit_dvm_source(program: Program, name: str = "kernel") -> str:
    """Return Python source that builds the program with the upstream DVM; not run on an NPU.

    Raises:
        ProgramError: An operation has no counterpart there (erf, sin, cos, reduction over min).
    """
    inputs = [f"x{i}" for i in range(program.inputs)]
    lines = [
        "# Generated; not run on an NPU.",
        "import dvm",
        "",
        "",
        '@dvm.kernel(ktype="split", dyn_shape=True)',
        f"def {name}(k, {', '.join(inputs)}):",
    ]
    lines += [f"    {_line(program, i, node)}" for i, node in enumerate(program.nodes)]
    return "\n".join(lines) + "\n"


def _line(program: Program, i: int, node: ProgramNode) -> str:
    name = ir.NAMES[node.op]
    args = [f"v{a}" for a in node.args]
    dims = [d if d >= 0 else f"'{program.symbols[-1 - d]}'" for d in node.dims]
    shape = f"[{', '.join(str(d) for d in dims)}]"
    if node.op == ir.LOAD:
        return f"v{i} = k.load(x{node.attrs[0]}, dvm.{node.dtype})  # {shape}"
    if node.op == ir.STORE:
        return f"k.store({args[0]}, dvm.{node.dtype})  # output {node.attrs[0]}"
    if node.op == ir.SCALAR:
        value = ir.bits_float(node.attrs[0])
        text = repr(value) if math.isfinite(value) else f"float('{value}')"
        return f"v{i} = {text}"
    if node.op in (ir.BROADCAST, ir.RESHAPE):
        if node.op == ir.BROADCAST and program.nodes[node.args[0]].op == ir.SCALAR:
            return f"v{i} = {args[0]}"
        return f"v{i} = k.{name}({args[0]}, {shape})"
    if node.op == ir.CAST:
        return f"v{i} = k.cast({args[0]}, dvm.{node.dtype})"
    if node.op == ir.GATHER_LOAD:
        return f"v{i} = k.gather_load(x{node.attrs[0]}, {args[0]})"
    if node.op == ir.SELECT:
        return f"v{i} = k.select({', '.join(args)})"
    if name in ("sum", "max"):
        return f"v{i} = k.{name}({args[0]}, {list(node.attrs[1:])}, True)"
    if name in DIRECT:
        return f"v{i} = k.{name}({', '.join(args)})"
    if name in WRITTEN_OUT:
        return f"v{i} = {WRITTEN_OUT[name].format(x=args[0])}"
    raise ProgramError(
        f"{program.file}:{node.line}: {name}: the upstream DVM has no counterpart, expected one of "
        f"{', '.join(sorted({*DIRECT, *WRITTEN_OUT}))}"
    )

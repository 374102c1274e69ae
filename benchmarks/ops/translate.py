"""The same program as source for torch and for MindSpore's elementary primitives: the peers of the vector set."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.ir import DvmProgram

TORCH = {"maximum": "maximum", "minimum": "minimum", "neg": "neg", "sigmoid": "sigmoid"}
MINDSPORE = {
    "add": "ops.add",
    "sub": "ops.sub",
    "mul": "ops.mul",
    "div": "ops.div",
    "less": "ops.less",
    "greater": "ops.gt",
}


def torch_function(program: DvmProgram) -> Any:
    """Return ``f(*tensors) -> tuple`` in torch."""
    body = _body(program, _torch_line)
    text = f"import torch\n\n\ndef run({_arguments(program)}):\n{body}"
    return _module(text).run


def mindspore_cell(program: DvmProgram) -> Any:
    """Return a cell of MindSpore's own primitives, at O0."""
    body = (
        _body(program, _mindspore_line)
        .replace("\n    ", "\n        ")
        .replace("    v", "        v", 1)
    )
    text = (
        "from mindspore import nn, ops\n\n\nclass Net(nn.Cell):\n"
        f"    def construct(self, {_arguments(program)}):\n{body}"
    )
    return _module(text).Net()


def _arguments(program: DvmProgram) -> str:
    return ", ".join(f"x{i}" for i in range(program.inputs))


def _body(program: DvmProgram, line: Any) -> str:
    lines, outputs = [], {}
    for i, node in enumerate(program.nodes):
        if node.op == ir.STORE:
            outputs[node.attrs[0]] = f"v{node.args[0]}"
        elif node.op == ir.LOAD:
            lines.append(f"v{i} = x{node.attrs[0]}")
        elif node.op == ir.SCALAR:
            lines.append(f"v{i} = {ir.bits_float(node.attrs[0])!r}")
        elif node.op == ir.BROADCAST:
            lines.append(f"v{i} = v{node.args[0]}")  # both broadcast by themselves
        else:
            lines.append(f"v{i} = {line(node, [f'v{a}' for a in node.args])}")
    results = ", ".join(outputs[k] for k in sorted(outputs))
    return "\n".join(f"    {text}" for text in [*lines, f"return ({results},)"]) + "\n"


def _torch_line(node: ir.ProgramNode, args: list[str]) -> str:
    name = ir.NAMES[node.op]
    symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/", "less": "<", "greater": ">"}.get(name)
    if symbol:
        return f"{args[0]} {symbol} {args[1]}"
    if name in ir.REDUCE:
        function = {"sum": "sum", "max": "amax", "min": "amin"}[name]
        return f"torch.{function}({args[0]}, {list(node.attrs[1:])}, keepdim=True)"
    if name == "select":
        return f"torch.where({', '.join(args)})"
    if name in ("maximum", "minimum"):  # with a number on one side
        return f"torch.clamp({args[0]}, {'min' if name == 'maximum' else 'max'}={args[1]})"
    return f"torch.{TORCH.get(name, name)}({', '.join(args)})"


def _mindspore_line(node: ir.ProgramNode, args: list[str]) -> str:
    name = ir.NAMES[node.op]
    if name == "sum":
        return f"ops.ReduceSum(keep_dims=True)({args[0]}, {tuple(node.attrs[1:])})"
    if name in ("max", "min"):
        return f"ops.Reduce{name.title()}(keep_dims=True)({args[0]}, {tuple(node.attrs[1:])})"
    if name == "select":
        return f"ops.where({', '.join(args)})"
    return f"{MINDSPORE.get(name, 'ops.' + name)}({', '.join(args)})"


def _module(text: str) -> Any:
    """Return the module of a source text; MindSpore and Inductor read the file."""
    folder = tempfile.mkdtemp(prefix="telechat-bench-")
    path = Path(folder) / f"peer_{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # MindSpore imports it by name
    spec.loader.exec_module(module)
    return module

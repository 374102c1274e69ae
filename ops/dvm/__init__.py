"""A bytecode virtual machine for fused operators, after DVM (arXiv 2603.24239); design and code are our own.

A Python function is traced once into a small graph with symbolic extents; the native library fuses it, encodes
bytecode for each distinct shape in about a microsecond and interprets it tile by tile. Nothing here needs mindspore,
except :func:`custom_op`. May import errors, ``ops.native`` and ``ops.custom``. Begin with
:mod:`telechat_moe.ops.dvm.builder`, which has an example.
"""

from telechat_moe.ops.dvm.builder import Builder, ProgramValue, build
from telechat_moe.ops.dvm.grad import grad
from telechat_moe.ops.dvm.ir import DvmProgram, ProgramError
from telechat_moe.ops.dvm.runtime import Compiled, custom_op, disassemble, explain

__all__ = [
    "Builder",
    "Compiled",
    "DvmProgram",
    "ProgramError",
    "ProgramValue",
    "build",
    "custom_op",
    "disassemble",
    "explain",
    "grad",
]

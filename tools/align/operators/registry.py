"""Names and signatures of operators, in PyTorch's and MindSpore's spellings.

A formula takes :class:`Arguments` and returns its outputs: :class:`Approx` for floating-point results, exact plain arrays for others.
"""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from telechat_moe.narrowing import is_list, is_sequence
from telechat_moe.numerics import Array
from telechat_moe.tools.align.operators.approx import Approx

FormulaOutput = Approx | Array

SAME_NAME = {
    other: name
    for name, others in {
        "input": "x self input_x logits tensors",
        "dim": "axis axes",
        "keepdim": "keep_dims keepdims",
        "other": "y mat2 exponent",
        "eps": "epsilon",
        "index": "indices",
        "cos": "r1",
        "sin": "r2",
        "pre_tokens": "pre_tockens",
        "next_tokens": "next_tockens",
        "pse": "real_shift",
        "atten_mask": "attn_mask",
        "scale": "scalar_value scale_value",
        "skip1": "x1",
        "skip2": "x2",
        "rows": "expanded_x expanded_permuted_rows",
        "row": "expanded_row_idx expanded_src_to_dst_row",
        "expert": "expanded_expert_idx expert_for_source_row export_for_source_row",
    }.items()
    for other in others.split()
}
"""Alternative names of arguments."""


class NotJudgedError(Exception):
    """A call cannot be recomputed; the message says why."""


UNFIT = (NotJudgedError, LookupError, ValueError, TypeError, AttributeError)
"""The exceptions that formulas raise for unsuitable arguments."""


@dataclass(frozen=True)
class Formula:
    """The formula of an operator."""

    name: str  # canonical name
    signature: tuple[str, ...]  # arguments in order; `*name` takes all that remain
    defaults: dict[str, Any]  # default values by name
    compute: Callable[["Arguments"], Sequence[FormulaOutput]]
    # Whether the result consists of the inputs' values (moves, comparisons) and is only rounded to its type
    exact: bool = False
    # Whether programs compute it in several kernels, which round intermediate results to the tensor's type
    stores: bool = False
    # Usual values of settings that dumps may lack, by name and from the other arguments
    guesses: Mapping[str, "Guess"] = field(default_factory=dict[str, Any])

    @cached_property
    def names(self) -> set[str]:
        """The canonical names of its arguments."""
        return {n.lstrip("*") for n in self.signature} | set(self.defaults) | set(self.guesses)

    def canonical(self, name: str) -> str:
        """Return the canonical name of an argument, of which frameworks have others."""
        return name if name in self.names else SAME_NAME.get(name, name)

    def given(self, positional: int, names: Iterable[str]) -> set[str]:
        """Return the names of arguments, from the number of the positional ones and the names of the others."""
        return {*self.signature[:positional], *map(self.canonical, names)}

    def bind(self, positional: Sequence[Any], named: dict[str, Any]) -> "Arguments":
        """Return the arguments by name.

        Raises:
            NotJudgedError: The arguments do not fit the signature.
        """
        values: dict[str, Any] = {}
        for i, name in enumerate(self.signature):
            if name.startswith("*"):
                values[name[1:]] = list(positional[i:])
                break
            if i < len(positional):
                values[name] = positional[i]
        else:
            if len(positional) > len(self.signature):
                raise NotJudgedError(
                    f"{self.name} takes {len(self.signature)} arguments, the dump has {len(positional)}"
                )
        for name, value in named.items():
            argument = self.canonical(name)
            if argument == "out":  # the result's memory
                continue
            if argument not in self.names and value is not None:
                raise NotJudgedError(f"{self.name}: argument {name!r} is not known")
            values[argument] = value
        values = self.defaults | values
        missing = [name for name in self.signature if name.lstrip("*") not in values]
        if missing:
            raise NotJudgedError(f"{self.name}: argument {missing[0]!r} is not in the dump")
        return Arguments(values)


class Arguments:
    """Arguments of a call by name, as attributes; floating-point tensors are :class:`Approx`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.chosen: Array | None = None  # the program's chosen indices, for the gradient
        self.made: Any = None  # records of the call's outputs, for choices by its own scores
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise NotJudgedError(f"argument {name!r} is not in the dump")

    def dims(self, ndim: int) -> tuple[int, ...]:
        """Return ``dim`` as a tuple of dimensions >= 0; None: all."""
        if self.dim in (None, (), []):
            return tuple(range(ndim))
        places = self.dim if is_sequence(self.dim) else (self.dim,)
        return tuple(int(p) % max(ndim, 1) for p in places)


_FORMULAS: dict[str, Formula] = {}
_PRIMITIVES: dict[str, Formula] = {}
"""Formulas of MindSpore's primitives by exact name, where their arguments differ from functions of that name."""


Computes = Callable[[Arguments], Any]
Guess = Callable[[Arguments], Sequence[Any]]


def op(
    names: str,
    signature: str,
    exact: bool = False,
    stores: bool = False,
    is_primitive: bool = False,
    **guesses: Guess,
) -> Callable[[Computes], Computes]:
    """Register a formula, which returns one output or a list of them.

    Args:
        names: Names of the operator, the canonical one first.
        signature: Positional arguments, ``|``, arguments given only by name; ``name=value`` for a default.
        is_primitive: Whether the names are the exact ones of MindSpore primitives.
    """
    items = [item.partition("=") for item in signature.replace("|", " ").split()]
    defaults = {key: ast.literal_eval(value) for key, equals, value in items if equals}
    order = tuple(item.partition("=")[0] for item in signature.partition("|")[0].split())

    def register(function: Computes) -> Computes:
        def compute(arguments: Arguments) -> Sequence[FormulaOutput]:
            result = function(arguments)
            return result if is_list(result) else [result]

        for name in names.split():
            key, shown = (name, name) if is_primitive else (_plain(name), names.split()[0])
            table = _PRIMITIVES if is_primitive else _FORMULAS
            table[key] = Formula(shown, order, defaults, compute, exact, stores, guesses)
        return function

    return register


primitive = partial(op, is_primitive=True)


def ops(table: Mapping[tuple[str, str], Computes], register: Any = op, **flags: bool) -> None:
    """Register formulas by names and signature, with :func:`op` or :func:`primitive` and their flags."""
    for (names, signature), function in table.items():
        register(names, signature, **flags)(function)


def find(call_name: str) -> Formula | None:
    """Return the formula of a call by its name in a dump, such as ``Torch.matmul`` or ``Primitive.mul.Mul``."""
    parts = call_name.split(".")
    if parts[0] in ("Primitive", "Optimizer") and parts[-1] in _PRIMITIVES:
        return _PRIMITIVES[parts[-1]]
    name = _plain(parts[-1])
    kernels = _OF_FAMILIES.get(parts[0], {})
    if name in kernels:
        kernel, function = _PRIMITIVES[kernels[name]], _FORMULAS[name]
        defaults = {**kernel.defaults, **function.defaults}
        return replace(function, compute=kernel.compute, defaults=defaults, stores=kernel.stores)
    if name.startswith("foreach"):
        return _of_each(_FORMULAS.get(name.removeprefix("foreach")))
    return _FORMULAS.get(name)


_OF_KERNELS = {"exp": "Exp", "sigmoid": "Sigmoid", "silu": "SiLU", "tanh": "Tanh", "log": "Log"}
"""Functions of MindSpore that are one primitive, whose kernel has larger errors than libraries of others."""

_OF_MINDTORCH = {
    **{"softmax": "Softmax", "logsoftmax": "LogSoftmax"},
    **{name: f"mindtorch.{name}" for name in ("gelu", "softplus", "erf", "logsumexp")},
}
_OF_FAMILIES = {
    "Mint": _OF_KERNELS,
    "MintFunctional": _OF_KERNELS,
    "MindTorch": {**_OF_KERNELS, **_OF_MINDTORCH},
}


def call(name: str, *arguments: Any, **named: Any) -> list[Approx]:
    """Return the floating-point results of a registered formula."""
    formula = find(name)
    assert formula is not None
    outputs = formula.compute(formula.bind(list(arguments), named))
    return [o for o in outputs if isinstance(o, Approx)]


def _of_each(formula: Formula | None) -> Formula | None:
    """Return the formula of torch's ``_foreach_*`` variant, which takes lists of tensors one by one."""
    if formula is None:
        return None

    def compute(a: Arguments) -> Sequence[FormulaOutput]:
        count = len(getattr(a, formula.signature[0]))
        lists = [n for n, v in a.__dict__.items() if is_list(v) and len(v) == count]
        outputs: list[FormulaOutput] = []
        for i in range(count):
            element = {n: v[i] if n in lists else v for n, v in a.__dict__.items()}
            outputs += formula.compute(Arguments(element))
        return outputs

    return replace(formula, name=f"foreach {formula.name}", compute=compute)


def _plain(name: str) -> str:
    """Return a name without case, underscores and the affixes of dunder, in-place and Ext variants."""
    name = re.sub(r"^__(i|r)?(\w+?)__$", _dunder, name)
    name = re.sub(r"(?<=[a-z0-9])(Ext|View|_)$", "", name)
    return name.replace("_", "").lower()


def _dunder(match: re.Match[str]) -> str:
    prefix, operator = match[1] or "", match[2]
    full_name = prefix + operator
    if full_name in ("invert", "rsub", "rtruediv", "rpow", "rmatmul", "rdiv"):
        return full_name
    return full_name if prefix and operator not in _OPERATORS else operator


_OPERATORS = {"add", "sub", "mul", "truediv", "div", "pow", "matmul", "and", "or", "xor"}

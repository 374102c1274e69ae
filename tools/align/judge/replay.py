"""Isolated replay: recompute each operator from the inputs that the program itself gave it.

So a verdict does not depend on anything upstream: no error grows along the network, and a token that went to another
expert does not affect later operators. The formula of the definition is computed in float64 (``operators/``), with the
reference's settings if there is a reference run; integers must match exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, Scalar, TensorRecord, Value
from telechat_moe.tools.align.judge.collectives import flat
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged, values_of
from telechat_moe.tools.align.operators import Arguments, Formula, find
from telechat_moe.tools.align.operators.approx import Approx, Array, gradients
from telechat_moe.tools.align.operators.indexing import CHOOSES, same_choice
from telechat_moe.tools.align.operators.registry import UNFIT, NotJudgedError


def replay_call(
    call: Call, forward: Call | None, settings: Call | None = None, turned: bool = False
) -> list[Verdict]:
    """Return the verdicts of one operator, one for each of its outputs.

    Args:
        forward: Its forward call; of a forward call, itself.
        settings: The reference's forward call, whose numbers and flags are used.
        turned: Whether gradients of weights are those of the transposed ones, see :func:`turns_weights`.
    """
    try:
        if forward is None:
            raise NotJudgedError("its forward call is not in the dump")
        formula = find(forward.formula_name)
        if formula is None:
            raise NotJudgedError(f"no formula for {forward.name}")
        complete = settings if settings is not None else forward
        complete = complete if all(t.read for _, t in complete.tensors()) else forward
        inferred = _inferred(complete, formula)
        inferred_scalars = {name: Scalar(type(v).__name__, v) for name, v in inferred.items()}
        trusted_call = believed(call if call.phase is not Phase.BACKWARD else forward, settings)
        trusted_call = replace(trusted_call, kwargs={**trusted_call.kwargs, **inferred_scalars})
        if call.phase is not Phase.BACKWARD:
            verdicts = _defined(_forward(trusted_call, formula), [call])
        else:
            inner: list[Approx] = []
            verdicts = _match(
                call, forward, *_gradients(call, trusted_call, formula, inner), inner, turned
            )
            verdicts = _defined(verdicts, [call, forward])
        if not inferred:
            return verdicts
        text = ", ".join(f"{name} {value}" for name, value in inferred.items())
        return [replace(v, reason=f"{v.reason}; inferred: {text}") for v in verdicts]
    except (NotJudgedError, LookupError) as error:
        return [not_judged(call.key, str(error))]
    except (ValueError, TypeError, AttributeError, FloatingPointError) as error:
        return [not_judged(call.key, f"arguments do not fit {call.name}: {error}")]


def _inferred(call: Call, formula: Formula) -> dict[str, Any]:
    """Return the settings (eps, scale, axis, transposition) that a call's record lacks, as they fit its result best.

    MindSpore's primitives hold them as attributes, and msprobe records arguments only. The reference's call decides
    where there is one, so that a wrong setting of the target is still found.

    Raises:
        NotJudgedError: None of the values that the formula tries gives the result.
    """
    present, outputs = formula.given(len(call.inputs), call.kwargs), list(flat(call.outputs))
    if not formula.guesses.keys() - present:
        return {}
    arguments, _ = arguments_of(call, formula)
    arguments.made = outputs
    tries = {n: values(arguments) for n, values in formula.guesses.items() if n not in present}
    tries = {name: values for name, values in tries.items() if values}
    if not tries or not outputs:
        return {}
    trials: list[tuple[float, dict[str, Any]]] = []
    for values in product(*tries.values()):
        chosen = dict(zip(tries, values, strict=True))
        arguments.__dict__.update(chosen)
        try:
            expected = list(formula.compute(arguments))
            both = zip(outputs, expected, strict=False)
            ratios = [judge("", "", r.load(), e, r.dtype).ratio for r, e in both]
        except UNFIT:
            continue
        trials.append((max(ratios, default=np.inf), chosen))
    ratio, best = min(trials, key=lambda pair: pair[0]) if trials else (np.inf, {})
    if ratio > 1:
        tried = "; ".join(f"{name} {', '.join(map(str, v))}" for name, v in tries.items())
        raise NotJudgedError(f"{formula.name}: not in the dump, and no usual value fits: {tried}")
    return best


def _defined(verdicts: list[Verdict], calls: Sequence[Call]) -> list[Verdict]:
    """Leave out verdicts explained by NaN or infinity in the calls' own tensors: correct kernels differ there.

    Minus infinity fills masks, so it stays judged.
    """
    if not any(v.not_finite for v in verdicts):
        return verdicts
    fed = (r for call in calls for r in flat([*call.inputs, *call.kwargs.values()]))
    inputs = (r.load() for r in fed if is_float(r.dtype))
    if not any(np.any(np.isnan(x) | np.isposinf(x)) for x in inputs):
        return verdicts
    return [
        not_judged(v.key, f"{v.place}: NaN or infinity in the inputs and in the result", v.place)
        if v.status == "diverged" and v.wrong == v.not_finite
        else v
        for v in verdicts
    ]


def believed(call: Call, settings: Call | None) -> Call:
    """Return a forward call with its own tensors and the numbers and flags of the reference's call, if there is one."""
    if settings is None:
        return call

    def mixed(value: Value, other: Value) -> Value:
        if isinstance(value, list):
            if not isinstance(other, list) or len(other) != len(value):
                return value
            return [mixed(a, b) for a, b in zip(value, other, strict=True)]
        if isinstance(value, TensorRecord | Mapping) or (_is_extreme(value) and _is_extreme(other)):
            return value  # -3.4e38 of float32 is -65504 of float16: what masks are filled with
        return other if isinstance(other, Scalar) or other is None else value

    inputs = [*map(mixed, call.inputs, settings.inputs), *call.inputs[len(settings.inputs) :]]
    inputs += [x for x in settings.inputs[len(inputs) :] if isinstance(x, Scalar)]
    omitted = {n: v for n, v in settings.kwargs.items() if isinstance(v, Scalar)}
    kwargs = {n: mixed(v, settings.kwargs.get(n, v)) for n, v in call.kwargs.items()}
    return replace(call, inputs=inputs, kwargs=omitted | kwargs)


def other_settings(call: Call, reference: Call | None) -> str:
    """Return the numbers of a call that people chose and that are not those of the reference's; empty: none.

    A result need not show them: bfloat16 rounds a small weight decay away.
    """
    if (
        reference is None
        or call.name != reference.name
        or call.phase is Phase.BACKWARD
        or _is_off(call)
    ):
        return ""
    golden = dict(reference.leaves())
    texts = [
        f"{argument_name(call, place)} is {value.value}, the reference's {other.value}"
        for place, value in call.leaves()
        if isinstance(value, Scalar)
        and isinstance(other := golden.get(place), Scalar)
        and value.value != other.value
        and float in (type(value.value), type(other.value))
        and _is_chosen(value)
        and _is_chosen(other)
    ]
    return "; ".join(texts)


def argument_name(call: Call, place: str) -> str:
    """Return the name of an argument, by the formula where it is positional."""
    name, formula = place.split(".")[1], find(call.name)
    if formula is not None and name.isdigit() and int(name) < len(formula.signature):
        return formula.signature[int(name)]
    return f"argument {name}" if name.isdigit() else name


def _is_off(call: Call) -> bool:
    """Return whether a call is told not to train, as dropout is in evaluation: its probability has no effect."""
    values: dict[str, object] = {argument_name(call, p): x for p, x in call.leaves()}
    modes = (values.get(name) for name in ("training", "train"))
    return any(isinstance(mode, Scalar) and mode.value is False for mode in modes)


def _is_chosen(value: Scalar) -> bool:
    """Return whether a number has so few decimals, or 1 minus it, as few have that were computed of data in 32 bits."""
    x = value.value
    if type(x) is int and abs(x) < 1 << 53:
        x = float(x)
    if type(x) is not float or not np.isfinite(x) or abs(x) in _LARGEST:
        return False
    return any(np.isclose(v, float(f"{v:.5g}"), rtol=1e-14, atol=0.0) for v in (x, 1 - x))


def arguments_of(
    call: Call,
    formula: Formula,
    stores: bool = False,
    values: Mapping[str, Approx | Array] | None = None,
) -> tuple[Arguments, list[Approx]]:
    """Return a forward call's arguments with tensors loaded, and its floating-point tensors in order.

    If it ``stores``, intermediate results are rounded to the tensors' type, as in backward kernels. Tensors that are
    ``values`` by their places are not those of the dump.
    """
    tensors: list[Approx] = []

    def argument(place: str, value: Value) -> Any:
        if not isinstance(value, TensorRecord):
            return plain(value)
        x = values[place] if values is not None else value.load()
        if is_float(value.dtype) and not isinstance(x, Approx):
            x = exactly(x, value.dtype, stores or formula.stores)
        tensors.extend([x] if isinstance(x, Approx) else [])
        return x

    bound = call.changed(argument)
    arguments = formula.bind(bound.inputs, dict(bound.kwargs))
    dtypes = [t.dtype for _, t in call.given() if is_float(t.dtype) and FLOATS[t.dtype].bits < 32]
    for name in ("other", "alpha") if dtypes and tensors and formula.name in ("add", "sub") else ():
        number = arguments.__dict__.get(name)
        if isinstance(number, float) and round_to(np.asarray(number), dtypes[0]) != number:
            slack = (
                abs(number) * FLOATS[dtypes[0]].unit
            )  # some kernels hold it in the tensor's type
            arguments.__dict__[name] = tensors[0].like(number, slack, slack)
    return arguments, tensors


def _is_extreme(value: Value) -> bool:
    """Return whether a number is the smallest or largest of a floating-point type."""
    number = value.value if isinstance(value, Scalar) else None
    return isinstance(number, float) and abs(number) in _LARGEST


_LARGEST = {kind.largest for kind in FLOATS.values()} | {float("inf")}


def exactly(values: Array, dtype: str, stores: bool) -> Approx:
    """Return a tensor of the dump as exact; results are stored in its type, or in float32 if that is wider."""
    stored = dtype if stores or dtype == "float64" else "float32"
    size = np.abs(np.asarray(values, np.float64))
    flushed = (size > 0) & (size < 2.0 ** FLOATS[dtype].low)
    if dtype == "float16" or not np.any(flushed):
        return Approx(values, stored)
    gone = np.where(flushed, size, 0.0)  # some kernels read subnormal numbers as zero
    return Approx(values, stored, sigma=gone, limit=gone)


def plain(value: Value) -> Any:
    """Return an argument that is no tensor as Python has it; None for a tensor."""
    if not isinstance(value, Scalar):
        return None
    if value.type == "slice":
        return slice(*value.value)
    return Ellipsis if value.type == "ellipsis" else value.value


def _forward(call: Call, formula: Formula) -> list[Verdict]:
    arguments, tensors = arguments_of(call, formula)
    if formula.name in CHOOSES and any(np.isnan(x.value).any() for x in tensors):
        raise NotJudgedError("NaN goes in: which element is the largest is not defined")
    outputs = list(flat(call.outputs))
    if not outputs:
        raise NotJudgedError("no output was dumped")
    arguments.made = outputs
    expected = list(formula.compute(arguments))
    verdicts: list[Verdict] = []
    for i, record in enumerate(outputs):
        place = f"output.{i}"
        if i >= len(expected):
            reason = f"{place}: the formula gives {len(expected)} outputs"
            verdicts.append(not_judged(call.key, reason, place))
            continue
        values = record.load()
        if call.name.startswith(_OF_AUTOGRAD) and _is_mapped(call, values, expected[i]):
            reason = f"{place}: recorded under vmap, whose dimension its arguments lack"
            verdicts.append(not_judged(call.key, reason, place))
            continue
        free = free_choices(formula, arguments, i, values, expected[i])
        verdicts.append(judge(call.key, place, values, expected[i], record.dtype, free))
    return verdicts


def _is_mapped(call: Call, values: Array, expected: Approx | Array) -> bool:
    """Return whether an element by element operator gave more dimensions than any of its arguments has."""
    shapes = [t.shape for _, t in call.given()]
    if not shapes or values.ndim <= max(map(len, shapes)):
        return False
    try:
        return values_of(expected).shape == np.broadcast_shapes(*shapes)
    except ValueError:
        return False


def free_choices(
    formula: Formula, arguments: Arguments, place: int, indices: Array, expected: Approx | Array
) -> Array | None:
    """Return where indices of a choice may differ because elements are equal."""
    if CHOOSES.get(formula.name) != place or isinstance(expected, Approx):
        return None
    x = values_of(arguments.input)
    dim = None if arguments.dim is None else int(arguments.dim)
    if indices.shape != expected.shape or (dim is not None and indices.ndim != x.ndim):
        return None
    return same_choice(x, indices.astype(np.int64), expected, dim)


def _gradients(
    call: Call, forward: Call, formula: Formula, inner: list[Approx] | None = None
) -> tuple[list[Approx | None], list[Approx]]:
    """Return the gradients of a call's floating-point tensors, and those tensors; those of its own results go to ``inner``."""
    arguments, tensors = arguments_of(forward, formula, True)
    place, records = CHOOSES.get(formula.name), list(flat(forward.outputs))
    arguments.made = records
    if place is not None and place < len(records) and not is_float(records[place].dtype):
        arguments.chosen = records[place].load().astype(np.int64)
    outputs = [x for x in formula.compute(arguments) if isinstance(x, Approx)]
    coming = list(flat(call.inputs))
    if not coming or not outputs:
        raise NotJudgedError("no gradient of an output was dumped")
    if len(coming) > len(outputs):
        raise NotJudgedError(f"{len(coming)} gradients come in for {len(outputs)} outputs")
    seeds: list[tuple[Approx, Approx]] = []
    left = iter(outputs)  # of some outputs no gradient is dumped
    for record in coming:
        gradient = exactly(record.load(), record.dtype, True)
        output = next((o for o in left if o.shape == gradient.shape), None)
        if output is None:
            shapes = ", ".join(str(list(o.shape)) for o in outputs)
            raise NotJudgedError(f"a gradient of shape {list(gradient.shape)} for outputs {shapes}")
        seeds.append((output, gradient))
    return gradients(seeds, tensors, inner), tensors


def expected_gradient(call: Call, forward: Call, number: int) -> Approx | None:
    """Return what one output of a backward call should be; None: no formula gives it."""
    formula = find(call.formula_name)
    if formula is None:
        return None
    try:
        gradients_of, tensors = _gradients(call, forward, formula)
        index = _order(call, forward, tensors)[number]
        return None if index is None else gradients_of[index]
    except UNFIT:
        return None


def input_gradients(call: Call, forward: Call) -> list[Approx | None]:
    """Return the gradients of a call's floating-point inputs by its formula; empty: not known."""
    formula = find(forward.formula_name)
    try:
        return [] if formula is None else _gradients(call, forward, formula)[0]
    except UNFIT:
        return []


def _match(
    call: Call,
    forward: Call,
    gradients_of: list[Approx | None],
    tensors: list[Approx],
    inner: list[Approx],
    turned: bool,
) -> list[Verdict]:
    """Compare outgoing gradients with those of the tensors that they match, or of the operator's last autograd node."""
    verdicts: list[Verdict] = []
    outputs = [(f"output.{i}", r) for i, value in enumerate(call.outputs) for r in flat(value)]
    for (place, record), number in zip(outputs, _order(call, forward, tensors), strict=True):
        gradient = None if number is None else gradients_of[number]
        if gradient is None and number is not None and not tensors[number].value.size:
            continue  # of an expert without tokens
        if gradient is None:
            lacks = "no formula for this gradient"
            lacks = f"no input has shape {record.shape}" if number is None else lacks
            verdict = not_judged(call.key, f"{place}: {lacks}", place)
        else:
            verdict = judge(call.key, place, record.load(), gradient, record.dtype)
        if verdict.status != "pass" and call.name.startswith(_OF_AUTOGRAD):
            matrices = [g for g in gradients_of if turned and g is not None and len(g.shape) == 2]
            product = (
                call.name.rsplit(".", 1)[-1] in _PRODUCTS
            )  # of inner results only a transposed weight
            nodes = [*(g.swap(0, 1) for g in matrices), *([] if product else inner)]
            other = _of_last_node(call, place, record, nodes)
            if other is not None and (verdict.status != "diverged" or other.wrong < verdict.wrong):
                verdict = other
        verdicts.append(verdict)
    return verdicts or [not_judged(call.key, "no gradient of an input was dumped")]


_OF_AUTOGRAD = "Torch.", "Functional.", "Tensor."
"""Front ends of torch, whose composite functions msprobe hooks at their last autograd node."""

_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "addmm", "einsum", "bmm"))
_CAST_LAST = ("Functional.scaled_dot_product_attention",)
"""Those that end with a cast, which sends back what comes in."""


def _of_last_node(
    call: Call,
    place: str,
    record: TensorRecord,
    nodes: list[Approx],
) -> Verdict | None:
    """Return the verdict on what the last autograd node of a composite function sends back; None: it is none of that.

    torch makes ``linear`` of a transposition, a product and a view; msprobe's hook of the result sees the last of these:
    the gradient of the transposed weight, or the incoming gradient in another shape.
    """
    values = record.load()
    fitting = [g for g in nodes if g.shape == record.shape]
    verdicts = [judge(call.key, place, values, g, record.dtype) for g in fitting]
    passed = next((v for v in verdicts if v.status == "pass"), None)
    if passed is None and _is_view(call, record):
        return Verdict(call.key, place, "pass", elements=values.size)
    own_shape = verdicts and record.shape[::-1] == record.shape
    return verdicts[0] if passed is None and len(verdicts) == 1 and not own_shape else passed


def turns_weights(dump: RankDump) -> bool:
    """Return whether a dump holds the gradients of transposed weights, by the shapes of most that are not square."""
    votes = 0
    for call in dump.calls.values():
        forward = dump.calls.get(call.forward_key)
        if (
            call.phase is Phase.BACKWARD
            and call.name == "Functional.linear"
            and forward is not None
        ):
            shapes = {t.shape for _, t in call.made()}
            for weight in [t.shape for _, t in forward.given()][1:2]:
                votes += (weight[::-1] in shapes) - (weight in shapes)
    return votes > 0


def _is_view(call: Call, record: TensorRecord) -> bool:
    """Return whether a gradient is an incoming one with its dimensions in another order or shape."""
    values = record.load()
    for coming in flat(call.inputs):
        if is_float(coming.dtype) and (coming.shape != record.shape or call.name in _CAST_LAST):
            x = coming.load()
            if np.array_equal(np.sort(x, None), np.sort(values, None)):
                views = (x.transpose(order) for order in permutations(range(x.ndim)))
                if any(np.array_equal(v.reshape(record.shape), values) for v in views):
                    return True
    return False


def _order(call: Call, forward: Call, tensors: list[Approx]) -> list[int | None]:
    """Return for each outgoing gradient the number of its tensor, by shape; None: no tensor is left for it.

    They are in the order of the arguments, without those that need no gradient where the dump says so; msprobe writes
    those of a MindSpore primitive in the opposite order.
    """
    shapes = [record.shape for value in call.outputs for record in flat(value)]
    numbers = [*range(len(tensors))]
    floats = [t for _, t in forward.given() if is_float(t.dtype)]
    needed = [n for n, t in zip(numbers, floats, strict=False) if t.requires_grad is not False]
    turn = -1 if call.name.startswith("Primitive.") else 1
    orders = [needed[::turn], numbers[::turn], numbers[::-turn]]
    tries: list[list[int | None]] = []
    for order in orders:
        left = iter(order)
        tries.append([next((n for n in left if tensors[n].shape == s), None) for s in shapes])
    complete = next((numbers for numbers in tries if None not in numbers), None)
    if complete is not None or turn < 0:
        return tries[-1] if complete is None else complete
    matched: list[int | None] = []
    left_numbers = [*needed, *(n for n in numbers if n not in needed)]
    for shape in shapes:  # a node of autograd has its own order
        number = next((n for n in left_numbers if tensors[n].shape == shape), None)
        left_numbers = [n for n in left_numbers if n != number]
        matched.append(number)
    return matched

"""Find the kind of fault of a divergent call from what its wrong tensor holds and what it should hold."""

from dataclasses import replace

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import Call, Phase, TensorRecord
from telechat_moe.tools.align.explain.arguments import other_arguments
from telechat_moe.tools.align.explain.differences import Difference, kind_of_integers
from telechat_moe.tools.align.explain.exchanges import kind_of_exchange
from telechat_moe.tools.align.judge.collectives import ExchangeContext
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.outcome import Finding
from telechat_moe.tools.align.judge.replay import argument_name, other_settings, replay_call
from telechat_moe.tools.align.judge.verdict import Explanation


def explained(finding: Finding) -> Finding:
    """Return a finding with its kind of fault, the evidence for it and the residual, as far as its surroundings tell."""
    context = finding.about
    if isinstance(context, ExchangeContext):
        family, evidence = kind_of_exchange(context.received, context.target)
        return replace(finding, family=family, evidence=evidence)
    if context is None or finding.family != "unknown":
        return finding
    difference = _difference(context)
    family, evidence = kind_of_call(context, difference)
    if finding.verdict.basis == "other run" and not evidence:
        evidence = "no formula says what it should be"
    comparable = difference is not None and difference.value.shape == difference.x.shape
    residual = difference.residual if difference is not None and comparable else None
    return replace(finding, family=family, evidence=evidence, residual=residual)


def kind_of_call(divergent: DivergentCall, difference: Difference | None) -> Explanation:
    """Return the kind of fault of a divergent call and the evidence for it."""
    verdict, call = divergent.verdict, divergent.call
    setting = _wrong_setting(divergent)
    if setting is not None:
        return setting
    if difference is None:
        return "unknown", ""
    x, value, tensor = difference.x, difference.value, difference.tensor
    if value.shape != x.shape:
        return "shape", f"shape {list(x.shape)}, expected {list(value.shape)}"
    if not is_float(tensor.dtype):
        return divergent.elsewhere(tensor.load()) or kind_of_integers(x, value)
    answer = None
    # Several wrong outputs share one cause, which is an argument; a mask explains best why values pass.
    masked = any(t.dtype == "bool" for _, t in call.tensors())
    if divergent.wrong_outputs > 1 or (masked and not np.all(np.isfinite(x))):
        answer = other_arguments(x, divergent)
    answer = answer or difference.pattern() or divergent.elsewhere(tensor.load())
    answer = answer or other_arguments(x, divergent) or difference.remainder()
    if answer is None and divergent.comes_from_outside:
        size = float(np.linalg.norm(value)) or 1.0
        apart = float(np.linalg.norm(x - value)) / size
        return "other input", f"no recorded call made it; it is {apart:.2g} of its size off"
    return answer or ("unknown", f"{verdict.wrong} of {verdict.elements} elements")


def _difference(divergent: DivergentCall) -> Difference | None:
    """Return a wrong tensor and the right one, in its shape if sizes are equal; None: either is unknown."""
    tensor = dict(divergent.call.tensors()).get(divergent.verdict.place)
    right = divergent.wanted() if tensor is not None and tensor.read is not None else None
    if tensor is None or right is None:
        return None
    x = tensor.load().astype(np.float64)
    value, bound = (y.reshape(x.shape) if y.size == x.size else y for y in right)
    return Difference(x, value, bound, divergent.call, tensor, divergent)


def _wrong_setting(divergent: DivergentCall) -> Explanation | None:
    """Test whether another value of a number or flag makes the result right."""
    call = divergent.call
    if call.phase is Phase.BACKWARD or divergent.settings is None:
        return None
    expected, actual = _settings(divergent.settings), _settings(call)
    names = {k for k in expected.keys() | actual.keys() if expected.get(k) != actual.get(k)}
    statuses = {v.status for v in replay_call(call, call)}
    recorded = "diverged" not in statuses and other_settings(call, divergent.settings)
    if names and (recorded or statuses == {"pass"}):
        texts = (
            f"{argument_name(call, k)} {actual.get(k)} (reference: {expected.get(k)})"
            for k in sorted(names)
        )
        return "wrong setting", ", ".join(texts)
    return None


def _settings(call: Call) -> dict[str, str]:
    return {
        place: repr(getattr(value, "value", value))
        for place, value in call.leaves()
        if not isinstance(value, TensorRecord)
    }

"""Updates of one weight: the call ``Optimizer.<class>`` with weight, gradient and state before and after it."""

from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS
from telechat_moe.tools.align.operators.approx import Approx
from telechat_moe.tools.align.operators.elementwise import floating, plain
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op, primitive


def _number(x: Any) -> float:
    return float(plain(x))


def _complement(x: Approx, beta: float, power: float = 1.0) -> Approx:
    """Return ``1 - beta ** power``; kernels hold beta in float32, whose rounding matters in a small result."""
    value = beta**power
    error = power * FLOATS["float32"].unit * value
    return x.like(1 - value, error, 2 * error)


def _plain_update(a: Arguments) -> None:
    for name in ("amsgrad", "maximize", "nesterov"):
        if a.__dict__.get(name):
            raise NotJudgedError(f"an optimizer with {name}")


@op(
    "AdamW Adam AdamWeightDecay",
    "weight grad exp_avg exp_avg_sq step lr betas eps weight_decay=0.0 | decoupled=True "
    "amsgrad=False maximize=False",
    stores=True,
)
def adamw(a: Arguments) -> Any:
    """Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2; ``step`` counts from 1."""
    _plain_update(a)
    w, g = floating(a.weight), floating(a.grad)
    beta1, beta2 = (_number(b) for b in a.betas)
    rate, decay, step = _number(a.lr), _number(a.weight_decay), _number(a.step)
    if a.decoupled:
        w = w * (1 - rate * decay)
    elif decay:
        g = g + w * decay
    m = floating(a.exp_avg) * beta1 + g * _complement(g, beta1)
    v = floating(a.exp_avg_sq) * beta2 + g * g * _complement(g, beta2)
    divisor = v.sqrt() / _complement(v, beta2, step).sqrt() + _number(a.eps)
    return [w - m / divisor * (rate / _complement(m, beta1, step)), m, v]


@op(
    "SGD Momentum",
    "weight grad momentum_buffer=None lr momentum=0.0 dampening=0.0 weight_decay=0.0 | "
    "nesterov=False maximize=False",
    stores=True,
)
def _sgd(a: Arguments) -> Any:
    _plain_update(a)
    w, g = floating(a.weight), floating(a.grad)
    decay, momentum = _number(a.weight_decay), _number(a.momentum)
    g = g + w * decay if decay else g
    if not momentum:
        return [w - g * _number(a.lr)]
    first = a.momentum_buffer is None
    buffer = g if first else floating(a.momentum_buffer) * momentum + g * (1 - _number(a.dampening))
    return [w - buffer * _number(a.lr), buffer]


@op(
    "npu_apply_adam_w",
    "beta1_power beta2_power lr weight_decay beta1 beta2 epsilon grad max_grad_norm=None amsgrad=None maximize=None | "
    "out=None",
    stores=True,
)
def _apply_adam_w(a: Arguments) -> Any:
    """Update ``out`` (weight, first and second moment); ``beta_power`` are the powers before this step."""
    weight, first, second = a.out
    step = 1 + round(np.log(float(plain(a.beta1_power))) / np.log(float(plain(a.beta1))))
    state = {**a.__dict__, "weight": weight, "exp_avg": first, "exp_avg_sq": second, "step": step}
    settings = {"betas": (a.beta1, a.beta2), "eps": a.epsilon, "decoupled": True}
    return adamw(Arguments(state | settings))


@primitive(
    "AdamWeightDecay",
    "weight exp_avg exp_avg_sq lr beta1 beta2 eps weight_decay grad clip=None | new1=None "
    "new2=None use_nesterov=False",
    stores=True,
)
def _adam_weight_decay(a: Arguments) -> Any:
    """Compute ``w -= lr (m / (sqrt(v) + eps) + decay w)``; bias correction, if any, is in the three numbers."""
    w, g = floating(a.weight), floating(a.grad)
    g = g * floating(a.clip) if a.clip is not None else g
    beta1, beta2 = floating(a.beta1), floating(a.beta2)
    new1 = 1 - beta1 if a.new1 is None else floating(a.new1)
    new2 = 1 - beta2 if a.new2 is None else floating(a.new2)
    m = floating(a.exp_avg) * beta1 + g * new1
    v = floating(a.exp_avg_sq) * beta2 + g * g * new2
    step = m / (v.sqrt() + floating(a.eps)) + w * floating(a.weight_decay)
    return [w - step * floating(a.lr), m, v]


@primitive(
    "ApplyMomentum",
    "weight momentum_buffer lr grad momentum | use_nesterov=False use_locking=False "
    "gradient_scale=1.0",
    stores=True,
)
def _momentum(a: Arguments) -> Any:
    if a.use_nesterov:
        raise NotJudgedError("an optimizer with nesterov")
    scaled = floating(a.grad) * float(a.gradient_scale)
    v = floating(a.momentum_buffer) * floating(a.momentum) + scaled
    return [floating(a.weight) - v * floating(a.lr), v]

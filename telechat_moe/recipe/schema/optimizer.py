"""Sections about the update: optimizer and learning rate."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from telechat_moe.recipe.fields import (
    Above0,
    Count,
    Length,
    NonNegative,
    Positive,
    Range,
    Share,
    Text,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """`optimizer`. Which keys are read depends on `type`."""

    type: Literal["AdamW", "FusedAdamW", "PmaAdamW", "FusedPmaAdamW"] = "AdamW"
    """Update rule. This package trains with `AdamW`; the others are MindFormers'."""

    betas: Annotated[list[Annotated[float, Range(0, 1, below=True)]], Length(2, 2)] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay of the first and second moment."""

    eps: Above0 = 1e-8
    """Added to the root of the second moment. Write `1.e-8`: YAML reads `1e-8` as text."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""

    learning_rate: Above0 | None = None
    """Learning rate without a schedule; `lr_schedule` replaces it."""

    swap: bool | None = None
    """Keep optimizer states in host memory."""

    amsgrad: bool | None = None
    """AMSGrad variant."""

    maximize: bool | None = None
    """Ascend instead of descend."""

    fused_num: Positive | None = None
    """PMA: models that are averaged."""

    interleave_step: Positive | None = None
    """PMA: steps between averages."""

    fused_algo: Literal["ema", "sma"] | None = None
    """PMA: kind of average."""

    ema_alpha: Share | None = None
    """PMA: weight of the newest model."""


_LR_TYPES = Literal[
    "ConstantWarmUpLR",
    "LinearWithWarmUpLR",
    "CosineWithWarmUpLR",
    "CosineWithRestartsAndWarmUpLR",
    "PolynomialWithWarmUpLR",
    "WarmUpStableDecayLR",
    "ConstantWithCoolDownLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
]
_Steps = Annotated[int, Range(-1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSchedule:
    """`lr_schedule`. Which keys are read depends on `type`; MindFormers drops the others."""

    type: _LR_TYPES
    """Shape of the schedule. This package trains with `ConstantWarmUpLR`, `CosineWithWarmUpLR`
    and `WarmUpStableDecayLR`."""

    learning_rate: NonNegative | None = None
    """Highest learning rate, reached at the end of warm-up."""

    base_lr: NonNegative | None = None
    """The same for the two `CosineAnnealing` types."""

    warmup_steps: Count | None = None
    """Steps over which the rate rises linearly from `warmup_lr_init`. Not with `warmup_ratio`."""

    warmup_ratio: Share | None = None
    """The same as a share of `total_steps`."""

    warmup_lr_init: NonNegative | None = None
    """Rate at the first step of warm-up. None: 0."""

    total_steps: _Steps | None = None
    """Steps of the whole schedule. -1: as many as the data set gives."""

    lr_end: NonNegative | None = None
    """Rate at the end of the decay. At most `learning_rate`."""

    decay_steps: _Steps | None = None
    """Steps over which the rate falls. -1 or None: all after warm-up."""

    decay_ratio: Share | None = None
    """The same as a share of `total_steps`."""

    decay_start_steps: Count | None = None
    """WSD: step at which the decay begins."""

    decay_start_ratio: Share | None = None
    """WSD: the same as a share of `total_steps`."""

    num_cycles: Above0 | None = None
    """Cosine periods. 0.5 falls once."""

    power: Above0 | None = None
    """Exponent of the polynomial."""

    keep_steps: Count | None = None
    """Cool-down: steps at the highest rate."""

    final_steps: Count | None = None
    """Cool-down: steps of the last part."""

    lr_end1: NonNegative | None = None
    """Cool-down: rate after the first decay."""

    lr_end2: NonNegative | None = None
    """Cool-down: rate at the end."""

    t_max: Positive | None = None
    """Cosine annealing: steps of half a period."""

    t_0: Positive | None = None
    """Warm restarts: steps of the first period."""

    t_mult: Positive | None = None
    """Warm restarts: growth of the period."""

    eta_min: NonNegative | None = None
    """Cosine annealing: lowest rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLr(LrSchedule):
    """One entry of `grouped_lr_schedule.grouped`: a schedule for some parameters."""

    params: Annotated[list[Text], Length(1)]
    """Regular expressions for parameter names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLrSchedule:
    """`grouped_lr_schedule`: a schedule per group of parameters, instead of `lr_schedule`."""

    default: LrSchedule
    """Schedule of every parameter that no group names."""

    grouped: list[GroupedLr] = field(default_factory=list[GroupedLr])
    """Schedules of the groups, first match first."""

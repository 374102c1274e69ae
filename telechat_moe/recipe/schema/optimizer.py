"""Sections about the update: optimizer and learning rate."""

from dataclasses import field
from typing import Annotated, Literal

from telechat_moe.recipe.fields import Above0, Count, Fraction, Length, NonNegative, Range, Text
from telechat_moe.recipe.schema.table import section


@section
class Optimizer:
    """`optimizer`. Which keys are read depends on `type`."""

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

    swap: bool = False
    """Keep the moments in the host's memory; on CPU processes out of the memory of their graphs ([plan_memory.md](plan_memory.md))."""


OUR_DECAY = "TelechatDecayLR"
STABLE_DECAY = ("WarmUpStableDecayLR", OUR_DECAY)
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
    "TelechatDecayLR",
]
_Steps = Annotated[int, Range(-1)]


@section
class LrSchedule:
    """`lr_schedule`. Which keys are read depends on `type`; MindFormers drops the others."""

    type: _LR_TYPES
    """Shape of the schedule. This package trains with `ConstantWarmUpLR`, `CosineWithWarmUpLR`
    and `WarmUpStableDecayLR`; `TelechatDecayLR` is the last one with `telechat_moe.lr_wsd_decay_style`, also in MindFormers'
    own trainer."""

    learning_rate: NonNegative | None = None
    """Highest learning rate, reached at the end of warm-up."""

    base_lr: NonNegative | None = None
    """The same for the two `CosineAnnealing` types."""

    warmup_steps: Count | None = None
    """Steps over which the rate rises linearly from `warmup_lr_init`. Not with `warmup_ratio`."""

    warmup_ratio: Fraction | None = None
    """The same as a share of `total_steps`."""

    warmup_lr_init: NonNegative | None = None
    """Rate at the first step of warm-up. None: 0."""

    total_steps: _Steps | None = None
    """Steps of the whole schedule. -1: as many as the data set gives."""

    lr_end: NonNegative | None = None
    """Rate at the end of the decay. At most `learning_rate`."""

    decay_steps: _Steps | None = None
    """Steps over which the rate falls. -1 or None: all after warm-up."""

    decay_ratio: Fraction | None = None
    """The same as a share of `total_steps`."""

    decay_start_steps: Count | None = None
    """WSD: step at which the decay begins."""

    decay_start_ratio: Fraction | None = None
    """WSD: the same as a share of `total_steps`."""

    num_cycles: Above0 | None = None
    """Cosine periods. 0.5 falls once."""


@section
class GroupedLr(LrSchedule):
    """One entry of `grouped_lr_schedule.grouped`: a schedule for some parameters."""

    params: Annotated[list[Text], Length(1)]
    """Regular expressions for parameter names."""


@section
class GroupedLrSchedule:
    """`grouped_lr_schedule`: a schedule per group of parameters, instead of `lr_schedule`."""

    default: LrSchedule
    """Schedule of every parameter that no group names."""

    grouped: list[GroupedLr] = field(default_factory=list[GroupedLr])
    """Schedules of the groups, first match first."""

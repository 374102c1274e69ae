"""Sections about watching a run: callbacks and MindFormers' monitor."""

import functools
import operator
from typing import TYPE_CHECKING

from telechat_moe.recipe.fields import Above0, Count, NonNegative, Positive, Text
from telechat_moe.recipe.schema import table
from telechat_moe.recipe.schema.table import section


class CallbackSection:
    """What every section of `callbacks` has."""

    type: str
    """Kind of callback."""


@section
class MFLossMonitor(CallbackSection):
    """Prints loss, learning rate and time."""

    micro_batch_num: Positive | None = None
    """Equals `parallel_config.micro_batch_num` if written."""

    micro_batch_interleave_num: Positive | None = None
    """Equals the recipe's `micro_batch_interleave_num` if written."""

    gradient_accumulation_steps: Positive | None = None
    """Equals `runner_config.gradient_accumulation_steps` if written."""


@section
class TopkBiasBalanceCallback(CallbackSection):
    """Updates the expert bias after each step. Left out keys are taken from the model section."""

    balance_via_topk_bias: bool | None = None
    """Equals the model's `moe_router_enable_expert_bias`."""

    topk_bias_update_rate: NonNegative | None = None
    """Equals the model's `moe_router_bias_update_rate`."""

    expert_num: Positive | None = None
    """Equals the model's `n_routed_experts`."""

    micro_batch_num: Positive | None = None
    """Equals `parallel_config.micro_batch_num`."""

    gradient_accumulation_steps: Positive | None = None
    """Equals `runner_config.gradient_accumulation_steps`."""


@section
class CheckpointMonitor(CallbackSection):
    """Saves checkpoints. This package takes the interval and the number to keep from here."""

    prefix: Text = "CKP"
    """Start of file names."""

    save_checkpoint_steps: Positive = 1
    """Steps between checkpoints."""

    keep_checkpoint_max: Positive = 5
    """Newest checkpoints that are kept."""

    async_save: bool = False
    """Save while training goes on."""


@section
class ProfileMonitor(CallbackSection):
    """Profiles some steps."""

    start_step: Positive = 1
    """First step."""

    stop_step: Positive = 10
    """Last step."""


@section
class MoEDropRateCallback(CallbackSection):
    """Logs the share of dropped tokens. Left out keys are taken from the model section."""

    expert_num: Positive | None = None
    """Equals the model's `n_routed_experts`."""

    capacity_factor: Above0 | None = None
    """Equals the model's `moe_expert_capacity_factor`."""

    num_layers: Positive | None = None
    """Equals the model's `num_hidden_layers`."""

    mtp_depth: Count | None = None
    """Equals the model's `num_nextn_predict_layers`."""


if TYPE_CHECKING:
    Callback = CallbackSection
else:  # every section whose `type` is its own name; those above, and those in the table alone
    Callback = functools.reduce(
        operator.or_,
        (
            globals().get(name) or getattr(table, name)
            for name, block in table.blocks().items()
            if block.rows[0].values == f'Literal["{name}"]'
        ),
    )


@section
class MonitorConfig:
    """`monitor_config`: what MindFormers' TrainingStateMonitor writes."""

    global_norm_spike_threshold: Above0 = 3.0
    """Norm that counts as a spike."""

    global_norm_spike_count_threshold: Positive = 10
    """Spikes in a row that stop training."""

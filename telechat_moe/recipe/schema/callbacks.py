"""Sections about watching a run: callbacks and MindFormers' monitor."""

from dataclasses import dataclass, field
from typing import Literal

from telechat_moe.recipe.fields import Above0, Count, NonNegative, Positive, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class MFLossMonitor:
    """Prints loss, learning rate and time."""

    type: Literal["MFLossMonitor"] = "MFLossMonitor"
    """Kind of callback."""

    per_print_times: Positive = 1
    """Steps between lines."""

    micro_batch_num: Positive | None = None
    """Equals `parallel_config.micro_batch_num` if written."""

    micro_batch_interleave_num: Positive | None = None
    """Equals the recipe's `micro_batch_interleave_num` if written."""

    gradient_accumulation_steps: Positive | None = None
    """Equals `runner_config.gradient_accumulation_steps` if written."""

    check_for_nan_in_loss_and_grad: bool | None = None
    """Stop when the loss or the gradient norm is not a number."""

    calculate_per_token_loss: bool | None = None
    """Average the loss over tokens instead of samples."""

    print_separate_loss: bool | None = None
    """Log main, balance and MTP loss apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkBiasBalanceCallback:
    """Updates the expert bias after each step. Left out keys are taken from the model section."""

    type: Literal["TopkBiasBalanceCallback"] = "TopkBiasBalanceCallback"
    """Kind of callback."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMonitor:
    """Saves checkpoints. This package takes the interval and the number to keep from here."""

    type: Literal["CheckpointMonitor"] = "CheckpointMonitor"
    """Kind of callback."""

    prefix: Text = "CKP"
    """Start of file names."""

    directory: Text | None = None
    """Folder. None: below `output_dir`."""

    save_checkpoint_steps: Positive = 1
    """Steps between checkpoints."""

    save_checkpoint_seconds: Count = 0
    """Seconds between checkpoints. 0: by steps only."""

    keep_checkpoint_max: Positive = 5
    """Newest checkpoints that are kept."""

    keep_checkpoint_per_n_minutes: Count = 0
    """Keep one per so many minutes. 0: no."""

    integrated_save: bool = True
    """Gather sharded parameters into one file."""

    save_network_params: bool = False
    """Save the network apart from the optimizer."""

    save_trainable_params: bool = False
    """Save the trained parameters apart."""

    save_optimizer: bool = True
    """Save optimizer states, so that training can go on."""

    async_save: bool = False
    """Save while training goes on."""

    checkpoint_format: Literal["ckpt", "safetensors"] = "ckpt"
    """File format. This package writes `safetensors`."""

    remove_redundancy: bool = False
    """Save each parameter from one device only. Equals the recipe's `remove_redundancy` when a
    run is resumed."""

    exception_save: bool = False
    """Save when training breaks."""

    embedding_size: Positive | None = None
    """Width of the embedding, for the health monitor."""

    embedding_local_norm_threshold: Above0 | None = None
    """Largest embedding gradient of a healthy checkpoint."""

    use_checkpoint_health_monitor: bool = False
    """Record which checkpoints are healthy."""

    health_ckpts_record_dir: Text | None = None
    """Folder of that record."""

    use_legacy_format: bool | None = None
    """Old checkpoint layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStateMonitor:
    """Writes norms and losses; settings stand in `monitor_config`."""

    type: Literal["TrainingStateMonitor"] = "TrainingStateMonitor"
    """Kind of callback."""

    step_interval: Positive | None = None
    """Steps between records."""

    check_for_nan_in_loss_and_grad: bool | None = None
    """Stop when the loss or the gradient norm is not a number."""

    use_skip_data_by_global_norm: bool | None = None
    """Skip batches whose gradient norm is a spike."""

    embedding_size: Positive | None = None
    """Width of the embedding."""

    use_local_norm: bool | None = None
    """Norms per parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileMonitor:
    """Profiles some steps."""

    type: Literal["ProfileMonitor"] = "ProfileMonitor"
    """Kind of callback."""

    start_step: Positive = 1
    """First step."""

    stop_step: Positive = 10
    """Last step."""

    output_path: Text | None = None
    """Folder."""

    start_profile: bool = True
    """Begin with the first step."""

    profile_rank_ids: list[Count] | None = None
    """Ranks to profile. None: all."""

    profile_pipeline: bool = False
    """One rank of each stage."""

    profile_communication: bool = False
    """Record communication."""

    profile_memory: bool = False
    """Record memory."""

    profiler_level: Literal[0, 1, 2] = 0
    """Detail."""

    with_stack: bool = False
    """Record call stacks."""

    data_simplification: bool = True
    """Delete raw data afterwards."""

    mstx: bool = False
    """Record markers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEDropRateCallback:
    """Logs the share of dropped tokens. Left out keys are taken from the model section."""

    type: Literal["MoEDropRateCallback"] = "MoEDropRateCallback"
    """Kind of callback."""

    expert_num: Positive | None = None
    """Equals the model's `n_routed_experts`."""

    capacity_factor: Above0 | None = None
    """Equals the model's `moe_expert_capacity_factor`."""

    num_layers: Positive | None = None
    """Equals the model's `num_hidden_layers`."""

    mtp_depth: Count | None = None
    """Equals the model's `num_nextn_predict_layers`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMigrateCallback:
    """Moves experts between devices. Left out keys are taken from the model section."""

    type: Literal["ExpertMigrateCallback"] = "ExpertMigrateCallback"
    """Kind of callback."""

    print_expert_load: bool | None = None
    """Log the load of each expert."""

    enable_expert_relocation: bool | None = None
    """Turn it on."""

    expert_relocation_initial_iteration: Count | None = None
    """Step of the first move."""

    expert_relocation_freq: Positive | None = None
    """Steps between moves."""

    save_checkpoint_steps: Positive | None = None
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCallBack:
    """Stops early."""

    type: Literal["TrainCallBack"] = "TrainCallBack"
    """Kind of callback."""

    stop_step: Positive | None = None
    """Last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StressDetectCallBack:
    """Tests the hardware while training."""

    type: Literal["StressDetectCallBack"] = "StressDetectCallBack"
    """Kind of callback."""

    detection_interval: Positive | None = None
    """Steps between tests."""

    num_detections: Positive | None = None
    """Repetitions of a test."""

    dataset_size: Positive | None = None
    """Steps of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SDCMonitor:
    """Watches for silent data corruption."""

    type: Literal["SDCMonitor"] = "SDCMonitor"
    """Kind of callback."""

    initial_step: Count = 0
    """First step."""

    step_interval: Positive = 10
    """Steps between checks."""

    strike_window_time: Positive = 480
    """Window of strikes, in minutes."""

    strike_num: Positive = 3
    """Strikes that start a checksum."""

    checksum_time: Positive = 5
    """Length of a checksum, in minutes."""

    checksum_cooldown_time: Positive = 180
    """Pause after a checksum, in minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdHotExpertMonitor:
    """Counts hot experts (old networks)."""

    type: Literal["ColdHotExpertMonitor"] = "ColdHotExpertMonitor"
    """Kind of callback."""

    save_checkpoint_steps: Positive | None = None
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalCallBack:
    """Evaluates while training."""

    type: Literal["EvalCallBack"] = "EvalCallBack"
    """Kind of callback."""

    step_interval: Positive = 100
    """Steps between evaluations."""

    epoch_interval: int = -1
    """Epochs between evaluations. -1: by steps."""


Callback = (
    MFLossMonitor
    | TopkBiasBalanceCallback
    | CheckpointMonitor
    | TrainingStateMonitor
    | ProfileMonitor
    | MoEDropRateCallback
    | ExpertMigrateCallback
    | TrainCallBack
    | StressDetectCallBack
    | SDCMonitor
    | ColdHotExpertMonitor
    | EvalCallBack
)

_Format = Literal["log", "tensorboard"]
Sinks = _Format | list[_Format] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StableRankConfig:
    """`monitor_config.stable_rank_config`."""

    format: Sinks = None
    """Where to write."""

    step_interval: Positive = 100
    """Steps between records."""

    target: list[Text] | None = None
    """Patterns of parameter names."""

    do_aggregation: bool = False
    """Gather sharded parameters first."""

    moe_show_mode: Literal["full", "statistics", "all"] = "all"
    """What is shown of experts."""

    power_iteration_num: Positive = 5
    """Iterations of the power method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """`monitor_config`: what MindFormers' TrainingStateMonitor writes."""

    monitor_on: bool = False
    """Turn it on."""

    dump_path: Text = "./dump"
    """Folder."""

    target: list[Text] | None = None
    """Patterns of parameter names. None: all."""

    invert: bool = False
    """The parameters that no pattern names, instead."""

    step_interval: Positive = 1
    """Steps between records."""

    local_loss_format: Sinks = None
    """Loss per device."""

    local_norm_format: Sinks = None
    """Gradient norm per parameter."""

    device_local_norm_format: Sinks = None
    """Gradient norm per device."""

    device_local_loss_format: Sinks = None
    """Loss per device."""

    optimizer_state_format: Sinks = None
    """Norm of optimizer states."""

    weight_state_format: Sinks = None
    """Norm of weights."""

    max_attention_logit_format: Sinks = None
    """Largest attention score."""

    throughput_baseline: Above0 | None = None
    """Throughput that counts as 100 %, in TFLOPS per device."""

    print_struct: bool = False
    """Print the network and stop."""

    check_for_global_norm: bool = False
    """Watch the global gradient norm."""

    global_norm_spike_threshold: Above0 = 3.0
    """Norm that counts as a spike."""

    global_norm_spike_count_threshold: Positive = 10
    """Spikes in a row that stop training."""

    stable_rank_config: StableRankConfig = field(default_factory=StableRankConfig)
    """Stable rank of weights."""

    health_checkpoint: dict[str, object] | None = None
    """Which checkpoints count as healthy."""

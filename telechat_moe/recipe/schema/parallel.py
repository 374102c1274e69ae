"""Sections about devices: context, parallel degrees, recomputation, swapping."""

from dataclasses import field
from typing import Annotated, Literal

from telechat_moe.recipe.fields import (
    Count,
    Degree,
    Gigabytes,
    Length,
    Positive,
    Range,
    Text,
    decides,
    only,
)
from telechat_moe.recipe.schema.table import section


@section
class AscendConfig:
    """`context.ascend_config`: settings of Ascend devices."""

    parallel_speed_up_json_path: Text | None = field(default=None, metadata=decides("graph"))
    """JSON file with MindSpore's switches for communication overlap, found in the recipe's folder, else in the working
    folder, where MindFormers looks. `dryrun` compiles with it ([performance.md](performance.md))."""


@section
class JitConfig:
    """`context.jit_config`: graph compilation for the device."""

    jit_level: Literal["O0", "O1", "O2"] | None = None
    """O0: no fusion, O1: with automatic fusion, O2: whole graph sunk."""

    infer_boost: Literal["on", "off"] | None = None
    """Inference kernels. Quote it: `on` is a boolean in YAML."""


@section
class Context:
    """`context`: MindSpore's settings. MindFormers drops every other key with a warning."""

    device_target: Literal["Ascend", "CPU", "GPU"] = "Ascend"
    """Kind of device."""

    max_call_depth: Positive = field(default=10000, metadata=decides("graph"))
    """Largest nesting of calls in a graph."""

    max_device_memory: Gigabytes | None = None
    """Device memory to use, as `"58GB"`. None: all. Ascend only."""

    mempool_block_size: Gigabytes | None = None
    """Growth of the memory pool, as `"56GB"`. Ascend only."""

    jit_config: JitConfig | None = None
    """Graph compilation. Ascend only."""

    ascend_config: AscendConfig | None = None
    """Settings of Ascend devices."""


@section
class ParallelConfig:
    """`parallel_config`: the parallel degrees.

    Devices = `data_parallel` x `model_parallel` x `context_parallel` x `pipeline_stage`.
    """

    data_parallel: Degree = 1
    """Copies of the model that see different data (dp). 1: none."""

    model_parallel: Degree = 1
    """Devices that share each matrix (tp). Divides heads, vocabulary and widths. 1: none."""

    pipeline_stage: Degree = 1
    """Pipeline stages (pp). 1: none. At most `micro_batch_num`."""

    expert_parallel: Degree = 1
    """Devices over which experts are spread (ep). Divides `n_routed_experts` and the devices of a
    stage. 1: every device holds all experts."""

    context_parallel: Degree = 1
    """Devices that share a sequence (cp). 1: none."""

    context_parallel_algo: Literal["colossalai_cp", "ulysses_cp", "hybrid_cp"] = "colossalai_cp"
    """How context parallelism exchanges keys and values."""

    micro_batch_num: Positive = 1
    """Micro-batches per step through the pipeline. Without stages it has no effect: 1."""

    seq_split_num: Positive = 1
    """Parts of a sequence that go through the pipeline one after the other. More than 1 needs the scheduler `seqpipe` or
    `seqvpp`, and in our model `calculate_per_token_loss` and no balance loss."""

    use_seq_parallel: bool = False
    """Split activations between matrices along the sequence. Needs `model_parallel` > 1."""


@section
class PipelineConfig:
    """`parallel.pipeline_config`: order of the pipeline."""

    pipeline_interleave: bool = False
    """More than one chunk per stage, or parts of sequences; with neither, the order is 1F1B."""

    pipeline_scheduler: Literal[
        "1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"
    ] = "1f1b"
    """Order of forward and backward. `seqpipe` and `seqvpp` (several chunks) order parts of
    sequences (`seq_split_num`), `seqsmartvpp` needs an even number of stages, `zero_bubble_v` 2 chunks per stage; all but
    `1f1b` need `pipeline_interleave`."""


@section
class ParallelOptimizerConfig:
    """`parallel.parallel_optimizer_config`: sharding of optimizer states."""

    gradient_accumulation_shard: bool = False
    """Shard accumulated gradients too."""

    parallel_optimizer_threshold: Count = 64
    """Smallest parameter that is sharded, in KB."""

    optimizer_weight_shard_size: Annotated[int, Range(-1)] | None = None
    """Devices over which one state is sharded, a divisor of `data_parallel` above 1. -1: all that hold a copy of it."""

    optimizer_level: Literal["level1", "level2", "level3"] | None = field(
        default=None, metadata=only("level1")
    )
    """ZeRO level."""


@section
class Parallel:
    """`parallel`: MindSpore's automatic parallelism."""

    parallel_mode: Literal[
        0, 1, 2, 3,
        "DATA_PARALLEL", "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL", "HYBRID_PARALLEL",
        "STAND_ALONE", "MANUAL_PARALLEL",
    ] = 1  # fmt: skip
    """0: data, 1: semi-automatic, 2: automatic, 3: hybrid; or the word."""

    gradients_mean: bool = False
    """Average gradients over devices in the framework; MindFormers scales them itself."""

    full_batch: bool = True
    """Every device reads the whole batch. False: `dataset_strategy` says who reads what."""

    dataset_strategy: list[Annotated[list[Positive], Length(1)]] | Text | None = None
    """A list per column of `construct_args_key`: how many ways each axis is split. The first
    number is `data_parallel`."""

    enable_parallel_optimizer: bool = False
    """Shard optimizer states over data parallelism (ZeRO)."""

    parallel_optimizer_config: ParallelOptimizerConfig | None = None
    """Details of that."""

    pipeline_config: PipelineConfig | None = None
    """Order of the pipeline."""

    auto_pipeline: bool | None = None
    """Choose stages automatically; MindFormers refuses True."""


@section
class RecomputeConfig:
    """`recompute_config`: what is computed again in the backward pass to save memory.

    A list has one number of layers per stage, or with interleaving a list of lists.
    """

    recompute: bool | list[Count | bool] | list[list[Count | bool]] = False
    """Whole layers: all, none, or how many of each stage. With `swap_config.swap` a list names the layers, from 0."""

    select_recompute: bool | list[object] | dict[str, object] = False
    """Only some operators: default patterns, or patterns with the layers they hold for."""

    mp_comm_recompute: bool = True
    """Repeat the communication of model parallelism."""

    recompute_slice_activation: bool = False
    """Slice what is kept; MindFormers' core refuses True."""


@section
class LayerSwap:
    """`swap_config.layer_swap[]`: layers that keep their activations in the host's memory."""

    layers: bool | list[Count]
    """Decoder layers, from 0; True: all. The first item that names a layer counts."""

    backward_prefetch: Positive
    """How many operators before its reader an activation's way back begins. Larger: less waiting, and the activation
    is in the device's memory for longer."""


@section
class OpSwap:
    """`swap_config.op_swap[]`: operators whose results wait in the host's memory."""

    op_name: Text | list[Text]
    """Patterns of names in a layer: regular expressions for each part of the name, with `\\.` between them. Our layers have
    `attention`, `attention.core`, `attention.q_down`, `add_attention`, `add_ffn`; `ffn`, `ffn.act`; `moe`, `moe.router`,
    `moe.dispatch`, `moe.experts`, `moe.shared`, `moe.shared.act`."""

    layers: bool | list[Count]
    """Decoder layers, from 0; True: all."""

    backward_prefetch: Positive
    """As in `layer_swap`."""


@section
class SwapConfig:
    """`swap_config`: activations that wait in the host's memory between forward and backward pass ([plan_memory.md](plan_memory.md))."""

    swap: bool = False
    """Turn it on. Without `layer_swap` and `op_swap`: the operands and results of every layer's attention core."""

    layer_swap: list[LayerSwap] | None = None
    """Whole layers."""

    op_swap: list[OpSwap] | None = None
    """Some operators."""

    default_prefetch: Positive = 1
    """`backward_prefetch` where neither list is given."""

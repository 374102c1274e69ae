"""Sections about devices: context, parallel degrees, recomputation, swapping."""

from dataclasses import dataclass
from typing import Annotated, Literal

from telechat_moe.recipe.fields import Above0, Count, Gigabytes, Length, Positive, Range, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class JitConfig:
    """`context.jit_config`: graph compilation."""

    jit_level: Literal["O0", "O1", "O2"] | None = None
    """O0: no fusion, O1: with automatic fusion, O2: whole graph sunk."""

    infer_boost: Literal["on", "off"] | None = None
    """Inference kernels. Quote it: `on` is a boolean in YAML."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AscendConfig:
    """`context.ascend_config`: settings of Ascend devices."""

    precision_mode: (
        Literal[
            "force_fp16",
            "allow_fp32_to_fp16",
            "allow_mix_precision",
            "must_keep_origin_dtype",
            "force_fp32",
            "allow_fp32_to_bf16",
            "allow_mix_precision_fp16",
            "allow_mix_precision_bf16",
        ]
        | None
    ) = None
    """What kernels may do to types."""

    parallel_speed_up_json_path: Text | None = None
    """JSON file with switches for communication overlap. It must exist where training runs; the
    one that MindFormers' recipes name is not in its wheel."""

    jit_compile: bool | None = None
    """Compile kernels online."""

    atomic_clean_policy: Literal[0, 1] | None = None
    """0: clear memory at once, 1: per kernel."""

    matmul_allow_hf32: bool | None = None
    """Matrix products may use HF32."""

    conv_allow_hf32: bool | None = None
    """Convolutions may use HF32."""

    op_precision_mode: Text | None = None
    """File with precision modes per kernel."""

    op_debug_option: Text | None = None
    """Debugging of kernels."""

    ge_options: dict[str, object] | None = None
    """Options of the graph engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """`context`: MindSpore's settings. MindFormers drops every other key with a warning."""

    mode: Literal[0, 1, "GRAPH_MODE", "PYNATIVE_MODE"] = 0
    """0: graph mode, 1: PyNative mode. This package trains in graph mode."""

    device_target: Literal["Ascend", "CPU", "GPU"] = "Ascend"
    """Kind of device."""

    device_id: Count = 0
    """Device of a single-device run."""

    max_device_memory: Gigabytes | None = None
    """Device memory to use, as `"58GB"`. None: all. Ascend only."""

    mempool_block_size: Gigabytes | None = None
    """Growth of the memory pool, as `"56GB"`. Ascend only."""

    memory_optimize_level: Literal["O0", "O1"] | None = None
    """O0: fast, O1: saves memory."""

    max_call_depth: Positive = 10000
    """Largest nesting of calls in a graph."""

    save_graphs: bool | Literal[0, 1, 2, 3] = False
    """Write compiled graphs: False/0 no, up to 3 most detailed."""

    save_graphs_path: Text | None = None
    """Folder of the graphs."""

    jit_config: JitConfig | None = None
    """Graph compilation."""

    ascend_config: AscendConfig | None = None
    """Settings of Ascend devices."""

    dataset_broadcast_opt_level: Annotated[int, Range(0, 3)] | None = None
    """Which ranks read data themselves and which receive it."""

    affinity_config: dict[str, object] | None = None
    """Binding of threads to cores, per device."""

    affinity_cpu_list: dict[str, object] | None = None
    """Older form of `affinity_config`; a map, MindFormers ignores anything else."""

    jit_level: Literal["O0", "O1", "O2"] | None = None
    """Inference only; for training use `jit_config`."""

    infer_boost: Literal["on", "off"] | None = None
    """Inference only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """`parallel_config`: the parallel degrees.

    Devices = `data_parallel` x `model_parallel` x `context_parallel` x `pipeline_stage`.
    """

    data_parallel: Positive = 1
    """Copies of the model that see different data (dp). 1: none."""

    model_parallel: Positive = 1
    """Devices that share each matrix (tp). Divides heads, vocabulary and widths. 1: none."""

    pipeline_stage: Positive = 1
    """Pipeline stages (pp). 1: none. At most `micro_batch_num`."""

    expert_parallel: Positive = 1
    """Devices over which experts are spread (ep). Divides `n_routed_experts` and the devices of a
    stage. 1: every device holds all experts."""

    context_parallel: Positive = 1
    """Devices that share a sequence (cp). 1: none."""

    micro_batch_num: Positive = 1
    """Micro-batches per step through the pipeline. Without stages it has no effect: 1."""

    seq_split_num: Positive = 1
    """Parts of a sequence that go through the pipeline apart (seqpipe)."""

    use_seq_parallel: bool = False
    """Split activations between matrices along the sequence. Needs `model_parallel` > 1."""

    optimizer_shard: bool | None = None
    """Older switch; use `parallel.enable_parallel_optimizer`."""

    gradient_aggregation_group: Positive = 4
    """Gradients that are reduced in one call."""

    vocab_emb_dp: bool = True
    """Embedding by data parallelism only; the networks of MindFormers' core turn it off."""

    context_parallel_algo: Literal["colossalai_cp", "ulysses_cp", "hybrid_cp"] = "colossalai_cp"
    """How context parallelism exchanges keys and values."""

    ulysses_degree_in_cp: Positive = 1
    """Part of `context_parallel` that splits heads (hybrid)."""

    mem_coeff: Above0 = 0.1
    """Memory coefficient of automatic search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """`parallel.pipeline_config`: order of the pipeline."""

    pipeline_interleave: bool = False
    """More than one chunk per stage, and schedules other than 1f1b."""

    pipeline_scheduler: Literal[
        "1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"
    ] = "1f1b"
    """Order of forward and backward. `seqsmartvpp` needs an even number of stages,
    `zero_bubble_v` 2 chunks per stage; all but `1f1b` need `pipeline_interleave`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyCkptConfig:
    """`parallel.strategy_ckpt_config`: file of the layouts."""

    save_file: Text | None = None
    """File to write."""

    load_file: Text | None = None
    """File to read."""

    only_trainable_params: bool = True
    """Leave out parameters that are not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptimizerConfig:
    """`parallel.parallel_optimizer_config`: sharding of optimizer states."""

    gradient_accumulation_shard: bool = False
    """Shard accumulated gradients too."""

    parallel_optimizer_threshold: Count = 64
    """Smallest parameter that is sharded, in KB."""

    optimizer_weight_shard_size: Annotated[int, Range(-1)] | None = None
    """Devices over which one state is sharded. -1: all of `data_parallel`."""

    optimizer_level: Literal["level1", "level2", "level3"] | None = None
    """ZeRO level."""


@dataclass(frozen=True, kw_only=True, slots=True)
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

    loss_repeated_mean: bool | None = None
    """Divide a repeated loss by the number of repetitions."""

    enable_alltoall: bool = False
    """Redistribute by all-to-all; expert parallelism wants True."""

    full_batch: bool = True
    """Every device reads the whole batch. False: `dataset_strategy` says who reads what."""

    dataset_strategy: list[Annotated[list[Positive], Length(1)]] | Text | None = None
    """A list per column of `construct_args_key`: how many ways each axis is split. The first
    number is `data_parallel`."""

    search_mode: Literal["sharding_propagation", "dynamic_programming", "recursive_programming"] = (
        "sharding_propagation"
    )
    """How automatic parallelism searches."""

    enable_parallel_optimizer: bool = False
    """Shard optimizer states over data parallelism (ZeRO)."""

    parallel_optimizer_config: ParallelOptimizerConfig | None = None
    """Details of that."""

    pipeline_config: PipelineConfig | None = None
    """Order of the pipeline."""

    strategy_ckpt_config: StrategyCkptConfig | None = None
    """File of the layouts."""

    strategy_ckpt_save_file: Text | None = None
    """Older form of `strategy_ckpt_config.save_file`."""

    strategy_ckpt_load_file: Text | None = None
    """Older form of `strategy_ckpt_config.load_file`."""

    gradient_fp32_sync: bool | None = None
    """Reduce gradients in float32."""

    force_fp32_communication: bool | None = None
    """Communicate gradients in float32."""

    parameter_broadcast: bool | None = None
    """Send the parameters of device 0 to all before training."""

    pipeline_result_broadcast: bool | None = None
    """Send the last stage's result to all stages."""

    all_reduce_fusion_config: list[int] | None = None
    """Gradients per fused reduction."""

    comm_fusion: dict[str, object] | None = None
    """Fusion of communication by kind."""

    auto_pipeline: bool | None = None
    """Choose stages automatically; MindFormers refuses True."""

    dump_local_norm: bool | None = None
    """Write gradient norms."""

    dump_local_norm_path: Text | None = None
    """Folder of the norms."""

    dump_device_local_norm: bool | None = None
    """Write gradient norms per device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """`recompute_config`: what is computed again in the backward pass to save memory.

    A list has one number of layers per stage, or with interleaving a list of lists.
    """

    recompute: bool | list[Count | bool] | list[list[Count | bool]] = False
    """Whole layers: all, none, or how many of each stage."""

    select_recompute: bool | list[object] | dict[str, object] = False
    """Only some operators: default patterns, or patterns with the layers they hold for."""

    parallel_optimizer_comm_recompute: bool = False
    """Gather sharded weights again."""

    select_comm_recompute: bool | list[object] | dict[str, object] = False
    """Repeat only some communication."""

    mp_comm_recompute: bool = True
    """Repeat the communication of model parallelism."""

    recompute_slice_activation: bool = False
    """Slice what is kept; MindFormers' core refuses True."""

    select_recompute_exclude: bool | list[object] | dict[str, object] = False
    """Operators that are not recomputed."""

    select_comm_recompute_exclude: bool | list[object] | dict[str, object] = False
    """Communication that is not repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapConfig:
    """`swap_config`: activations kept in host memory."""

    swap: bool = False
    """Turn it on."""

    layer_swap: list[object] | dict[str, object] | None = None
    """Layers and how early they come back."""

    op_swap: list[object] | dict[str, object] | None = None
    """Operators and how early they come back."""

    default_prefetch: Positive = 1
    """How early activations come back, in layers."""

"""Sections about training: trainer, runner, data, wrapper."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from telechat_moe.recipe.fields import (
    Above0,
    Count,
    Length,
    Positive,
    Range,
    Text,
    instead_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """`trainer`: which of MindFormers' trainers runs."""

    type: Text = "CausalLanguageModelingTrainer"
    """Class of the trainer. `TelechatMoeTrainer` builds this package's model, `CausalLanguageModelingTrainer`
    MindFormers' own."""

    auto_register: Text | None = None
    """Module and class that MindFormers imports from its `--register_path` (`telechat-moe plugin-path`):
    `telechat_moe_plugin.TelechatMoeTrainer`."""

    model_name: Text | None = None
    """Name used in logs and file names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """`runner_config`: how long and in which batches."""

    epochs: Positive = 1
    """Passes over the samples that `train_dataset.data_loader.sizes` asks for."""

    batch_size: Positive = 1
    """Samples per device, micro-batch and step."""

    sink_mode: bool = True
    """Feed data through the device queue. Must be False on CPU."""

    sink_size: Annotated[int, Range(-1)] = 1
    """Steps per queue transfer. -1: a whole epoch."""

    gradient_accumulation_steps: Positive = 1
    """Batches whose gradients are added before an update. With pipeline stages
    `parallel_config.micro_batch_num` does this, and here stands 1."""

    num_classes: Positive | None = None
    """Classes, for classification tasks only."""

    stop_step: Count = 0
    """Stop after this step. 0: run to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptDatasetConfig:
    """`train_dataset.data_loader.config` of a Megatron data set (`.bin`/`.idx`)."""

    seq_length: Positive
    """Tokens per sample. Equals the model's `seq_length`."""

    data_path: list[Text] | None = None
    """Path prefixes of `.bin`/`.idx` files, each after its sampling weight: `['1', 'a/train']`.
    None: made-up data."""

    seed: Count = 1234
    """Seed of the sampling order."""

    split: Text | None = None
    """Shares of train, validation and test, `"1, 0, 0"`. MindFormers wants it with `data_path`."""

    eod: Annotated[int, Range(-1)] = -1
    """Id of the end-of-document token. -1: none."""

    pad: Annotated[int, Range(-1)] = -1
    """Id of the padding token. -1: none."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    reset_position_ids: bool = False
    """Positions start again at each document."""

    create_attention_mask: bool = True
    """Give a mask as column `attention_mask`. False: the model makes a causal mask."""

    reset_attention_mask: bool = False
    """Tokens do not see earlier documents. Needs `create_attention_mask` or
    `create_compressed_eod_mask`."""

    create_compressed_eod_mask: bool = False
    """Give document ends as column `actual_seq_len` instead of a mask."""

    eod_pad_length: Positive = field(default=128, metadata=instead_of("compressed_eod_mask_length"))
    """Most documents per sample for `create_compressed_eod_mask`."""

    train_data_path: list[Text] | None = None
    """Like `data_path`, for training only, without `split`."""

    valid_data_path: list[Text] | None = None
    """Like `data_path`, for validation only."""

    test_data_path: list[Text] | None = None
    """Like `data_path`, for testing only."""

    num_dataset_builder_threads: Positive = 1
    """Threads that build the sample index."""

    path_to_cache: Text | None = None
    """Folder of the sample index. None: beside the data."""

    mmap_bin_files: bool | None = None
    """Map `.bin` files into memory."""

    s3_cache_path: Text | None = None
    """Cache for data in S3."""

    drop_last_partial_validation_sequence: bool = True
    """Drop the last, shorter validation sample."""

    add_extra_token_to_sequence: bool = True
    """Read one token more, so that labels are full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLoader:
    """`train_dataset.data_loader`. Which keys are read depends on `type`."""

    type: Literal[
        "BlendedMegatronDatasetDataLoader", "HFDataLoader", "MindDataset", "TFRecordDataset"
    ] = "BlendedMegatronDatasetDataLoader"
    """Source of the data. This package trains from Megatron files; the others are MindFormers'."""

    datasets_type: Literal["GPTDataset"] | None = None
    """Megatron: kind of data set."""

    sizes: Annotated[list[Count], Length(3, 3)] | None = None
    """Megatron: samples for training, test and evaluation; MindFormers uses the first only."""

    config: GptDatasetConfig | None = None
    """Megatron: the data set."""

    column_names: list[Text] | None = None
    """Names of the columns that the source gives."""

    shuffle: bool | None = None
    """Shuffle again after the source's own order."""

    tokenizer: dict[str, object] | None = None
    """Tokenizer to build, with its arguments."""

    phase: Literal["train", "valid", "test"] | None = None
    """Megatron: which part."""

    load_func: Text | None = None
    """Hugging Face: function of `datasets` that loads."""

    path: Text | None = None
    """Hugging Face: name or folder of the data set."""

    name: Text | None = None
    """Hugging Face: name of the configuration."""

    data_dir: Text | None = None
    """Hugging Face: folder of the data."""

    data_files: Text | list[Text] | dict[str, object] | None = None
    """Hugging Face: files of the data."""

    split: Text | None = None
    """Hugging Face: part of the data set."""

    streaming: bool | None = None
    """Hugging Face: do not download everything first."""

    size: Positive | None = None
    """Hugging Face, streaming: samples."""

    dataset_state_dir: Text | None = None
    """Hugging Face, streaming: folder of the reading position."""

    save_step: Positive | None = None
    """Hugging Face, streaming: steps between saved positions."""

    create_attention_mask: bool | None = None
    """Hugging Face: give a mask."""

    create_compressed_eod_mask: bool | None = None
    """Hugging Face: give document ends instead of a mask."""

    compressed_eod_mask_length: Positive | None = None
    """Hugging Face: most documents per sample."""

    use_broadcast_data: bool | None = None
    """Hugging Face: read on one device and send to the others."""

    handler: list[dict[str, object]] | None = None
    """Hugging Face: processing steps, each with `type` and its arguments."""

    packing: Text | None = None
    """Hugging Face: how samples are packed."""

    dataset_dir: Text | None = None
    """MindRecord/TFRecord: folder."""

    dataset_files: Text | list[Text] | None = None
    """MindRecord/TFRecord: files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDataset:
    """`train_dataset` (and `eval_dataset`): source, columns and batching."""

    data_loader: DataLoader = field(default_factory=DataLoader)
    """The source."""

    input_columns: list[Text] | None = None
    """Columns in the order in which the source gives them."""

    output_columns: list[Text] | None = None
    """Columns after processing."""

    construct_args_key: list[Text] | None = None
    """Columns in the order of the network's arguments. The same names as `input_columns`."""

    num_parallel_workers: Positive = 8
    """Threads that read data."""

    python_multiprocessing: bool = False
    """Read in processes instead of threads."""

    drop_remainder: bool = True
    """Leave out a last, smaller batch. Must be True: graphs have fixed shapes."""

    repeat: Positive = 1
    """Passes over the data within an epoch."""

    numa_enable: bool = False
    """Bind readers to a NUMA node."""

    prefetch_size: Positive = 1
    """Batches that are read ahead."""

    seed: Count | None = None
    """Seed of the pipeline's own shuffling."""

    batch_size: Positive | None = None
    """Set by MindFormers from `runner_config`; equal if written."""

    micro_batch_num: Positive | None = None
    """Equals `parallel_config.micro_batch_num` if written."""

    eod_reset: bool | None = None
    """Reset positions and mask at document ends (old data sets)."""

    eod_token_id: Count | None = None
    """Id of the end-of-document token for `eod_reset`."""

    dynamic_batch: bool | None = None
    """Pad each batch to its longest sample."""

    divisor: Positive | None = None
    """Dynamic batch: lengths are multiples of this."""

    remainder: Count | None = None
    """Dynamic batch: plus this."""

    pad_token_id: int | list[int] | None = None
    """Dynamic batch: padding."""

    auto_tune: bool | None = None
    """Tune the pipeline while it runs."""

    autotune_per_step: Positive | None = None
    """Steps between tunings."""

    filepath_prefix: Text | None = None
    """File of the tuning result."""

    profile: bool | None = None
    """Profile the pipeline."""

    token_monitor: bool | None = None
    """Count the most frequent tokens."""

    token_monitor_config: dict[str, object] | None = None
    """Settings of the token monitor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetTask:
    """`train_dataset_task`: the class that makes batches of a data set."""

    type: Text
    """Class; language models use `CausalLanguageModelDataset`."""

    dataset_config: TrainDataset
    """The data set. Write it as an alias of `train_dataset`; MindFormers reads this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """`runner_wrapper.scale_sense` as a section: loss scaling that changes."""

    type: Literal[
        "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell", "AdaptiveLossScaleUpdateCell"
    ]
    """How the scale changes."""

    loss_scale_value: Above0 = 65536.0
    """First scale."""

    scale_factor: Positive | None = None
    """Factor of a change."""

    scale_window: Positive | None = None
    """Good steps before the scale rises."""

    min_loss_scale_value: Above0 | None = None
    """Adaptive: lower bound."""

    max_loss_scale_value: Above0 | None = None
    """Adaptive: upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerWrapper:
    """`runner_wrapper`: one training step."""

    type: Literal["MFTrainOneStepCell", "MFPipelineWithLossScaleCell"] = "MFTrainOneStepCell"
    """MindFormers' step cell; it picks the pipeline one itself when there are stages."""

    scale_sense: Above0 | LossScale = 1.0
    """Loss scale. 1.0 for float32 and bfloat16."""

    use_clip_grad: bool = True
    """Clip gradients by their global norm."""

    max_grad_norm: Above0 = 1.0
    """Largest global norm."""

    local_norm: bool | None = None
    """Log gradient norms per parameter."""

    calculate_per_token_loss: bool | None = None
    """Average the loss over tokens instead of samples."""

    global_norm_spike_threshold: Above0 | None = None
    """Norm above which a step counts as a spike."""

    use_skip_data_by_global_norm: bool | None = None
    """Skip batches whose norm is a spike."""

    print_separate_loss: bool | None = None
    """Log main, balance and MTP loss apart."""

"""Sections about training: trainer, runner, data, wrapper."""

from dataclasses import field
from typing import Annotated, Literal

from telechat_moe.recipe.fields import (
    Above0,
    Count,
    Length,
    Positive,
    Range,
    Seed,
    Text,
    decides,
    instead_of,
    only,
)
from telechat_moe.recipe.schema.table import section

OUR_LOADER = "TelechatDataLoader"


@section
class TrainerSection:
    """`trainer`: which of MindFormers' trainers runs."""

    type: Text = "CausalLanguageModelingTrainer"
    """Class of the trainer. `TelechatMoeTrainer` builds this package's model, `CausalLanguageModelingTrainer`
    MindFormers' own."""


@section
class RunnerConfig:
    """`runner_config`: how long and in which batches."""

    epochs: Positive = 1
    """Passes over the samples that `train_dataset.data_loader.sizes` asks for."""

    batch_size: Positive = field(default=1, metadata=decides("graph"))
    """Samples per device, micro-batch and step."""

    sink_mode: bool = True
    """Feed data through the device queue. Must be False on CPU."""

    sink_size: Annotated[int, Range(-1)] = 1
    """Steps per queue transfer. -1: a whole epoch."""

    gradient_accumulation_steps: Positive = field(default=1, metadata=decides("graph"))
    """Batches whose gradients are added before an update. With pipeline stages
    `parallel_config.micro_batch_num` does this, and here stands 1."""


@section
class GptDatasetConfig:
    """`train_dataset.data_loader.config` of a Megatron data set (`.bin`/`.idx`)."""

    seq_length: Positive = field(metadata=decides("graph", "data"))
    """Tokens per sample. Equals the model's `seq_length`."""

    data_path: list[Text] | None = field(default=None, metadata=decides("data"))
    """Path prefixes of `.bin`/`.idx` files, each after its sampling weight: `['1', 'a/train']`.
    None: made-up data."""

    seed: Seed = 1234
    """Seed of the sampling order."""

    split: Text | None = None
    """Shares of train, validation and test, `"1, 0, 0"`. MindFormers wants it with `data_path`."""

    eod: Annotated[int, Range(-1)] = field(default=-1, metadata=decides("data"))
    """Id of the end-of-document token. -1: none."""

    pad: Annotated[int, Range(-1)] = -1
    """Id of the padding token. -1: none."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    reset_position_ids: bool = False
    """Positions start again at each document."""

    create_attention_mask: bool = field(default=True, metadata=decides("graph"))
    """Give a mask as column `attention_mask`. False: the model makes a causal mask."""

    reset_attention_mask: bool = False
    """Tokens do not see earlier documents. Needs `create_attention_mask` or
    `create_compressed_eod_mask`."""

    create_compressed_eod_mask: bool = False
    """Give document ends as column `actual_seq_len` instead of a mask."""

    eod_pad_length: Positive = field(default=128, metadata=instead_of("compressed_eod_mask_length"))
    """Most documents per sample for `create_compressed_eod_mask`."""

    train_data_path: list[Text] | None = field(default=None, metadata=decides("data"))
    """Like `data_path`, for training only, without `split`."""

    add_extra_token_to_sequence: bool = True
    """Read one token more, so that labels are full."""


@section
class DataLoader:
    """`train_dataset.data_loader`. Which keys are read depends on `type`."""

    type: Literal[
        "BlendedMegatronDatasetDataLoader",
        "TelechatDataLoader",
        "HFDataLoader",
        "MindDataset",
        "TFRecordDataset",
    ] = "BlendedMegatronDatasetDataLoader"
    """Source of the data. This package trains from Megatron files, with either of the first two; `TelechatDataLoader` reads
    them in MindFormers' trainers as `telechat-moe train` does. The others are MindFormers'."""

    sizes: Annotated[list[Count], Length(3, 3)] | None = None
    """Megatron: samples for training, test and evaluation; MindFormers uses the first only."""

    config: GptDatasetConfig | None = None
    """Megatron: the data set."""


@section
class TrainDataset:
    """`train_dataset` (and `eval_dataset`): source, columns and batching."""

    data_loader: DataLoader = field(default_factory=DataLoader)
    """The source."""

    input_columns: list[Text] | None = None
    """Columns in the order in which the source gives them."""

    construct_args_key: list[Text] | None = None
    """Columns in the order of the network's arguments. The same names as `input_columns`."""

    drop_remainder: bool = True
    """Leave out a last, smaller batch. Must be True: graphs have fixed shapes."""

    batch_size: Positive | None = None
    """Set by MindFormers from `runner_config`; equal if written."""

    micro_batch_num: Positive | None = None
    """Equals `parallel_config.micro_batch_num` if written."""


@section
class DatasetTask:
    """`train_dataset_task`: the class that makes batches of a data set."""

    type: Text = field(metadata=only("CausalLanguageModelDataset"))
    """Class; language models use `CausalLanguageModelDataset`."""

    dataset_config: TrainDataset
    """The data set. Write it as an alias of `train_dataset`; MindFormers reads this one."""


@section
class RunnerWrapper:
    """`runner_wrapper`: one training step."""

    use_clip_grad: bool = True
    """Clip gradients by their global norm."""

    max_grad_norm: Above0 = 1.0
    """Largest global norm."""

    calculate_per_token_loss: bool | None = None
    """As the top-level key, which MindFormers puts over this one."""

    global_norm_spike_threshold: Above0 | None = None
    """Norm above which a step counts as a spike."""

    use_skip_data_by_global_norm: bool | None = None
    """Skip batches whose norm is a spike."""

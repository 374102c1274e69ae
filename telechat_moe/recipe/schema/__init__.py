"""What a recipe may say: `Recipe`, one frozen dataclass per section of the YAML file.

Attribute names are the keys of the file. Sections stand in `schema_model.py` (the model),
`schema_train.py` (runner, data), `schema_parallel.py` (devices),
`schema_optimizer.py`, `schema_callbacks.py` and `schema_own.py` (our own section).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from telechat_moe.recipe.fields import Count, Positive, Share, Text
from telechat_moe.recipe.problems import Problem, RecipeError
from telechat_moe.recipe.schema.callbacks import Callback, CheckpointMonitor, MonitorConfig
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.optimizer import GroupedLrSchedule, LrSchedule, Optimizer
from telechat_moe.recipe.schema.other import OtherModelConfig
from telechat_moe.recipe.schema.own import TelechatMoe
from telechat_moe.recipe.schema.parallel import (
    Context,
    Parallel,
    ParallelConfig,
    RecomputeConfig,
    SwapConfig,
)
from telechat_moe.recipe.schema.train import (
    DatasetTask,
    RunnerConfig,
    RunnerWrapper,
    TrainDataset,
    Trainer,
)
from telechat_moe.recipe.values import plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """`model`: the network."""

    model_config: ModelConfig | OtherModelConfig
    """Its dimensions and settings; which keys are known depends on `model_type`."""

    arch: dict[str, object] | None = None
    """Network class of old recipes (`use_legacy: True`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One training recipe: the whole YAML file."""

    seed: Count = 1
    """Seed of initialisation and data."""

    output_dir: Text = "./output"
    """Folder of everything that a run writes."""

    run_mode: Literal["train", "finetune", "predict", "eval", "predict_with_train_model"]
    """What MindFormers does with the recipe."""

    use_legacy: Literal[False] = field(default=False, metadata={"written": True})
    """MindFormers' old networks. Must be False, and written: MindFormers' default is True."""

    use_parallel: bool = False
    """Run on more than one device."""

    load_checkpoint: str = ""
    """Checkpoint to start from. Empty: none."""

    load_ckpt_format: Literal["ckpt", "safetensors"] = "ckpt"
    """Format of that checkpoint."""

    resume_training: bool | Text = False
    """Go on with the step and optimizer of `load_checkpoint`; a text names the checkpoint."""

    auto_trans_ckpt: bool = False
    """Convert a checkpoint to this recipe's layout while loading."""

    transform_process_num: Positive = 1
    """Processes that convert."""

    src_strategy_path_or_dir: str = ""
    """Layout files of the checkpoint."""

    only_save_strategy: bool = False
    """Write the layout file and stop."""

    load_ckpt_async: bool = False
    """Load while compiling."""

    use_legacy_format: bool = True
    """Old checkpoint layout of MindFormers."""

    remove_redundancy: bool = False
    """The checkpoint to load has each parameter once only."""

    balanced_load: bool = False
    """Spread reading of a checkpoint over devices."""

    reshard_worker_num: Positive = 1
    """Processes that reshard."""

    pretrained_model_dir: str = ""
    """Hugging Face folder that gives dimensions and weights. Empty: none."""

    print_separate_loss: bool = True
    """Log main, balance and MTP loss apart."""

    use_skip_data_by_global_norm: bool = False
    """Skip the update of steps whose gradient norm is not below
    `monitor_config.global_norm_spike_threshold` (1.0 without that section). `telechat_moe.loss_guard` has
    thresholds that follow the run."""

    train_precision_sync: bool | None = None
    """Deterministic training on Ascend. None: as the environment says."""

    infer_precision_sync: bool | None = None
    """Deterministic inference on Ascend."""

    do_eval: bool = False
    """Evaluate while training (MindFormers)."""

    eval_step_interval: int = 100
    """Steps between evaluations."""

    eval_epoch_interval: int = -1
    """Epochs between evaluations. -1: by steps."""

    ignore_data_skip: bool = False
    """Resume at the beginning of the data."""

    data_skip_steps: Count | None = None
    """Steps of data to skip."""

    micro_batch_interleave_num: Positive = 1
    """Copies of the network that overlap communication; the new networks allow 1 only."""

    exclude_cann_cpu: bool = False
    """Keep some cores free for CANN."""

    postprocess_use_numpy: bool = False
    """Post-processing of inference in NumPy."""

    use_graceful_exit: bool = False
    """Save and stop when a signal file says so."""

    profile: bool = False
    """Profile steps."""

    profile_start_step: Positive = 1
    """First profiled step."""

    profile_stop_step: Positive = 10
    """Last profiled step."""

    profile_communication: bool = False
    """Record communication."""

    profile_memory: bool = True
    """Record memory."""

    profile_rank_ids: list[Count] | None = None
    """Ranks to profile. None: all."""

    profile_pipeline: bool = False
    """Profile one rank of each stage."""

    profile_level: Literal[0, 1, 2] = 1
    """Detail."""

    profiler_level: Literal[0, 1, 2] | None = None
    """Detail; the name that MindFormers' trainer reads."""

    init_start_profile: bool = False
    """Profile from the start of the process."""

    mstx: bool = False
    """Record markers."""

    layer_scale: bool = False
    """Learning rate per layer."""

    layer_decay: Share = 0.65
    """Its decay."""

    lr_scale: bool = False
    """Scale the learning rate with the batch."""

    lr_scale_factor: Positive = 256
    """Batch for which the learning rate is meant."""

    remote_save_url: Text | None = None
    """Remote folder for results."""

    save_file: Text | None = None
    """File of predictions."""

    input_data: Text | list[Text] | None = None
    """Texts to predict from."""

    predict_batch_size: Positive | None = None
    """Texts per batch."""

    adapter_id: Text | None = None
    """LoRA adapter."""

    trainer: Trainer = field(default_factory=Trainer)
    """MindFormers' trainer."""

    runner_config: RunnerConfig = field(default_factory=RunnerConfig)
    """Epochs and batches."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """Update rule."""

    lr_schedule: LrSchedule | None = None
    """Learning rate. None only with `grouped_lr_schedule`, or without training."""

    grouped_lr_schedule: GroupedLrSchedule | None = None
    """Learning rates per group of parameters."""

    train_dataset: TrainDataset = field(default_factory=TrainDataset)
    """Training data."""

    train_dataset_task: DatasetTask | None = None
    """Class that makes batches of it."""

    eval_dataset: TrainDataset | None = None
    """Evaluation data (MindFormers)."""

    eval_dataset_task: DatasetTask | None = None
    """Class that makes batches of it."""

    context: Context = field(default_factory=Context)
    """MindSpore's settings."""

    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallel degrees."""

    parallel: Parallel = field(default_factory=Parallel)
    """Automatic parallelism."""

    recompute_config: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Recomputation."""

    swap_config: SwapConfig = field(default_factory=SwapConfig)
    """Activations in host memory."""

    model: Model
    """The network."""

    moe_config: dict[str, object] | None = None
    """Experts of old recipes; MindFormers drops it with `use_legacy: False`."""

    callbacks: list[Callback] = field(default_factory=list[Callback])
    """What happens besides training."""

    eval_callbacks: list[Callback] | None = None
    """What happens besides evaluation."""

    runner_wrapper: RunnerWrapper = field(default_factory=RunnerWrapper)
    """One training step."""

    monitor_config: MonitorConfig | None = None
    """MindFormers' training monitor."""

    processor: dict[str, object] | None = None
    """Tokenizer of inference."""

    metric: dict[str, object] | list[dict[str, object]] | None = None
    """Metric of evaluation."""

    telechat_moe: TelechatMoe = field(default_factory=TelechatMoe, metadata={"own": True})
    """Settings of this package."""

    source: Path = field(default=Path(), metadata={"hidden": True})
    """File that the recipe was read from."""

    given: dict[str, Any] = field(
        default_factory=dict[str, Any], metadata={"hidden": True}, repr=False, compare=False
    )
    """What was written, aliases and overrides applied."""

    @property
    def model_config(self) -> ModelConfig:
        """The model section, if this package can build the model.

        Raises:
            RecipeError: If it is another model type, or a Hugging Face folder has its dimensions.
        """
        config = self.model.model_config
        if isinstance(config, ModelConfig):
            return config
        key, found = "model.model_config.model_type", str(config.model_type)
        expected = "this package trains telechat3_moe and deepseek_v3"
        if self.pretrained_model_dir:
            key, found = "pretrained_model_dir", f"no config.json in {self.pretrained_model_dir}"
            expected = "the folder that has the model's dimensions"
        raise RecipeError(
            [Problem(file=str(self.source), line=0, key=key, found=found, expected=expected)]
        )

    @property
    def devices(self) -> int:
        """Devices that the parallel degrees need."""
        if not self.use_parallel:
            return 1
        p = self.parallel_config
        return p.data_parallel * p.model_parallel * p.context_parallel * p.pipeline_stage

    @property
    def global_batch(self) -> int:
        """Samples per update, over all devices and micro-batches."""
        p, r = self.parallel_config, self.runner_config
        pieces = p.micro_batch_num if p.pipeline_stage > 1 else r.gradient_accumulation_steps
        copies = p.data_parallel if self.use_parallel else 1
        return r.batch_size * copies * pieces * self.micro_batch_interleave_num

    @property
    def train_steps(self) -> int:
        """Updates in the whole run; 0 if the recipe does not say how many samples there are."""
        sizes = self.train_dataset.data_loader.sizes
        if not sizes:
            return 0
        return sizes[0] // self.global_batch * self.runner_config.epochs

    @property
    def checkpoints(self) -> CheckpointMonitor | None:
        """The callback that says how often to save; None: never."""
        return next((c for c in self.callbacks if isinstance(c, CheckpointMonitor)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data, writable as YAML that MindFormers reads.

        Sections that the file has are written out in full, defaults included; other sections are
        left out.
        """
        return plain(self, self.given)

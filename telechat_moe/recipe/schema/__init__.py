"""What a recipe may say: `Recipe`, one frozen dataclass per section of the YAML file.

Attribute names are the keys of the file; the docstring under an attribute is its line in `docs/recipes.md`. Keys that
code of this package reads are fields here: `model.py` (the model), `train.py` (runner, data), `parallel.py` (devices),
`optimizer.py`, `callbacks.py` and `own.py` (our own section). Keys that only MindFormers reads are lines of
`mindformers_keys.txt`, which `table.py` puts between them.
"""

from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.recipe.fields import ONLY_DEFAULT, Positive, Seed, Text, decides
from telechat_moe.recipe.problems import Problem, RecipeError, label
from telechat_moe.recipe.schema.callbacks import Callback, CheckpointMonitor, MonitorConfig
from telechat_moe.recipe.schema.model import ModelConfig, OtherModelConfig
from telechat_moe.recipe.schema.optimizer import GroupedLrSchedule, LrSchedule, Optimizer
from telechat_moe.recipe.schema.own import TelechatMoe
from telechat_moe.recipe.schema.parallel import (
    Context,
    Parallel,
    ParallelConfig,
    RecomputeConfig,
    SwapConfig,
)
from telechat_moe.recipe.schema.table import section
from telechat_moe.recipe.schema.train import (
    DatasetTask,
    RunnerConfig,
    RunnerWrapper,
    TrainDataset,
    TrainerSection,
)
from telechat_moe.recipe.tree import YamlEntry, locate
from telechat_moe.recipe.values import plain

Broken = tuple[str, str, str]
"""Key, what was found there and what is expected: what a rule across sections yields."""


@section
class ModelSection:
    """`model`: the network."""

    model_config: ModelConfig | OtherModelConfig = field(
        metadata=decides("graph", "plugin", "weights")
    )
    """Its dimensions and settings; which keys are known depends on `model_type`."""

    arch: dict[str, object] | None = field(default=None, metadata=ONLY_DEFAULT)
    """Network class of old recipes (`use_legacy: True`)."""


@section
class Recipe:
    """One training recipe: the whole YAML file."""

    seed: Seed = field(default=1, metadata=decides("data"))
    """Seed of initialisation and data."""

    output_dir: Text = "./output"
    """Folder of everything that a run writes."""

    run_mode: Literal["train", "finetune", "predict", "eval", "predict_with_train_model"]
    """What MindFormers does with the recipe."""

    use_legacy: Literal[False] = field(default=False, metadata={"written": True})
    """MindFormers' old networks. Must be False, and written: MindFormers' default is True."""

    use_parallel: bool = field(default=False, metadata=decides("graph"))
    """Run on more than one device."""

    load_checkpoint: str = ""
    """What to start from: weights, a checkpoint, or a Hugging Face folder. Empty: none."""

    resume_training: bool | Text = False
    """Go on with the step, optimizer and data of `load_checkpoint`, or of the run in `output_dir` where that is
    empty; a text names the checkpoint."""

    pretrained_model_dir: str = field(default="", metadata=decides("graph", "weights"))
    """Hugging Face folder that gives dimensions and, without `load_checkpoint`, weights. Empty: none."""

    use_skip_data_by_global_norm: bool = False
    """Skip the update of steps whose gradient norm is not below
    `monitor_config.global_norm_spike_threshold` (3.0 without that section). `telechat_moe.loss_guard` has
    thresholds that follow the run."""

    calculate_per_token_loss: bool = field(default=False, metadata=decides("graph", "plugin"))
    """Average the loss of MindFormers' own networks over tokens instead of samples. MindFormers puts it over the keys of
    this name in all sections; our model has its own in `model.model_config`."""

    do_eval: bool = False
    """Evaluate while training (MindFormers)."""

    micro_batch_interleave_num: Positive = field(default=1, metadata=decides("graph"))
    """Copies of the network that overlap communication; the new networks allow 1 only."""

    profile: bool = False
    """Profile steps."""

    profile_start_step: Positive = 1
    """First profiled step."""

    profile_stop_step: Positive = 10
    """Last profiled step."""

    trainer: TrainerSection = field(default_factory=TrainerSection)
    """MindFormers' trainer."""

    runner_config: RunnerConfig = field(default_factory=RunnerConfig)
    """Epochs and batches."""

    optimizer: Optimizer = field(default_factory=Optimizer, metadata=decides("graph"))
    """Update rule."""

    lr_schedule: LrSchedule | None = None
    """Learning rate. None only with `grouped_lr_schedule`, or without training."""

    grouped_lr_schedule: GroupedLrSchedule | None = None
    """Learning rates per group of parameters."""

    train_dataset: TrainDataset = field(default_factory=TrainDataset)
    """Training data."""

    train_dataset_task: DatasetTask | None = field(default=None, metadata=decides(inside=False))
    """Class that makes batches of it."""

    eval_dataset: TrainDataset | None = field(default=None, metadata=decides(inside=False))
    """Evaluation data (MindFormers)."""

    eval_dataset_task: DatasetTask | None = field(default=None, metadata=decides(inside=False))
    """Class that makes batches of it."""

    context: Context = field(default_factory=Context)
    """MindSpore's settings."""

    parallel_config: ParallelConfig = field(
        default_factory=ParallelConfig, metadata=decides("graph")
    )
    """Parallel degrees."""

    parallel: Parallel = field(default_factory=Parallel, metadata=decides("graph"))
    """Automatic parallelism."""

    recompute_config: RecomputeConfig = field(
        default_factory=RecomputeConfig, metadata=decides("graph", "plugin")
    )
    """Recomputation."""

    swap_config: SwapConfig = field(default_factory=SwapConfig, metadata=decides("graph", "plugin"))
    """Activations in host memory."""

    model: ModelSection = field(metadata=decides("graph", "plugin"))
    """The network."""

    moe_config: dict[str, object] | None = None
    """Experts of old recipes; MindFormers drops it with `use_legacy: False`."""

    callbacks: list[Callback] = field(default_factory=list[Callback])
    """What happens besides training."""

    runner_wrapper: RunnerWrapper = field(default_factory=RunnerWrapper, metadata=decides("graph"))
    """One training step."""

    monitor_config: MonitorConfig | None = None
    """MindFormers' training monitor."""

    telechat_moe: TelechatMoe = field(default_factory=TelechatMoe, metadata={"own": True})
    """Settings of this package."""

    source: Path = field(default=Path(), metadata={"hidden": True})
    """File that the recipe was read from."""

    given: dict[str, Any] = field(
        default_factory=dict[str, Any], metadata={"hidden": True}, repr=False, compare=False
    )
    """What was written, aliases and overrides applied."""

    tree: YamlEntry | None = field(
        default=None, metadata={"hidden": True}, repr=False, compare=False
    )
    """The same with the line of every key."""

    def problem(self, key: str, found: str, expected: str, suggestion: str = "") -> Problem:
        """Return what is wrong with a key, at its line or that of the nearest section above it."""
        entry = locate(self.tree, key) if self.tree is not None else None
        origin, line = (entry.node.origin, entry.line) if entry is not None else ("", 0)
        place = (origin or label(self.source), 0 if origin else line)
        return Problem(*place, key, found, expected, suggestion)

    @property
    def model_config(self) -> ModelConfig:
        """The model section, if this package can build the model.

        Raises:
            RecipeError: If it is another model type, or a Hugging Face folder has its dimensions.
        """
        config = self.model.model_config
        if isinstance(config, ModelConfig):
            return config
        key, kind = "model.model_config.model_type", str(config.model_type)
        expected = "this package trains telechat3_moe and deepseek_v3"
        if self.pretrained_model_dir:
            key, kind = "pretrained_model_dir", f"no config.json in {self.pretrained_model_dir}"
            expected = "the folder that has the model's dimensions"
        raise RecipeError([self.problem(key, kind, expected)])

    @property
    def trains(self) -> bool:
        """Whether the recipe is for training."""
        return self.run_mode in ("train", "finetune")

    @property
    def devices(self) -> int:
        """Devices that the parallel degrees need."""
        if not self.use_parallel:
            return 1
        p = self.parallel_config
        return p.data_parallel * p.model_parallel * p.context_parallel * p.pipeline_stage

    @property
    def stages(self) -> int:
        """Stages of the pipeline; 1: there is none."""
        return self.parallel_config.pipeline_stage if self.use_parallel else 1

    @property
    def degrees_text(self) -> str:
        """The parallel degrees in words."""
        p = self.parallel_config
        return (
            f"use_parallel {self.use_parallel}, data {p.data_parallel} x tensor {p.model_parallel} x context "
            f"{p.context_parallel} x pipeline {p.pipeline_stage}"
        )

    @property
    def global_batch(self) -> int:
        """Samples per update, over all devices and micro-batches; with a batch schedule its largest."""
        return self.micro_batch_samples * self.micro_batches * self.micro_batch_interleave_num

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step: of the pipeline, or without one of gradient accumulation."""
        p, r = self.parallel_config, self.runner_config
        return p.micro_batch_num if p.pipeline_stage > 1 else r.gradient_accumulation_steps

    @property
    def micro_batch_samples(self) -> int:
        """Samples of a micro-batch, over all data-parallel copies."""
        copies = self.parallel_config.data_parallel if self.use_parallel else 1
        return self.runner_config.batch_size * copies

    @property
    def train_steps(self) -> int:
        """Updates in a run from its beginning; 0 if the recipe does not say how many samples there are."""
        return self.batches.total(self.epoch_samples, self.runner_config.epochs)

    @property
    def epoch_samples(self) -> int:
        """Samples of a pass over the data."""
        return (self.train_dataset.data_loader.sizes or [0])[0]

    @property
    def batches(self) -> BatchSchedule:
        """The samples of each step; with a schedule whose text is wrong, as a rule says, its largest."""
        text = self.telechat_moe.step_batch_size_schedule
        length = self.model.model_config.seq_length
        if text and length:
            with suppress(ValueError):
                grows = BatchSchedule.parse(text, length)
                return replace(grows, unit=self.micro_batch_samples)
        return BatchSchedule(((0, self.global_batch),), self.global_batch)

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

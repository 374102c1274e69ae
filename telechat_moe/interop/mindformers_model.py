"""Our model in MindFormers' trainer: configuration, model and trainer, registered under their names.

A recipe names the trainer (``trainer.type: TelechatMoeTrainer``); it builds our model instead of MindFormers' class for
``model.model_config``, puts our callbacks among MindFormers' (:mod:`telechat_moe.interop.mindformers_callbacks`), and leaves
everything else (data, optimizer, schedule, step, checkpoints) to MindFormers. Imported by
``mindformers_plugin/telechat_moe_plugin.py``; needs MindFormers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.models.configuration_utils import PretrainedConfig
from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.parallel_core.transformer_config import MLATransformerConfig
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer import CausalLanguageModelingTrainer
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from mindspore.train import Callback

from telechat_moe.data.recipe import sources_of
from telechat_moe.errors import BadInputError
from telechat_moe.interop import mindformers_bridges as bridges
from telechat_moe.interop.mindformers_callbacks import TrainingHooks
from telechat_moe.interop.mindformers_config import check_launch, recipe_of
from telechat_moe.interop.mindformers_loader import TelechatDataLoader, TelechatDecayLR
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.dispatch import CapacityDispatch
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.ops.custom import reason
from telechat_moe.ops.rewrite import fuse_cells
from telechat_moe.recipe import Recipe, RecipeError
from telechat_moe.recipe.rules.data import MEGATRON
from telechat_moe.recipe.rules.mindformers import reads_data
from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.sharding.cells.collective import SumOverProcesses
from telechat_moe.train.preflight import Preflight, index_builder
from telechat_moe.train.rank_graph import placed_model
from telechat_moe.train.step import update_rules
from telechat_moe.train.token_weights import MeanOverProcesses


@MindFormerRegister.register(
    MindFormerModuleType.CONFIG, legacy=False, search_names=["telechat_moe"]
)
class TelechatMoeConfig(PretrainedConfig):
    """Model section as MindFormers holds it, and the whole recipe, from which the model is built.

    Args:
        recipe: Put in by :class:`TelechatMoeTrainer`.
    """

    model_type = "telechat_moe"

    def __init__(self, recipe: Recipe | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe = recipe


@MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)
class TelechatMoeForCausalLM(PreTrainedModel):
    """:class:`telechat_moe.model.CausalLM` with what MindFormers asks of a model; parameters keep our names."""

    config_class = TelechatMoeConfig
    base_model_prefix = "telechat_moe"

    def __init__(self, config: TelechatMoeConfig) -> None:
        super().__init__(config, auto_prefix=False)
        if config.recipe is None:
            raise ValueError(
                "TelechatMoeForCausalLM is built by TelechatMoeTrainer from the whole recipe; write trainer.type: "
                "TelechatMoeTrainer and leave model_type and architectures as they are in the shipped recipes"
            )
        self.recipe: Recipe = config.recipe
        self.transformer_config = transformer_config(self.recipe)
        self.mean: MeanOverProcesses | None = None
        self._build(self.recipe)
        self.cast, self.zero = ops.Cast(), Tensor([0.0], ms.float32)
        _, self.bias_rate = update_rules(self.recipe)
        self.sum = SumOverProcesses() if self.recipe.devices > 1 else None
        if self.sum is not None:
            self.sum.add_flags(skip_auto_parallel_compile=True)
        self.applied = True
        self.step_counts: tuple[np.ndarray, np.ndarray] | None = None
        """Where TrainingHooks call :meth:`take_loads`, what it returned for the last step; ``applied``: whether that changed the weights."""

    def _build(self, recipe: Recipe) -> None:
        settings, target = recipe.telechat_moe, recipe.context.device_target
        backends = settings.operators
        with select.using(backends.default, backends.backends(), target, backends.host):
            if is_split(recipe):
                rank = ms.get_auto_parallel_context("global_rank")
                shared = recipe.micro_batches > 1
                # MindFormers' loaders, which serve the data here, mark no sources.
                placed = placed_model(recipe, rank, target, shared_graph=shared, sources=1)
                self.model, routers = placed.model, placed.routers
                if shared:  # MindSpore's lazy_inline: micro-batches call one graph
                    self.cell_init_args = f"lazy_inline_{type(self).__name__}"
                held_here = [placed.placement.is_here(router.weight) for router in routers]
            else:
                sizes = (settings.moe_block_rows, settings.moe_capacity_tokens)
                sources = len(sources_of(recipe)) if reads_data(recipe) else 1
                config = recipe.model_config
                if recipe.devices > 1:  # MindFormers averages the processes, whatever their tokens
                    config = replace(config, calculate_per_token_loss=True)
                    self.mean = MeanOverProcesses(config, recipe.devices)
                self.model = CausalLM(config, *sizes, sources=sources)
                routers = [c for _, c in self.model.cells_and_names() if isinstance(c, Router)]
                held_here = [True] * len(routers)
                if backends.fuse_plain:
                    fuse_cells(self.model)
        # A tuple, not a CellList: some belong to other stages.
        pairs = zip(routers, held_here, strict=True)
        self.routers = tuple(r if is_here else None for r, is_here in pairs)
        cells = () if is_split(recipe) else self.model.cells_and_names()
        self.source_sums: Parameter | None = None
        if sources := getattr(self.model, "sources", 0):
            zeros = Tensor(np.zeros(2 * sources, np.float32))
            self.source_sums = Parameter(zeros, name="source_sums", requires_grad=False)
        self.droppers = tuple(cell for _, cell in cells if isinstance(cell, CapacityDispatch))
        by_step = any(router.balance.by_step for router in routers)
        self.needs_loads = by_step or update_rules(recipe)[1] > 0
        """Whether what routers count must be cleared after each step."""

    def initialize(self, seed: int) -> None:
        """Fill in the initial weights: where nothing is split, those of ``telechat-moe train``.

        MindSpore draws the shards of split weights itself, each device its own, so that no device needs a whole one.
        """
        if not is_split(self.recipe):
            initialize(self.model, seed)
            return
        for parameter in self.model.trainable_params():
            std = getattr(parameter, "init_std", None)
            if std is not None:
                parameter.set_data(initializer(Normal(std), parameter.shape, parameter.dtype))

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return next-token, MTP, balance and (none) indexer loss, each ``(1,)``; MindFormers adds them up."""
        keep = self.cast(loss_mask, ms.float32)  # data loaders of MindFormers give int32
        if attention_mask is not None:
            attention_mask = self.cast(attention_mask, ms.uint8)
        outputs = self.model(input_ids, labels, keep, position_ids, attention_mask)
        lm, mtp, aux = outputs[:3]
        if self.mean is not None:
            lm, mtp = self.mean(lm, mtp, keep)
        if self.source_sums is not None:
            lm = ops.depend(lm, ops.assign(self.source_sums, outputs[3]))
        return lm, mtp, aux, self.zero

    def by_source(self) -> np.ndarray | None:
        """Return the last step's sums of loss and of tokens of each source, over all processes, ``[2, Z]``; None: there is one source."""
        if self.source_sums is None:
            return None
        sums = Tensor(self.source_sums.asnumpy().copy())
        return (sums if self.sum is None else self.sum(sums)).asnumpy().reshape(2, -1)

    def take_loads(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what the steps since the last call counted, over all processes, and clear it.

        Returns:
            Tokens of each expert of each MoE layer, ``[L, E]`` (without experts ``[1]``), and pairs dropped, ``[1]``.
        """
        shape = (len(self.routers), self.recipe.model_config.n_routed_experts)
        load_LE = np.zeros(shape if self.routers else (1,), np.float32)
        for i, router in enumerate(self.routers):
            if router is not None:
                load_LE[i] = router.expert_load.asnumpy()
        dropped = sum((d.dropped.asnumpy() for d in self.droppers), np.zeros(1, np.float32))
        counters = [router.expert_load for router in self.routers if router is not None]
        for counter in (*counters, *(d.dropped for d in self.droppers)):
            # set_data would not reach a graph that has run
            ops.assign(counter, ops.zeros_like(counter))
        if self.sum is not None and self.routers:
            total = self.sum(Tensor(np.append(load_LE.reshape(-1), dropped))).asnumpy()
            load_LE, dropped = total[:-1].reshape(load_LE.shape), total[-1:]
        return load_LE, dropped

    def update_topk_bias(self, gradient_accumulation_steps: int = 1) -> list[tuple[str, Tensor]]:
        """Move the expert biases by the loads of a step that was applied; ``TopkBiasBalanceCallback`` calls it after each.

        The rule is that of :class:`telechat_moe.model.balance.BiasUpdate`.

        Returns:
            Name of each router and the tokens that each of its experts got, over all processes.
        """
        del gradient_accumulation_steps  # the bias moves by the sign of mean minus load
        if not (self.bias_rate and self.routers):
            return []
        load_LE, _ = self.step_counts or self.take_loads()
        for router, load in zip(self.routers, load_LE, strict=True):
            if router is not None and self.applied:
                move = np.sign(load.mean() - load) * np.float32(self.bias_rate)
                router.expert_bias.set_data(Tensor(router.expert_bias.asnumpy() + move))
        return [(f"router.{i}", Tensor(load)) for i, load in enumerate(load_LE)]

    def is_moe_model(self) -> bool:
        """Return whether there are experts."""
        return self.recipe.model_config.num_moe_layers > 0

    def is_mtp_model(self) -> bool:
        """Return whether there is a multi-token-prediction loss."""
        return self.recipe.model_config.num_nextn_predict_layers > 0

    def get_gpt_transformer_config(self) -> MLATransformerConfig:
        """Return what MindFormers' monitors read of the model's dimensions."""
        return self.transformer_config

    def get_model_parameters(self, only_trainable: bool = True) -> list[Parameter]:
        """Return the parameters of this rank."""
        return list(self.trainable_params() if only_trainable else self.get_parameters())

    @classmethod
    def can_generate(cls) -> bool:
        """Return False: this class is for training."""
        return False


def transformer_config(recipe: Recipe) -> MLATransformerConfig:
    """Return the dimensions of a recipe in MindFormers' class; its monitors compute FLOPs and means from it."""
    m = recipe.model_config
    pattern = [int(i >= m.first_k_dense_replace) for i in range(m.num_hidden_layers)]
    experts: dict[str, Any] = {}
    if m.num_moe_layers:
        experts = {
            "num_moe_experts": m.n_routed_experts,
            "moe_router_topk": m.num_experts_per_tok,
            "moe_ffn_hidden_size": m.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": m.shared_width or None,
            "moe_router_enable_expert_bias": m.moe_router_enable_expert_bias,
            "moe_router_score_function": "sigmoid",
            "moe_router_bias_update_rate": m.moe_router_bias_update_rate,
        }
    config = MLATransformerConfig(
        multi_latent_attention=True,
        num_layers=m.num_hidden_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.intermediate_size,
        num_attention_heads=m.num_attention_heads,
        vocab_size=m.vocab_size,
        seq_length=m.seq_length,
        moe_layer_freq=pattern,
        moe_aux_loss_coeff=m.moe_aux_loss_coeff or 0.0,
        q_lora_rank=m.q_lora_rank,
        kv_lora_rank=m.kv_lora_rank,
        qk_head_dim=m.qk_nope_head_dim,
        qk_pos_emb_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim,
        add_bias_linear=False,
        gated_linear_unit=True,
        hidden_act="silu",
        **experts,
    )
    config.mtp_num_layers = m.num_nextn_predict_layers  # it is built for one at most
    return config


@MindFormerRegister.register(MindFormerModuleType.TRAINER)
class TelechatMoeTrainer(CausalLanguageModelingTrainer):
    """MindFormers' trainer with our model."""

    def __init__(self, model_name: str | None = None) -> None:
        super().__init__(model_name)
        self.recipe: Recipe | None = None
        self.model: TelechatMoeForCausalLM | None = None

    def sort_callbacks(self, default_callbacks: Sequence[Callback]) -> list[Callback]:
        """Return MindFormers' callbacks in their order, and ours between them."""
        callbacks = super().sort_callbacks(default_callbacks)
        if self.recipe is None or self.model is None:
            return callbacks
        begun = self.config.runner_config.initial_step
        hooks = TrainingHooks(self.recipe, self.model, begun, is_split(self.recipe))
        return hooks.among(callbacks)

    def train(self, config: Any = None, **kwargs: Any) -> None:
        """Train; see ``CausalLanguageModelingTrainer.train``.

        Raises:
            RecipeError: The recipe has problems; all are listed.
            BadInputError: MindFormers would silently train something else; see ``check_launch``.
        """
        self.recipe = recipe_of(config)
        check_launch(self.recipe, config.device_num)
        checks = Preflight(self.recipe)
        checks.validation()
        checks.tokenizer()
        if problems := [*checks.problems, *index_builder(self.recipe)]:
            raise RecipeError(problems)
        bridges.install(config, self.recipe)
        try:
            super().train(config=config, **kwargs)
        except RuntimeError as error:
            if text := reason(error):
                raise BadInputError(text) from error
            raise

    def _train_dataset_preprocess(self, config: Any) -> Any:
        """Let MindFormers do with the columns of our loader, and with who reads them, what it does with Megatron's."""
        assert self.recipe is not None
        for key in ("input_columns", "construct_args_key"):
            if config.train_dataset.get(key) is None:  # which MindFormers takes for a list
                config.train_dataset.pop(key, None)
        if reads_data(self.recipe):
            config.train_dataset.data_loader.type = MEGATRON
        return super()._train_dataset_preprocess(config)

    def create_train_dataset(self, default_args: dict[str, Any] | None = None) -> Any:
        """Make the data set, of our loader where the recipe asks for what only that does."""
        assert self.recipe is not None
        if reads_data(self.recipe):
            self.config.train_dataset.data_loader.type = TelechatDataLoader.__name__
        return super().create_train_dataset(default_args)

    def create_lr_scheduler(self, lr_config: Any, *args: Any) -> Any:
        """Make the schedule, of our type where the recipe asks for a decay that only that has."""
        assert self.recipe is not None
        if self.recipe.telechat_moe.lr_wsd_decay_style is not None:
            lr_config.type = TelechatDecayLR.__name__
        elif lr_config and lr_config.total_steps in (None, -1):  # also where the data end earlier
            lr_config.total_steps = self.recipe.train_steps
        return super().create_lr_scheduler(lr_config, *args)

    def create_network(self, default_args: dict[str, Any] | None = None) -> nn.Cell:
        """Build our model by MindFormers' registry, and fill in its initial weights."""
        assert self.recipe is not None
        section = self.config.model.model_config
        section.model_type, section.architectures = "telechat_moe", ["TelechatMoeForCausalLM"]
        section.recipe = self.recipe
        network = self.model = super().create_network(default_args)
        del section["recipe"]
        if not (self.config.checkpoint and self.config.checkpoint.load_path):
            network.initialize(self.recipe.seed)
        return network


def is_split(recipe: Recipe) -> bool:
    """Return whether MindSpore splits the model over devices (semi-automatic parallelism)."""
    return recipe.use_parallel and recipe.parallel.parallel_mode in PARALLEL_MODES

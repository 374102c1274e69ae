"""Our model in MindFormers' trainer: configuration, model and trainer, registered under their names.

A recipe names the trainer (``trainer.type: TelechatMoeTrainer``); it builds our model instead of MindFormers' class for
``model.model_config``, and leaves everything else (data, optimizer, schedule, step, callbacks, checkpoints) to
MindFormers. Imported by ``mindformers_plugin/telechat_moe_plugin.py``; needs MindFormers 1.9.0.
"""

from collections.abc import Sequence
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

from telechat_moe.errors import BadInputError
from telechat_moe.interop import mindformers_bridges as bridges
from telechat_moe.interop.mindformers_config import check_launch, recipe_of
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.ops.custom import reason
from telechat_moe.ops.rewrite import fuse_cells
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.sharding.cells.collective import SumOverProcesses
from telechat_moe.train.rank_graph import placed_model
from telechat_moe.train.step import update_rules


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
        self._build(self.recipe)
        self.to_float, self.zero = ops.Cast(), Tensor([0.0], ms.float32)
        _, self.bias_rate = update_rules(self.recipe)
        self.balance = _Balance(self.bias_rate, self.recipe.devices)

    def _build(self, recipe: Recipe) -> None:
        settings, target = recipe.telechat_moe, recipe.context.device_target
        backends = settings.operators
        with select.using(backends.default, backends.backends(), target, backends.host):
            if is_split(recipe):
                rank = ms.get_auto_parallel_context("global_rank")
                shared = recipe.micro_batches > 1
                placed = placed_model(recipe, rank, target, shared_graph=shared)
                self.model, routers = placed.model, placed.routers
                if shared:  # MindSpore's lazy_inline: micro-batches call one graph
                    self.cell_init_args = f"lazy_inline_{type(self).__name__}"
                held_here = [placed.placement.is_here(router.weight) for router in routers]
            else:
                sizes = (settings.moe_block_rows, settings.moe_capacity_tokens)
                self.model = CausalLM(recipe.model_config, *sizes)
                routers = [c for _, c in self.model.cells_and_names() if isinstance(c, Router)]
                held_here = [True] * len(routers)
                if backends.fuse_plain:
                    fuse_cells(self.model)
        # A tuple, not a CellList: some belong to other stages.
        pairs = zip(routers, held_here, strict=True)
        self.routers = tuple(r if is_here else None for r, is_here in pairs)

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
        keep = self.to_float(loss_mask, ms.float32)  # MindFormers' data loader gives int32
        lm, mtp, aux = self.model(input_ids, labels, keep, position_ids, attention_mask)
        return lm, mtp, aux, self.zero

    def update_topk_bias(self, gradient_accumulation_steps: int = 1) -> list[tuple[str, Tensor]]:
        """Move the expert biases by the loads of a step; ``TopkBiasBalanceCallback`` calls it after each.

        Returns:
            Name of each router and the tokens that each of its experts got, over all processes.
        """
        del gradient_accumulation_steps  # the bias moves by the sign of mean minus load
        if not (self.bias_rate and self.routers):
            return []
        loads = self.balance.move(self.routers, self.recipe.model_config.n_routed_experts)
        return [(f"router.{i}", Tensor(load)) for i, load in enumerate(loads)]

    def get_gpt_model(self) -> "TelechatMoeForCausalLM":
        """Return this model, of which ``MFLossMonitor`` asks :meth:`reset_accu_gbs_fi` after each step."""
        return self

    def reset_accu_gbs_fi(self) -> None:
        """Forget the tokens that ``gbs_aux_loss`` counted, unless :meth:`update_topk_bias` needs them and does."""
        if self.bias_rate:
            return
        for router in self.routers:
            if router is not None:  # set_data would not reach a graph that has run
                ops.assign(router.expert_load, ops.zeros_like(router.expert_load))

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
        if m.moe_router_load_balancing_type == "gbs_aux_loss":  # MindFormers' monitor acts on it
            experts["moe_router_load_balancing_type"] = "gbs_aux_loss"
    return MLATransformerConfig(
        multi_latent_attention=True,
        num_layers=m.num_hidden_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.intermediate_size,
        num_attention_heads=m.num_attention_heads,
        vocab_size=m.vocab_size,
        seq_length=m.seq_length,
        mtp_num_layers=m.num_nextn_predict_layers,
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


class _Balance:
    """Move expert biases between two steps, by the rule of :class:`telechat_moe.model.balance.BiasUpdate`."""

    def __init__(self, rate: float, devices: int) -> None:
        self.sum = SumOverProcesses() if devices > 1 else None
        if self.sum is not None:
            self.sum.add_flags(skip_auto_parallel_compile=True)
        self.rate = np.float32(rate)

    def move(self, routers: Sequence[Router | None], experts: int) -> np.ndarray:
        """Move the biases of the routers that are here; return the loads of all, ``[L, E]``, and clear them.

        Args:
            routers: All routers of the model; None for one of another stage.
        """
        loads_LE = np.zeros((len(routers), experts), np.float32)
        for i, router in enumerate(routers):
            if router is not None:
                loads_LE[i] = router.expert_load.asnumpy()
        if self.sum is not None:
            loads_LE = self.sum(Tensor(loads_LE)).asnumpy()
        for router, load in zip(routers, loads_LE, strict=True):
            if router is not None:
                moved = router.expert_bias.asnumpy() + np.sign(load.mean() - load) * self.rate
                router.expert_bias.set_data(Tensor(moved))
                router.expert_load.set_data(Tensor(np.zeros_like(load)))
        return loads_LE


@MindFormerRegister.register(MindFormerModuleType.TRAINER)
class TelechatMoeTrainer(CausalLanguageModelingTrainer):
    """MindFormers' trainer with our model."""

    def __init__(self, model_name: str | None = None) -> None:
        super().__init__(model_name)
        self.recipe: Recipe | None = None

    def train(self, config: Any = None, **kwargs: Any) -> None:
        """Train; see ``CausalLanguageModelingTrainer.train``.

        Raises:
            RecipeError: The recipe has problems; all are listed.
            BadInputError: MindFormers would silently train something else; see ``check_launch``.
        """
        self.recipe = recipe_of(config)
        check_launch(self.recipe, config.device_num)
        bridges.install(config)
        try:
            super().train(config=config, **kwargs)
        except RuntimeError as error:
            if text := reason(error):
                raise BadInputError(text) from error
            raise

    def create_network(self, default_args: dict[str, Any] | None = None) -> nn.Cell:
        """Build our model by MindFormers' registry, and fill in its initial weights."""
        assert self.recipe is not None
        section = self.config.model.model_config
        section.model_type, section.architectures = "telechat_moe", ["TelechatMoeForCausalLM"]
        section.recipe = self.recipe
        network = super().create_network(default_args)
        del section["recipe"]
        if not (self.config.checkpoint and self.config.checkpoint.load_path):
            network.initialize(self.recipe.seed)
        return network


def is_split(recipe: Recipe) -> bool:
    """Return whether MindSpore splits the model over devices (semi-automatic parallelism)."""
    return recipe.use_parallel and recipe.parallel.parallel_mode in PARALLEL_MODES

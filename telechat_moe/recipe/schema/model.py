"""The model section: `ModelConfig`, what the model room reads, and `OtherModelConfig`, what is checked alone.

Key names are MindFormers' and Hugging Face's. A key marked *written* has no default that a
recipe may rely on: MindFormers would silently take it from a class default of another model.
"""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from telechat_moe.recipe.fields import (
    ONLY_DEFAULT,
    OWN,
    WRITTEN,
    Above0,
    Count,
    Degree,
    Dtype,
    Fraction,
    LayerCount,
    NonNegative,
    Positive,
    Range,
    Text,
    any_value,
    decides,
    instead_of,
    names,
)
from telechat_moe.recipe.schema.table import section

NODE_DEVICES = 8
"""Devices of a node, MindFormers' default."""


def written(*others: str) -> dict[str, object]:
    """Return field metadata: must be written; ``others`` are its names elsewhere."""
    return {**WRITTEN, **instead_of(*others)}


@section
class ParamInitRule:
    """One entry of `param_init_std_rules`: another standard deviation for some parameters."""

    target: Text
    """Regular expression for parameter names."""


@section
class MindFormersModelKeys:
    """Model keys that MindFormers reads, and that change nothing in the networks of this package.

    They choose kernels, communication and details of inference. None always means: not written, MindFormers' default
    holds. Which keys exist is read from MindFormers 1.9.0 (`TransformerConfig`, `MLATransformerConfig`,
    `PretrainedConfig` and the converters); a test compares.
    """

    batch_size: Positive | None = None
    """Samples per device; equals `runner_config.batch_size`."""

    use_flash_attention: bool | None = None
    """Use the fused attention kernel on Ascend."""

    use_eod_attn_mask_compression: bool | None = None
    """Let the kernel make a mask that stops at document ends. Needs `use_flash_attention`."""

    mla_qkv_concat: bool | None = None
    """Merge the two down projections of MLA into one product."""

    use_interleaved_weight_layout_mlp: bool | None = None
    """Order of the merged gate/up weight."""

    bias_swiglu_fusion: bool | None = field(default=None, metadata=instead_of("use_fused_swiglu"))
    """Fuse SwiGLU. Needs `hidden_act: swiglu`."""

    apply_rope_fusion: bool | None = field(default=None, metadata=instead_of("use_fused_rope"))
    """Fuse the rotary product; MindFormers refuses it with MLA."""

    untie_embeddings_and_output_weights: bool | None = None
    """The opposite of `tie_word_embeddings`."""

    rotary_interleaved: bool | None = None
    """MindFormers refuses it with MLA."""

    rotary_scaling_factor: NonNegative | None = field(
        default=None, metadata=instead_of("factor", "scaling_factor")
    )
    """YaRN: how many times longer the context becomes."""

    param_init_std_rules: list[ParamInitRule] | None = None
    """Other initialisation for some parameters."""

    moe_layer_freq: Positive | list[Count] | None = None
    """1, or a list with 1 for each MoE layer; must agree with `first_k_dense_replace`."""

    num_key_value_heads: Positive | None = field(
        default=None, metadata=instead_of("num_query_groups", "n_kv_heads")
    )
    """Key/value heads; with MLA equal to `num_attention_heads`."""


@section
class ModelConfig(MindFormersModelKeys):
    """A decoder with multi-head latent attention (MLA) and mixture-of-experts (MoE) layers.

    `model.model_config` for the model types that this package trains. Dimensions are counts of
    elements, ranges are standard deviations.
    """

    model_type: Literal["telechat3_moe", "deepseek_v3"] = field(
        default="telechat3_moe",
        metadata=any_value("the same architecture; fills in what is not written"),
    )
    """MindFormers' model class. `deepseek_v3` is the same architecture with the names and class
    defaults of DeepSeek-V3, which fill the keys that a recipe leaves out."""

    moe_token_dispatcher_type: Text | None = "alltoall"
    """Which way tokens take between devices; `telechat_moe.sharding.dispatcher` says in which form. `alltoall` (None): in one
    hop. The others need `expert_parallel` over several nodes and take a hop between nodes first, then one within the
    node. `alltoall_deredundency`: every token goes to every node. `alltoall_zero_redundancy`: once to each node that
    has one of its experts; MindFormers sends it once to each device that has one instead, with the same result."""

    npu_nums_per_device: Positive = NODE_DEVICES
    """Devices of a node, whose ranks follow each other, where `moe_token_dispatcher_type` takes two hops."""

    vocab_size: Positive = field(
        default=2048, metadata=WRITTEN | decides("graph", "plugin", "weights", "data")
    )
    """Rows of the embedding. A multiple of `model_parallel`."""

    seq_length: Positive = field(default=4096, metadata=WRITTEN)
    """Tokens per sample. Equals `train_dataset.data_loader.config.seq_length` and is at most
    `max_position_embeddings`."""

    hidden_size: Positive = field(default=2560, metadata=WRITTEN)
    """Width of the residual stream."""

    intermediate_size: Positive = field(default=7680, metadata=written("ffn_hidden_size"))
    """Inner width of the SwiGLU of a dense layer."""

    num_hidden_layers: Annotated[int, Range(1, 10_000)] = field(
        default=4, metadata=written("num_layers", "n_layer")
    )
    """Decoder layers without MTP. Spread over `pipeline_stage` x `pp_interleave_num` chunks;
    `offset` takes up the remainder."""

    num_attention_heads: Positive = field(default=32, metadata=written("num_heads", "n_head"))
    """Attention heads. A multiple of `model_parallel`."""

    q_lora_rank: Count | None = field(default=1536, metadata=WRITTEN)
    """Width of the query latent. None or 0: queries are projected directly."""

    kv_lora_rank: Positive = field(default=512, metadata=WRITTEN)
    """Width of the key/value latent."""

    qk_nope_head_dim: Positive = field(default=128, metadata=WRITTEN)
    """Width of a query/key head without position."""

    qk_rope_head_dim: Positive = field(default=64, metadata=WRITTEN)
    """Width of the rotated part of a query/key head; the key part is shared by all heads. Even."""

    v_head_dim: Positive = field(default=128, metadata=WRITTEN)
    """Width of a value head."""

    qk_layernorm: bool = field(default=False, metadata=instead_of("use_qk_norm"))
    """RMSNorm on the query and key/value latents (Hugging Face always has it)."""

    rms_norm_eps: Above0 = field(default=1e-6, metadata=instead_of("layernorm_epsilon"))
    """Added to the mean square in every RMSNorm."""

    rope_theta: Above0 = field(default=10000.0, metadata=instead_of("rotary_base", "theta"))
    """Base of the rotary frequencies."""

    rope_interleave: bool = field(default=True, metadata=OWN)
    """Neighbouring elements form a rotated pair, as in Hugging Face's DeepseekV3 (MindFormers'
    MLA always does so, and calls its own `rotary_interleaved` an error)."""

    max_position_embeddings: Positive = 4096
    """Longest sequence that the positions are meant for, in tokens."""

    tie_word_embeddings: bool = False
    """Use the embedding as output head too."""

    hidden_act: Literal["silu", "swiglu", "fusedswiglu"] = field(
        default="silu", metadata=any_value("three names of a function")
    )
    """Gate of the SwiGLU. All three are the same function; `fusedswiglu` asks for one kernel."""

    initializer_range: Above0 = field(
        default=0.02, metadata=instead_of("init_method_std") | decides("plugin", "weights")
    )
    """Standard deviation of the normal initialisation of weights."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in float32 although layers compute in `compute_dtype`."""

    params_dtype: Dtype = field(default="float32", metadata=instead_of("param_init_type"))
    """Type in which parameters are stored and updated."""

    compute_dtype: Dtype = "bfloat16"
    """Type of the matrix products. On CPU float32, or in one process bfloat16 with our own operators."""

    layernorm_compute_dtype: Dtype = "float32"
    """Type in which RMSNorm computes."""

    softmax_compute_dtype: Dtype = "float32"
    """Type of the attention softmax."""

    rotary_dtype: Dtype = "float32"
    """Type of the rotary tables."""

    router_dense_type: Dtype = field(default="float32", metadata=names("moe_router_dtype"))
    """Type of the router's matrix product and scores. MindFormers reads `deepseek_v3`'s under the
    name `moe_router_dtype` only."""

    first_k_dense_replace: LayerCount = field(default=1, metadata=WRITTEN)
    """The first k layers are dense, all others MoE. At most `num_hidden_layers`."""

    n_routed_experts: Positive = field(
        default=192, metadata=written("num_experts", "num_moe_experts", "expert_num")
    )
    """Routed experts per MoE layer. A multiple of `expert_parallel` and of `n_group`."""

    num_experts_per_tok: Positive = field(
        default=4, metadata=written("moe_router_topk", "num_experts_chosen")
    )
    """Routed experts that each token visits (K)."""

    n_shared_experts: Count = field(default=1, metadata=written("shared_expert_num"))
    """Shared experts that every token visits. 0: none."""

    moe_intermediate_size: Positive = field(default=1536, metadata=written("moe_ffn_hidden_size"))
    """Inner width of one routed expert."""

    moe_shared_expert_intermediate_size: Positive | None = None
    """Inner width of all shared experts together. None: `n_shared_experts` x
    `moe_intermediate_size`."""

    n_group: Count = field(default=0, metadata=written("moe_router_num_groups"))
    """Groups of experts for group-limited routing. 0: no groups."""

    topk_group: Count = field(default=0, metadata=written("moe_router_group_topk"))
    """Groups that a token may choose from. 0 with `n_group` 0, else 1 to `n_group`."""

    norm_topk_prob: bool = True
    """Divide the K chosen scores by their sum."""

    scoring_func: Literal["sigmoid"] = field(
        default="sigmoid", metadata=names("moe_router_score_function")
    )
    """Score of an expert. MindFormers ignores another word here and takes the sigmoid."""

    routed_scaling_factor: Above0 = field(
        default=1.0, metadata=written("moe_router_topk_scaling_factor")
    )
    """Factor on the routing weights, after normalisation."""

    moe_router_enable_expert_bias: bool = field(
        default=True, metadata=instead_of("balance_via_topk_bias")
    )
    """Add a bias per expert to the scores for selection only, and update it from the load."""

    moe_router_bias_update_rate: NonNegative = field(
        default=0.001, metadata=instead_of("topk_bias_update_rate")
    )
    """Step of that bias per training step."""

    moe_router_load_balancing_type: Literal[
        "seq_aux_loss", "sub_seq_aux_loss", "gbs_aux_loss", "aux_loss", "none"
    ] = "sub_seq_aux_loss"
    """Tokens over which the balance loss counts load: `seq_aux_loss` each sequence, `sub_seq_aux_loss` what each device has of
    a micro-batch (a part of a sequence where tensor or context parallelism splits it), `aux_loss` the micro-batch on all
    devices or on an expert group (`telechat_moe.moe.balance_group`), `gbs_aux_loss` all micro-batches of the step so far,
    `none`: no balance loss. The first, second and fourth are MindFormers'; `aux_loss` and `none` only ours."""

    moe_aux_loss_coeff: NonNegative = 0.0
    """Factor of the balance loss. 0: none."""

    moe_z_loss_coeff: NonNegative | None = field(default=None, metadata=instead_of("z_loss_factor"))
    """Factor of the router's z-loss. None or 0: none."""

    calculate_per_token_loss: bool = False
    """Divide the next-token loss and each depth's MTP loss of a step by the tokens that count in it, over all
    micro-batches and devices. False, as in MindFormers: average each micro-batch over its own tokens, then the
    micro-batches, whose tokens weigh more where fewer are counted."""

    moe_token_drop_policy: Literal[False, "probs", "position"] = False
    """What is dropped when an expert is over its capacity: the least probable tokens (`probs`) or
    the last ones (`position`). False, or no capacity factor: dropless."""

    moe_expert_capacity_factor: Above0 | None = field(
        default=None, metadata=instead_of("capacity_factor")
    )
    """Tokens that an expert takes, as a multiple of the mean load. None: dropless."""

    num_nextn_predict_layers: LayerCount = field(
        default=0, metadata=written("mtp_depth", "mtp_num_layers")
    )
    """Multi-token prediction layers. 0: off. MindFormers allows at most 1."""

    mtp_loss_factor: NonNegative | None = field(
        default=None, metadata=names("mtp_loss_scaling_factor")
    )
    """Factor of the MTP loss (averaged over its layers). Needed when there are MTP layers."""

    hidden_dropout: Annotated[float, Range(0, 1, below=True)] = field(
        default=0.0, metadata=ONLY_DEFAULT
    )
    """Dropout on the residual branches. 0: none."""

    attention_dropout: Annotated[float, Range(0, 1, below=True)] = field(
        default=0.0, metadata=ONLY_DEFAULT
    )
    """Dropout on attention weights. 0: none."""

    offset: int | list[int] | list[list[int]] = 0
    """Layers that a pipeline chunk has more (or less) than the integer mean: one number 0, a list
    per stage, or with interleaving a list of lists [chunk][stage]. Sums to the remainder of
    layers / (`pipeline_stage` x `pp_interleave_num`)."""

    pp_interleave_num: Degree = field(
        default=1, metadata=names("virtual_pipeline_model_parallel_size")
    )
    """Chunks per pipeline stage (VPP). More than 1 needs
    `parallel.pipeline_config.pipeline_interleave`."""

    architectures: Text | list[Text] | None = field(
        default=None, metadata=any_value("names the class that MindFormers builds")
    )
    """Name of MindFormers' network class."""

    multi_latent_attention: Literal[True] = True
    """MLA; this model has no other attention."""

    add_bias_linear: Literal[False] = False
    """Linear layers have no bias."""

    gated_linear_unit: Literal[True] = True
    """The feed-forward layers are gated (SwiGLU)."""

    normalization: Literal["RMSNorm"] = "RMSNorm"
    """Kind of norm."""

    position_embedding_type: Literal["rope", "yarn"] = field(
        default="rope", metadata={**instead_of("extend_method"), **ONLY_DEFAULT}
    )
    """`yarn` scales rotary frequencies for long context (MindFormers only)."""

    partial_rotary_factor: Fraction = field(default=1.0, metadata=ONLY_DEFAULT)
    """Share of the rope part that is rotated."""

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts together; 0 without shared experts."""
        if not self.n_shared_experts:
            return 0
        default = self.n_shared_experts * self.moe_intermediate_size
        return self.moe_shared_expert_intermediate_size or default

    @property
    def num_moe_layers(self) -> int:
        """Decoder layers with experts, MTP not counted."""
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    @property
    def moe_layer_names(self) -> list[str]:
        """Names of the layers with experts in the order of their routers: `layer 1`, ..., then those of MTP: `MTP 1`, ..."""
        if not self.num_moe_layers:
            return []
        names = [f"layer {i}" for i in range(self.first_k_dense_replace, self.num_hidden_layers)]
        return names + [f"MTP {k}" for k in range(1, (self.num_nextn_predict_layers or 0) + 1)]

    @property
    def query_width(self) -> int:
        """Width of a whole query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


DEEPSEEK_V3: dict[str, object] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "seq_length": 4096,
}
"""Class defaults of MindFormers' DeepseekV3Config: the published DeepSeek-V3."""


OTHER_TYPES = ("qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "telechat2", "telechat3")
"""Model types of MindFormers whose keys are checked, but which this package does not train."""


@section
class OtherModelConfig(MindFormersModelKeys):
    """`model.model_config` of a model that this package checks but does not train.

    Used for other model types, and when the dimensions stand in a Hugging Face folder
    (`pretrained_model_dir`). None: not written.
    """

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Return what the recipe says for a key; all of them are rows of the table."""

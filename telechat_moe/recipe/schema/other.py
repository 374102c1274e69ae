"""The model section of models that this package checks but does not train."""

from dataclasses import dataclass, field
from typing import Literal

from telechat_moe.recipe.fields import Above0, Count, Dtype, Positive, Share, Text, instead_of
from telechat_moe.recipe.schema.keys import MindFormersModelKeys

OTHER_TYPES = ("qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "telechat2", "telechat3")
"""Model types of MindFormers whose keys are checked, but which this package does not train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherModelConfig(MindFormersModelKeys):
    """`model.model_config` of a model that this package checks but does not train.

    Used for other model types, and when the dimensions stand in a Hugging Face folder
    (`pretrained_model_dir`). None: not written.
    """

    model_type: Text | None = None
    """MindFormers' model class. None: the folder says it."""

    architectures: Text | list[Text] | None = None
    """Name of MindFormers' network class."""

    vocab_size: Positive | None = None
    """Rows of the embedding."""

    seq_length: Positive | None = None
    """Tokens per sample."""

    hidden_size: Positive | None = None
    """Width of the residual stream."""

    intermediate_size: Positive | None = None
    """Inner width of a dense feed-forward layer."""

    num_hidden_layers: Positive | None = None
    """Decoder layers."""

    num_attention_heads: Positive | None = None
    """Attention heads."""

    head_dim: Positive | None = None
    """Width of a head."""

    q_lora_rank: Count | None = None
    """MLA: width of the query latent."""

    kv_lora_rank: Positive | None = None
    """MLA: width of the key/value latent."""

    qk_nope_head_dim: Positive | None = None
    """MLA: width of a head without position."""

    qk_rope_head_dim: Positive | None = None
    """MLA: width of the rotated part."""

    v_head_dim: Positive | None = None
    """MLA: width of a value head."""

    qk_layernorm: bool | None = None
    """Norm on queries and keys."""

    rms_norm_eps: Above0 | None = None
    """Added to the mean square in every RMSNorm."""

    rope_theta: Above0 | None = None
    """Base of the rotary frequencies."""

    max_position_embeddings: Positive | None = None
    """Longest sequence, in tokens."""

    tie_word_embeddings: bool | None = None
    """Use the embedding as output head too."""

    hidden_act: Text | None = None
    """Activation of the feed-forward layer."""

    initializer_range: Above0 | None = None
    """Standard deviation of the initialisation."""

    fp32_residual_connection: bool | None = None
    """Residual stream in float32."""

    params_dtype: Dtype | None = None
    """Type of parameters."""

    compute_dtype: Dtype | None = None
    """Type of matrix products."""

    layernorm_compute_dtype: Dtype | None = None
    """Type of norms."""

    softmax_compute_dtype: Dtype | None = None
    """Type of the attention softmax."""

    rotary_dtype: Dtype | None = None
    """Type of the rotary tables."""

    router_dense_type: Dtype | None = None
    """Type of the router."""

    first_k_dense_replace: Count | None = None
    """The first k layers are dense."""

    n_routed_experts: Positive | None = field(default=None, metadata=instead_of("expert_num"))
    """Routed experts per MoE layer (DeepSeek's name)."""

    num_experts: Positive | None = None
    """Routed experts per MoE layer (Qwen's name)."""

    num_experts_per_tok: Positive | None = None
    """Routed experts that each token visits."""

    n_shared_experts: Count | None = None
    """Shared experts."""

    moe_intermediate_size: Positive | None = None
    """Inner width of one routed expert."""

    moe_shared_expert_intermediate_size: Positive | None = None
    """Inner width of all shared experts together."""

    n_group: Count | None = None
    """Groups of experts. 0: none."""

    topk_group: Count | None = None
    """Groups that a token may choose from."""

    norm_topk_prob: bool | None = None
    """Divide the chosen scores by their sum."""

    scoring_func: Text | None = None
    """Score of an expert."""

    moe_router_score_function: Literal["sigmoid", "softmax"] | None = None
    """Score of an expert (MindFormers' name)."""

    routed_scaling_factor: Above0 | None = None
    """Factor on the routing weights."""

    moe_router_enable_expert_bias: bool | None = None
    """Bias per expert, for selection only."""

    moe_router_bias_update_rate: Share | None = None
    """Step of that bias."""

    moe_router_load_balancing_type: (
        Literal["seq_aux_loss", "sub_seq_aux_loss", "gbs_aux_loss"] | None
    ) = None
    """Over what the balance loss counts load."""

    moe_aux_loss_coeff: Share | None = None
    """Factor of the balance loss."""

    router_aux_loss_coef: Share | None = None
    """Hugging Face's name; MindFormers ignores it and reads `moe_aux_loss_coeff`."""

    moe_z_loss_coeff: Share | None = None
    """Factor of the z-loss."""

    moe_token_drop_policy: Literal[False, "probs", "position"] | None = None
    """What is dropped over capacity."""

    moe_expert_capacity_factor: Above0 | None = None
    """Tokens that an expert takes, as a multiple of the mean."""

    num_nextn_predict_layers: Count | None = None
    """Multi-token prediction layers."""

    mtp_loss_factor: Share | None = field(
        default=None, metadata={"names": ("mtp_loss_scaling_factor",)}
    )
    """Factor of the MTP loss."""

    hidden_dropout: Share | None = None
    """Dropout on the residual branches."""

    attention_dropout: Share | None = None
    """Dropout on attention weights."""

    offset: int | list[int] | list[list[int]] = 0
    """Layers that a pipeline chunk has more or less than the mean."""

    pp_interleave_num: Positive = 1
    """Chunks per pipeline stage."""

    multi_latent_attention: bool | None = None
    """MLA instead of grouped-query attention."""

    add_bias_linear: bool | None = None
    """Linear layers have a bias."""

    gated_linear_unit: bool | None = None
    """Gated feed-forward layers."""

    normalization: Literal["RMSNorm", "LayerNorm"] | None = None
    """Kind of norm."""

    position_embedding_type: (
        Literal["rope", "yarn", "none", "relative", "learned_absolute", "partial_rope"] | None
    ) = None
    """Kind of positions."""

    partial_rotary_factor: Share | None = None
    """Share of the head that is rotated."""

    decoder_sparse_step: Positive | None = None
    """Hugging Face's name for `moe_layer_freq`; MindFormers ignores it."""

    mlp_only_layers: list[Count] | None = None
    """Hugging Face key; MindFormers ignores it."""

    sliding_window: Positive | None = None
    """Hugging Face key; MindFormers ignores it."""

    use_sliding_window: bool | None = None
    """Hugging Face key; MindFormers ignores it."""

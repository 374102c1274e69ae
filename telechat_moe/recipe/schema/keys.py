"""The keys of `model.model_config` that only MindFormers reads.

They choose kernels, communication and inference details; the networks of this package compute the
same whatever they say. None always means: not written, MindFormers' default holds. Which keys
exist is read from MindFormers 1.9.0 (`TransformerConfig`, `MLATransformerConfig`,
`PretrainedConfig` and the converters); a test compares.
"""

from dataclasses import dataclass, field

from telechat_moe.recipe.fields import (
    Count,
    Dtype,
    NonNegative,
    Positive,
    Share,
    Text,
    instead_of,
    names,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamInitRule:
    """One entry of `param_init_std_rules`: another standard deviation for some parameters."""

    target: Text
    """Regular expression for parameter names."""

    init_method_std: NonNegative
    """Standard deviation of the normal initialisation of those parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """`rope_scaling` as in a Hugging Face configuration."""

    type: Text | None = field(default=None, metadata=names("rope_type"))
    """Kind of scaling, such as `yarn`."""

    factor: Positive | NonNegative
    """How many times longer the context becomes."""

    original_max_position_embeddings: Positive | None = None
    """Context length before scaling, in tokens."""

    beta_fast: float | None = None
    """YaRN: rotations above which a frequency is left alone."""

    beta_slow: float | None = None
    """YaRN: rotations below which a frequency is interpolated fully."""

    mscale: float | None = None
    """YaRN: scale of the attention temperature."""

    mscale_all_dim: float | None = None
    """YaRN: the same for all dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MindFormersModelKeys:
    """Model keys that MindFormers reads and this package only passes on."""

    batch_size: Positive | None = None
    """Samples per device; equals `runner_config.batch_size`."""

    input_sliced_sig: bool | None = None
    """Labels are already shifted by the data set."""

    use_flash_attention: bool | None = None
    """Use the fused attention kernel on Ascend."""

    use_attn_mask_compression: bool | None = None
    """Let the kernel make the causal mask. Needs `use_flash_attention`."""

    use_eod_attn_mask_compression: bool | None = None
    """Let the kernel make a mask that stops at document ends. Needs `use_flash_attention`."""

    use_attention_mask: bool | None = None
    """Feed an attention mask to the kernel."""

    use_eod_reset: bool | None = None
    """Reset mask and positions at document ends."""

    use_ring_attention: bool | None = None
    """Ring attention for context parallelism. Needs `use_flash_attention`."""

    use_alibi_mask: bool | None = None
    """ALiBi positions."""

    input_layout: Text | None = None
    """Layout of the attention kernel's inputs, such as `BNSD`."""

    sparse_mode: Count | None = None
    """Mask mode of the attention kernel."""

    mask_func_type: Text | None = None
    """How masked scores are written."""

    mla_qkv_concat: bool | None = None
    """Merge the two down projections of MLA into one product."""

    use_contiguous_weight_layout_attention: bool | None = None
    """Order of the merged query/key/value weight."""

    use_interleaved_weight_layout_mlp: bool | None = None
    """Order of the merged gate/up weight."""

    bias_swiglu_fusion: bool | None = field(default=None, metadata=instead_of("use_fused_swiglu"))
    """Fuse SwiGLU. Needs `hidden_act: swiglu`."""

    bias_dropout_fusion: bool | None = None
    """Fuse bias and dropout."""

    apply_rope_fusion: bool | None = field(default=None, metadata=instead_of("use_fused_rope"))
    """Fuse the rotary product; MindFormers refuses it with MLA."""

    fused_norm: bool | None = None
    """Use the fused norm kernel."""

    apply_query_key_layer_scaling: bool | None = None
    """Scale attention scores by the layer number."""

    apply_residual_connection_post_layernorm: bool | None = None
    """Residual after the norm instead of before."""

    attention_softmax_in_fp32: bool | None = None
    """Compute the attention softmax in float32."""

    softmax_scale: NonNegative | None = None
    """Factor on attention scores. None: 1 / sqrt(head width)."""

    track_max_attention_logit: bool | None = None
    """Record the largest attention score (QK-clip)."""

    fp16_lm_cross_entropy: bool | None = None
    """Compute the loss in float16."""

    untie_embeddings_and_output_weights: bool | None = None
    """The opposite of `tie_word_embeddings`."""

    calculate_per_token_loss: bool | None = None
    """Average the loss over tokens instead of samples."""

    disable_lazy_inline: bool | None = None
    """Compile each layer separately instead of once."""

    print_separate_loss: bool | None = None
    """Log main, balance and MTP loss apart."""

    qk_head_dim: Positive | None = None
    """The name that MindFormers 1.9.0 reads for `telechat3_moe` instead of `qk_nope_head_dim`, which
    it ignores there (and takes 128). Equal to it; needed when it is not 128."""

    qk_pos_emb_head_dim: Positive | None = None
    """The name that MindFormers 1.9.0 reads for `telechat3_moe` instead of `qk_rope_head_dim`, which
    it ignores there (and takes 64). Equal to it; needed when it is not 64."""

    rotary_interleaved: bool | None = None
    """MindFormers refuses it with MLA."""

    rotary_cos_format: Text | None = None
    """Layout of the rotary table."""

    rotary_seq_len_interpolation_factor: NonNegative | None = None
    """Linear interpolation of positions."""

    rotary_percent: Share | None = None
    """Share of the head that is rotated."""

    rotary_scaling_factor: NonNegative | None = field(
        default=None, metadata=instead_of("factor", "scaling_factor")
    )
    """YaRN: how many times longer the context becomes."""

    rope_type: Text | None = None
    """Kind of rotary embedding at inference."""

    rope_scaling: RopeScaling | None = None
    """Scaling as in Hugging Face."""

    use_rope_scaling: bool | None = None
    """Turn `rope_scaling` on."""

    beta_fast: NonNegative | None = None
    """YaRN: rotations above which a frequency is left alone."""

    beta_slow: NonNegative | None = None
    """YaRN: rotations below which a frequency is interpolated fully."""

    mscale: NonNegative | None = None
    """YaRN: scale of the attention temperature."""

    mscale_all_dim: NonNegative | None = None
    """YaRN: the same for all dimensions."""

    coeff: NonNegative | None = None
    """YaRN: coefficient of the temperature's logarithm."""

    nope_layer_interval: Positive | None = None
    """Every n-th layer has no positions."""

    window_size: list[int] | None = None
    """Sliding window of attention, left and right; -1 is unlimited."""

    window_attn_skip_freq: Positive | list[Count] | None = None
    """Which layers use the whole context."""

    param_init_std_rules: list[ParamInitRule] | None = None
    """Other initialisation for some parameters."""

    moe_layer_freq: Positive | list[Count] | None = None
    """1, or a list with 1 for each MoE layer; must agree with `first_k_dense_replace`."""

    moe_grouped_gemm: bool | None = field(default=None, metadata=instead_of("use_gmm"))
    """Use the grouped matrix product kernel."""

    moe_permute_fusion: bool | None = field(
        default=None, metadata=instead_of("use_fused_ops_permute")
    )
    """Use the fused permutation kernels."""

    moe_router_fusion: bool | None = None
    """Use the fused router kernel."""

    use_fused_ops_topkrouter: bool | None = None
    """Use the fused top-k kernel."""

    moe_router_pre_softmax: bool | None = None
    """Softmax before the selection instead of after."""

    moe_router_force_expert_balance: bool | None = None
    """Route evenly whatever the scores say (benchmarks only)."""

    moe_token_dispatcher_type: Text | None = None
    """`alltoall`, `alltoall_deredundency`, `alltoall_zero_redundancy` or `allgather`."""

    moe_shared_expert_overlap: bool | None = None
    """Overlap the shared expert with communication."""

    moe_apply_probs_on_input: bool | None = None
    """Apply routing weights before the expert instead of after."""

    use_pad_tokens: bool | None = field(default=None, metadata=instead_of("enable_gmm_safe_tokens"))
    """Give every expert at least one token, so that no grouped product is empty."""

    use_shared_expert_gating: bool | None = None
    """Gate the shared expert."""

    topk_method: Text | None = None
    """Name of the selection method, as in Hugging Face."""

    npu_nums_per_device: Positive | None = None
    """NPUs per server, for hierarchical communication."""

    group_wise_a2a: bool | None = None
    """All-to-all within groups."""

    comp_comm_parallel: bool | None = None
    """Overlap computation and communication of experts."""

    comp_comm_parallel_degree: Positive | None = None
    """Parts of that overlap."""

    callback_moe_droprate: bool | None = None
    """Record the share of dropped tokens."""

    print_expert_load: bool | None = None
    """Log the load of each expert."""

    enable_expert_relocation: bool | None = None
    """Move experts between devices during training."""

    expert_relocation_initial_iteration: Count | None = None
    """Step of the first move."""

    expert_relocation_freq: Positive | None = None
    """Steps between moves."""

    experimental_attention_variant: Text | None = None
    """`dsa`: DeepSeek sparse attention."""

    dsa_indexer_n_heads: Positive | None = field(default=None, metadata=instead_of("index_n_heads"))
    """Sparse attention: heads of the indexer."""

    dsa_indexer_head_dim: Positive | None = field(
        default=None, metadata=instead_of("index_head_dim")
    )
    """Sparse attention: width of an indexer head."""

    dsa_indexer_topk: Positive | None = field(default=None, metadata=instead_of("index_topk"))
    """Sparse attention: tokens kept."""

    dsa_indexer_loss_coeff: NonNegative | None = None
    """Sparse attention: factor of the indexer loss."""

    dsa_indexer_use_sparse_loss: bool | None = None
    """Sparse attention: loss over the kept tokens only."""

    sandwich_norm: bool | None = None
    """Norm before and after each branch (inference networks only)."""

    num_key_value_heads: Positive | None = field(
        default=None, metadata=instead_of("num_query_groups", "n_kv_heads")
    )
    """Key/value heads; with MLA equal to `num_attention_heads`."""

    attention_bias: bool | None = field(default=None, metadata=instead_of("add_qkv_bias"))
    """Bias on the attention projections."""

    ignore_token_id: int | None = None
    """Label that the loss leaves out."""

    pad_token_id: int | None = None
    """Id of the padding token."""

    bos_token_id: int | None = None
    """Id of the first token of a text."""

    eos_token_id: int | list[int] | None = None
    """Id of the last token of a text."""

    is_dynamic: bool | None = None
    """Shapes change at run time."""

    use_past: bool | None = None
    """Keep keys and values (inference)."""

    block_size: Positive | None = None
    """Tokens per block of the key/value cache (inference)."""

    num_blocks: Positive | None = None
    """Blocks of the key/value cache (inference)."""

    use_fused_mla: bool | None = None
    """Fused MLA kernel (inference)."""

    dispatch_global_max_bs: Count | None = None
    """Largest batch of the dispatch kernel (inference)."""

    attn_reduce_scatter: bool | None = None
    """Communication after attention (inference)."""

    attn_allgather: bool | None = None
    """Communication before attention (inference)."""

    attn_allreduce: bool | None = None
    """Communication after attention (inference)."""

    ffn_reduce_scatter: bool | None = None
    """Communication after the feed-forward layer (inference)."""

    ffn_allgather: bool | None = None
    """Communication before the feed-forward layer (inference)."""

    ffn_allreduce: bool | None = None
    """Communication after the feed-forward layer (inference)."""

    use_alltoall: bool | None = None
    """Exchange tokens by all-to-all (inference)."""

    torch_dtype: Dtype | None = None
    """Hugging Face key; MindFormers reads `compute_dtype` instead."""

"""Rules within the model section."""

from collections.abc import Iterator

from telechat_moe.recipe.schema import Broken
from telechat_moe.recipe.schema.model import ModelConfig, OtherModelConfig

AnyModel = ModelConfig | OtherModelConfig
AT = "model.model_config."


def groups(m: AnyModel) -> Iterator[Broken]:
    """Group-limited routing: MindFormers asserts some of this, and divides by zero elsewhere."""
    experts, groups, chosen = m.n_routed_experts, m.n_group, m.topk_group
    top = m.num_experts_per_tok
    if groups is None or chosen is None or experts is None or top is None:
        return
    if top > experts:
        yield AT + "num_experts_per_tok", f"{top} of {experts} experts", f"at most {experts}"
        return
    if not groups or not chosen:
        if groups or chosen:
            problem = f"{chosen} kept of {groups} groups"
            yield AT + "topk_group", problem, "n_group and topk_group both 0, or both at least 1"
        return
    if experts % groups:
        yield AT + "n_group", f"{groups} groups of {experts} experts", f"a divisor of {experts}"
        return
    if chosen > groups:
        yield AT + "topk_group", f"{chosen} kept of {groups} groups", f"at most {groups}"
        return
    if top > chosen * (experts // groups):
        problem = f"{top} experts per token, but the {chosen} groups kept have {chosen * (experts // groups)}"
        yield AT + "num_experts_per_tok", problem, "at most the experts of the kept groups"
    elif top % chosen:
        problem = f"{top} experts per token from {chosen} groups"
        expected = "a multiple of topk_group (MindFormers asserts it)"
        yield AT + "num_experts_per_tok", problem, expected


def top_k(m: AnyModel) -> Iterator[Broken]:
    """A token cannot visit more experts than there are."""
    experts = m.n_routed_experts or (m.num_experts if isinstance(m, OtherModelConfig) else None)
    if experts is None or m.num_experts_per_tok is None or m.n_group is not None:
        return
    if m.num_experts_per_tok > experts:
        problem = f"{m.num_experts_per_tok} of {experts} experts"
        yield AT + "num_experts_per_tok", problem, f"at most {experts}"


def rotary(m: AnyModel) -> Iterator[Broken]:
    """Rotary pairs need an even width; MindFormers' MLA refuses `rotary_interleaved`, and scales scores as for YaRN."""
    if m.qk_rope_head_dim is not None and m.qk_rope_head_dim % 2:
        yield AT + "qk_rope_head_dim", str(m.qk_rope_head_dim), "an even number"
    if m.multi_latent_attention and m.rotary_interleaved:
        yield AT + "rotary_interleaved", "True with MLA", "False: MLA rotates neighbours anyway"
    if m.multi_latent_attention and m.apply_rope_fusion:
        yield AT + "apply_rope_fusion", "True with MLA", "False: MindFormers refuses it with MLA"
    rope = m.multi_latent_attention and m.position_embedding_type == "rope"
    if rope and m.rotary_scaling_factor is None:
        problem = "left out; MindFormers takes 40 and multiplies attention scores by 1.59"
        yield AT + "rotary_scaling_factor", problem, "1.0 with position_embedding_type rope"


def dense_layers(m: AnyModel) -> Iterator[Broken]:
    """MindFormers refuses more dense layers than layers, and a `moe_layer_freq` that disagrees."""
    first, layers, freq = m.first_k_dense_replace, m.num_hidden_layers, m.moe_layer_freq
    if first is None or layers is None:
        return
    if first > layers:
        problem = f"{first} dense layers of {layers}"
        yield AT + "first_k_dense_replace", problem, f"at most {layers}"
        return
    pattern = [0] * first + [1] * (layers - first)
    if (isinstance(freq, list) and freq != pattern) or (isinstance(freq, int) and freq != 1):
        expected = f"1, or {first} zeros and {layers - first} ones as first_k_dense_replace says"
        yield AT + "moe_layer_freq", str(freq), expected


def shared_experts(m: AnyModel) -> Iterator[Broken]:
    """MindFormers ignores the width of shared experts that are not there."""
    if m.n_shared_experts == 0 and m.moe_shared_expert_intermediate_size:
        problem = f"{m.moe_shared_expert_intermediate_size} with n_shared_experts 0"
        expected = "no such key without shared experts"
        yield AT + "moe_shared_expert_intermediate_size", problem, expected


def capacity(m: AnyModel) -> Iterator[Broken]:
    """MindFormers reads `moe_token_drop_policy: False` as `probs`: with a capacity it would drop."""
    factor, policy = m.moe_expert_capacity_factor, m.moe_token_drop_policy
    if factor is None:
        return
    if not policy:
        problem = f"moe_expert_capacity_factor {factor:g} with moe_token_drop_policy {policy}"
        yield AT + "moe_token_drop_policy", problem, "probs or position, or no capacity factor"


def multi_token(m: AnyModel) -> Iterator[Broken]:
    """MindFormers multiplies the MTP loss by None and fails in the first step."""
    if m.num_nextn_predict_layers and m.mtp_loss_factor is None and isinstance(m, ModelConfig):
        problem = f"missing, with {m.num_nextn_predict_layers} MTP layers"
        yield AT + "mtp_loss_factor", problem, "a factor such as 0.3"


def positions(m: AnyModel) -> Iterator[Broken]:
    """A sequence longer than the positions are meant for trains, badly and silently."""
    length, longest = m.seq_length, m.max_position_embeddings
    if length is not None and longest is not None and length > longest:
        yield AT + "seq_length", str(length), f"at most max_position_embeddings ({longest})"


def heads(m: AnyModel) -> Iterator[Broken]:
    """With MLA there is a key/value head per head; MindFormers' class default is another number."""
    kv, q = m.num_key_value_heads, m.num_attention_heads
    if kv is None or q is None:
        return
    if m.multi_latent_attention and kv != q:
        yield AT + "num_key_value_heads", f"{kv} with {q} heads", f"{q}: MLA has no groups of heads"
    elif q % kv:
        yield AT + "num_key_value_heads", f"{kv} with {q} heads", f"a divisor of {q}"


def flash_attention(m: AnyModel) -> Iterator[Broken]:
    """MindFormers refuses masks made by a kernel that is off."""
    if m.use_flash_attention is not False:
        return
    for key in ("use_attn_mask_compression", "use_eod_attn_mask_compression", "use_ring_attention"):
        if getattr(m, key):
            yield AT + key, "True", "False, or use_flash_attention True"


def activation(m: AnyModel) -> Iterator[Broken]:
    """MindFormers refuses the fused SwiGLU under another name of the activation."""
    if m.bias_swiglu_fusion and m.hidden_act != "swiglu":
        problem = f"True with hidden_act {m.hidden_act}"
        expected = "hidden_act swiglu, or fusedswiglu without this key"
        yield AT + "bias_swiglu_fusion", problem, expected


def tied(m: AnyModel) -> Iterator[Broken]:
    """Two keys say whether embedding and head are one matrix."""
    untied = m.untie_embeddings_and_output_weights
    if untied is not None and m.tie_word_embeddings is not None and untied == m.tie_word_embeddings:
        problem = f"{untied} with tie_word_embeddings {m.tie_word_embeddings}"
        yield AT + "untie_embeddings_and_output_weights", problem, f"{not m.tie_word_embeddings}"


def token_ids(m: AnyModel) -> Iterator[Broken]:
    """Ids beyond the vocabulary read outside the embedding."""
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(m, key)
        if isinstance(value, int) and m.vocab_size is not None and value >= m.vocab_size:
            yield AT + key, str(value), f"below vocab_size ({m.vocab_size})"

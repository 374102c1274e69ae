"""What a model section may ask for that this model has."""

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import ModelConfig

# MindFormers computes something else for other values of these keys; this model would ignore them.
ONLY: dict[str, tuple[object, ...]] = {
    "apply_query_key_layer_scaling": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "attention_bias": (None, False),
    "attention_dropout": (0.0,),
    "calculate_per_token_loss": (None, False),
    "experimental_attention_variant": (None,),
    "fp16_lm_cross_entropy": (None, False),
    "hidden_dropout": (0.0,),
    "moe_apply_probs_on_input": (None, False),
    "moe_router_force_expert_balance": (None, False),
    "moe_router_pre_softmax": (None, False),
    "nope_layer_interval": (None, 0),
    "param_init_std_rules": (None, []),
    "partial_rotary_factor": (1.0,),
    "position_embedding_type": ("rope",),
    "rope_scaling": (None,),
    "rotary_percent": (None, 1.0),
    "rotary_scaling_factor": (None, 1.0),
    "rotary_seq_len_interpolation_factor": (None, 1.0),
    "sandwich_norm": (None, False),
    "softmax_scale": (None,),
    "topk_method": (None, "noaux_tc"),
    "use_alibi_mask": (None, False),
    "use_rope_scaling": (None, False),
    "use_shared_expert_gating": (None, False),
    "window_size": (None,),
}


def check_supported(config: ModelConfig) -> None:
    """Refuse settings that a recipe may hold for MindFormers but that this model would ignore.

    Raises:
        BadInputError: Naming each such key, its value and what this model has.
    """
    problems = [
        f"model.model_config.{key}: found {getattr(config, key)!r}, this model has only "
        + " or ".join(repr(value) for value in allowed)
        for key, allowed in ONLY.items()
        if getattr(config, key) not in allowed
    ]
    balance = config.moe_router_load_balancing_type
    if config.moe_aux_loss_coeff and balance not in ("seq_aux_loss", "aux_loss", "none"):
        problems.append(
            f"model.model_config.moe_router_load_balancing_type: found {balance!r}, this model has "
            "only 'seq_aux_loss', 'aux_loss' or 'none' (or moe_aux_loss_coeff 0)"
        )
    if problems:
        raise BadInputError("\n".join(problems))

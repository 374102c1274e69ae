"""What a weight is, from its name in transformers, Megatron-Core, MindFormers or this package.

A role is this package's name of a weight, such as ``layers.3.ffn.gate``. A fused weight has several roles.
"""

import re
from typing import NamedTuple

_LAYER = re.compile(
    r"(?:.*\.)?(?:(?P<mtp>mtp(?:\.layers)?)|(?<!mtp\.)layers|h|blocks)\.(?P<layer>\d+)(?:\.(?P<inner>.*))?"
)
_EXPERT = re.compile(
    r"(?:experts\.)?(?:local_)?experts\.(?P<a>\d+)\.|(?<=linear_fc[12]\.weight)(?P<b>\d+)$"
)
_OUTSIDE = {
    r"(.*\.)?(embed_tokens|word_embeddings|embedding)\.(weight|embedding_weight|embedding_table)": "embedding",
    r"(.*\.)?(final_layernorm|final_norm|norm_out|norm)\.(weight|gamma)": "norm",
    r"(.*\.)?(lm_head|output_layer|head)\.weight": "head",
}
_FFN = {
    "": ("mlp|ffn", "ffn"),
    "shared": (r"(mlp\.)?(shared_experts|shared_expert|moe\.shared)", "moe.shared"),
    "experts": (r"(mlp\.|moe\.)?experts", "moe.experts"),
}
_INNER = {  # within a layer; a fused weight has several roles
    r"(input_layernorm|input_norm|attention_norm|self_attention\.linear_qkv\.layer_norm)": "input_norm",
    r"(post_attention_layernorm|pre_mlp_layernorm|ffn_norm|mlp\.linear_fc1\.layer_norm)": "ffn_norm",
    r"(mlp\.gate|mlp\.router|moe\.router|block_sparse_moe\.gate)": "moe.router",
    r"\w+\.(q_a_proj|linear_q_down_proj|q_down)": "attention.q_down",
    r"\w+\.(q_a_layernorm|q_layernorm|q_norm|linear_q_up_proj\.layer_norm)": "attention.q_norm",
    r"\w+\.(q_b_proj|linear_q_up_proj|linear_qb|q_up)": "attention.q_up",
    r"\w+\.(q_proj|linear_q_proj|linear_q)": "attention.q_proj",
    r"\w+\.(k_proj|linear_k)": "attention.k_proj",
    r"\w+\.(v_proj|linear_v)": "attention.v_proj",
    r"\w+\.(kv_a_proj_with_mqa|linear_kv_down_proj|kv_down)": "attention.kv_down",
    r"\w+\.(kv_a_layernorm|kv_layernorm|k_layernorm|kv_norm|linear_kv_up_proj\.layer_norm)": "attention.kv_norm",
    r"\w+\.(kv_b_proj|linear_kv_up_proj|linear_kvb|kv_up)": "attention.kv_up",
    r"(self_attn|self_attention|attention)\.(o_proj|linear_proj|wo|out)": "attention.out",
    **{
        rf"({path})\.({names})": " ".join(f"{role}.{part}" for part in parts.split())
        for path, role in _FFN.values()
        for names, parts in {
            "gate_proj|gate|w1": "gate",
            "up_proj|up|w3": "up",
            "linear_fc1|gate_up_proj|weight1": "gate up",
            "down_proj|down|linear_fc2|w2|weight2": "down",
        }.items()
    },
}
_MODULES = {None: "", "mlp": "ffn", "moe": "ffn", "ffn": "ffn", "mlp.gate": "router",
            "mlp.router": "router", "moe.router": "router"}  # fmt: skip


class Roles(NamedTuple):
    """What a weight is: its roles, in the order of its parts, and the number of its expert."""

    names: tuple[str, ...]
    expert: int = 0


def roles_of(name: str) -> Roles | None:
    """Return what a weight is, by its name; None: the name does not show it."""
    layer = _LAYER.fullmatch(name)
    if layer is None or layer["inner"] is None:
        matches = (roles for pattern, roles in _OUTSIDE.items() if re.fullmatch(pattern, name))
        role = next(matches, None)
        return None if role is None else Roles((role,))
    inner = layer["inner"].removeprefix("block.").removeprefix("transformer_layer.")
    expert = _EXPERT.search(inner)
    plain = _EXPERT.sub(lambda m: "experts." if m["a"] else "", inner)
    plain = re.sub(r"(?<=layer_norm)_weight$|\.(weight|gamma)$", "", plain)
    for pattern, roles in _INNER.items():
        if re.fullmatch(pattern, plain):
            number = int(expert["a"] or expert["b"]) if expert else 0
            stack = "mtp" if layer["mtp"] else "layers"
            return Roles(tuple(f"{stack}.{layer['layer']}.{r}" for r in roles.split()), number)
    return None


def module_role(path: str) -> str | None:
    """Return which module a path is: ``layer 3``, ``ffn of layer 3``, ``module layers.3.attention.out``; None: not known."""
    layer = _LAYER.fullmatch(path)
    if layer is not None and not layer["mtp"] and layer["inner"] in _MODULES:
        part = _MODULES[layer["inner"]]
        return f"{part} of layer {layer['layer']}" if part else f"layer {layer['layer']}"
    roles = roles_of(f"{path}.weight")
    is_single = roles is not None and len(roles.names) == 1 and ".experts." not in roles.names[0]
    return f"module {roles.names[0]}" if roles is not None and is_single else None

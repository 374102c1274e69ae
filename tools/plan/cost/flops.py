"""Count the FLOPs of a step, and the utilisation that a step time means, under each convention in use.

| convention | what it counts |
|---|---|
| `model` | matrix products of forward and backward (twice forward), causal attention: (S + 1) / 2 keys a token; the head and MTP |
| `full_attention` | the same, but S keys a token (Megatron-LM's formula, PaLM appendix B) |
| `six_n` | 6 x active parameters a token, attention left out (Kaplan et al. 2020) |
| `hardware` | `model` and what the backward pass recomputes (Korthikanti et al. 2022: HFU) |

Two per multiply-add. The embedding look-up is no product. A sliding window limits the keys of a token.
"""

from telechat_moe.recipe.arithmetic import Flops
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout


def keys_per_token(a: Architecture) -> float:
    """Return the mean number of keys that a query sees under a causal mask within its own document."""
    if a.pair_share:
        return a.pair_share * a.seq
    window = min(a.window or a.seq, a.seq)
    return window * (2 * a.seq - window + 1) / (2 * a.seq)


def layer_weights(a: Architecture, kind: str) -> float:
    """Return the elements of the matrices that compute one token in one layer."""
    if kind == "dense":
        return a.attention_weights + a.dense_weights
    return a.attention_weights + a.top_k * a.expert_weights + a.shared_weights


def model_flops(a: Architecture, *, keys: float | None = None) -> Flops:
    """Return the FLOPs of a token; `keys` a query where they are not the causal ones."""
    depth = a.mtp
    weights = sum(layer_weights(a, kind) for kind in a.layers)
    weights += depth * (2 * a.hidden**2 + layer_weights(a, a.layers[-1]))
    weights += (1 + depth) * a.vocab * a.hidden
    met = keys_per_token(a) if keys is None else keys
    scores = 2 * (len(a.layers) + depth) * a.heads * (a.head_dim + a.value_dim) * met
    return Flops(products=2.0 * weights, attention=scores)


def hardware_flops(a: Architecture, x: Layout) -> float:
    """Return the FLOPs of a token's training, recomputation included."""
    flops = model_flops(a)
    words = set(x.recompute.split("+"))
    layers = len(a.layers)
    share = 1.0 if x.recompute_layers is None else sum(x.recompute_layers) / layers
    share = share if x.recomputed is None else len(x.recomputed) / layers
    body = flops.products - 2 * (1 + a.mtp) * a.vocab * a.hidden
    attention = 2.0 * a.attention_weights * (layers + a.mtp)
    recompute = 0.0
    if "full" in words:
        recompute = body + flops.attention
        if "early_stop" in words:
            recompute -= (body - attention) / a.matrices
    else:
        shares = (
            ({"selective", "core_attention", "attention", "save_qkv"}, flops.attention),
            ({"attention"}, attention),
            ({"mlp", "experts"}, body - attention),
            ({"save_half"}, 0.5 * body),
            ({"save_qkv"}, 0.67 * (body - attention) + 0.45 * attention),
        )
        recompute = sum(flop for names, flop in shares if words & names)
    return flops.training + share * recompute


def utilisation(a: Architecture, x: Layout, step_s: float, peak_flops: float) -> dict[str, float]:
    """Return the share of the peak (FLOP/s of a device) that a step time means, by convention."""
    rate = x.global_batch * a.seq / (step_s * x.devices * peak_flops)
    return {
        "model": model_flops(a).training * rate,
        "full_attention": model_flops(a, keys=float(a.seq)).training * rate,
        "six_n": 6.0 * a.active_parameters * rate,
        "hardware": hardware_flops(a, x) * rate,
    }

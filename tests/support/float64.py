"""The whole model in NumPy float64, written from the papers' formulas, one token at a time.

Nothing here is taken from `telechat_moe.model` or from the references of `telechat_moe.ops`; what the
two share is names of weights. DeepSeek-V2 (MLA), DeepSeek-V3 (router, balance loss, MTP).
"""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Counts:
    """What routing did: pairs that each expert was chosen for, and pairs dropped, by MoE layer."""

    load: dict[str, np.ndarray] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass
class Result:
    lm: float
    mtp: float
    aux: float
    logits: np.ndarray
    counts: Counts

    @property
    def total(self) -> float:
        return self.lm + self.mtp + self.aux


def forward(config, weights, batch) -> Result:
    """Return the losses and logits of a batch."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    counts = Counts()
    visible = _visible(batch)
    table = w["embedding.weight"]
    head = table if config.tie_word_embeddings else w["head.weight"]
    h, aux = table[batch.input_ids], 0.0
    for i in range(config.num_hidden_layers):
        h, layer_aux = _block(config, w, f"layers.{i}", h, batch.position_ids, visible, counts)
        aux += layer_aux
    h = rms_norm(h, w["norm.weight"], config.rms_norm_eps)
    logits = h @ head.T
    lm = _cross_entropy(logits, batch.labels, batch.loss_mask)

    mtp = 0.0
    depth = config.num_nextn_predict_layers
    for k in range(1, depth + 1):
        name, eps = f"mtp.{k - 1}", config.rms_norm_eps
        e = rms_norm(table[_ahead(batch.labels, k - 1)], w[f"{name}.embed_norm.weight"], eps)
        pair = np.concatenate([e, rms_norm(h, w[f"{name}.hidden_norm.weight"], eps)], -1)
        h = pair @ w[f"{name}.proj.weight"].T
        h, layer_aux = _block(config, w, f"{name}.block", h, batch.position_ids, visible, counts)
        aux += layer_aux
        h = rms_norm(h, w[f"{name}.norm.weight"], eps)
        loss = _cross_entropy(h @ head.T, _ahead(batch.labels, k), _ahead(batch.loss_mask, k))
        mtp += config.mtp_loss_factor / depth * loss
    return Result(lm, mtp, aux, logits.reshape(-1, logits.shape[-1]), counts)


def _ahead(x, k):
    """Element i + k at place i of each row; 0 beyond the end."""
    return np.concatenate([x[:, k:], np.zeros_like(x[:, :k])], 1)


def _visible(batch):
    B, S = batch.input_ids.shape
    if batch.attention_mask is not None:
        return batch.attention_mask[:, 0] == 0
    return np.broadcast_to(np.tril(np.ones((S, S), bool)), (B, S, S))


def _cross_entropy(logits, labels, mask):
    total = 0.0
    for row, label, keep in zip(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), mask.reshape(-1), strict=True
    ):
        total += keep * (_log_sum_exp(row) - row[label])
    return total / mask.sum() if mask.sum() else 0.0


def _log_sum_exp(x):
    return x.max() + math.log(np.exp(x - x.max()).sum())


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def _block(config, w, name, x, position, visible, counts):
    eps = config.rms_norm_eps
    normed = rms_norm(x, w[f"{name}.input_norm.weight"], eps)
    h = x + attention(config, w, f"{name}.attention", normed, position, visible)
    normed = rms_norm(h, w[f"{name}.ffn_norm.weight"], eps)
    if f"{name}.ffn.gate.weight" in w:
        return h + _mlp(w, f"{name}.ffn", normed), 0.0
    y, aux = moe(config, w, f"{name}.moe", normed, counts)
    return h + y, aux


def _mlp(w, name, x):
    gate, up = x @ w[f"{name}.gate.weight"].T, x @ w[f"{name}.up.weight"].T
    return (silu(gate) * up) @ w[f"{name}.down.weight"].T


def rotate(x, position, theta, interleave):
    """Turn each pair of the last dimension by position * theta^(-2 i / R), as complex numbers."""
    R = x.shape[-1]
    angle = position[..., None] * theta ** (-2 * np.arange(R // 2) / R)
    pair = (
        x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., : R // 2] + 1j * x[..., R // 2 :]
    )
    turned = pair * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def attention(config, w, name, x, position, visible):
    """Multi-head latent attention, head by head."""
    N, nope, v_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    width, rank = nope + config.qk_rope_head_dim, config.kv_lora_rank

    def latent_norm(c, which):
        if not config.qk_layernorm:
            return c
        return rms_norm(c, w[f"{name}.{which}.weight"], config.rms_norm_eps)

    def turn(u):
        return rotate(u, position, config.rope_theta, config.rope_interleave)

    if config.q_lora_rank:
        c = latent_norm(x @ w[f"{name}.q_down.weight"].T, "q_norm")
        q = c @ w[f"{name}.q_up.weight"].T
    else:
        q = x @ w[f"{name}.q_proj.weight"].T
    down = x @ w[f"{name}.kv_down.weight"].T
    k_rope = turn(down[..., rank:])
    kv = latent_norm(down[..., :rank], "kv_norm") @ w[f"{name}.kv_up.weight"].T
    heads = []
    for n in range(N):
        q_n = q[..., n * width : (n + 1) * width]
        kv_n = kv[..., n * (nope + v_dim) : (n + 1) * (nope + v_dim)]
        q_n = np.concatenate([q_n[..., :nope], turn(q_n[..., nope:])], -1)
        k_n = np.concatenate([kv_n[..., :nope], k_rope], -1)
        scores = np.einsum("bid,bjd->bij", q_n, k_n) / math.sqrt(width)
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(p / p.sum(-1, keepdims=True) @ kv_n[..., nope:])
    return np.concatenate(heads, -1) @ w[f"{name}.out.weight"].T


def choose(config, biased):
    """Return the experts of one token, best first, from its scores plus bias."""
    E, groups = len(biased), max(1, config.n_group)
    allowed = list(range(E))
    if groups > 1:
        size = E // groups
        best = max(1, config.num_experts_per_tok // config.topk_group)
        score = [sum(sorted(biased[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -score[g])[: config.topk_group]
        allowed = [e for e in allowed if e // size in kept]
    return sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_tok]


def moe(config, w, name, x, counts):
    """Return the output of one MoE layer ``[B, S, H]`` and its balance and z-losses."""
    B, S, H = x.shape
    E, K = config.n_routed_experts, config.num_experts_per_tok
    tokens = x.reshape(-1, H)
    logits = tokens @ w[f"{name}.router.weight"].T
    scores = 1 / (1 + np.exp(-logits))
    bias = w[f"{name}.router.expert_bias"] if config.moe_router_enable_expert_bias else np.zeros(E)
    pairs = []  # (token, expert, weight), token by token, best expert first
    for t, s in enumerate(scores):
        chosen = choose(config, s + bias)
        norm = sum(s[e] for e in chosen) if config.norm_topk_prob and K > 1 else 1.0
        pairs += [(t, e, config.routed_scaling_factor * s[e] / norm) for e in chosen]

    kept = _keep(config, pairs)
    counts.load[name] = np.bincount([e for _, e, _ in pairs], minlength=E)
    counts.dropped[name] = len(pairs) - len(kept)
    y = np.zeros_like(tokens)
    for t, e, weight in kept:
        gate = tokens[t] @ w[f"{name}.experts.gate"][e]
        up = tokens[t] @ w[f"{name}.experts.up"][e]
        y[t] += weight * ((silu(gate) * up) @ w[f"{name}.experts.down"][e])
    if f"{name}.shared.gate.weight" in w:
        y += _mlp(w, f"{name}.shared", tokens)
    aux = balance_loss(config, scores, [(t, e) for t, e, _ in pairs], B, S)
    aux += (config.moe_z_loss_coeff or 0) * np.mean([_log_sum_exp(row) ** 2 for row in logits])
    return y.reshape(x.shape), aux


def _keep(config, pairs):
    """Return the pairs for which their expert has room."""
    if not config.moe_token_drop_policy:
        return pairs
    capacity = math.ceil(config.moe_expert_capacity_factor * len(pairs) / config.n_routed_experts)
    kept = []
    for expert in range(config.n_routed_experts):
        own = [p for p in pairs if p[1] == expert]
        if config.moe_token_drop_policy == "probs":
            own.sort(key=lambda p: -p[2])
        kept += own[:capacity]
    return kept


def balance_loss(config, scores, pairs, B, S):
    """DeepSeek-V3, equations 17 to 20; `aux_loss` takes the whole micro-batch for one sequence."""
    E, K = config.n_routed_experts, config.num_experts_per_tok
    kind = config.moe_router_load_balancing_type
    if kind == "none":
        return 0.0
    length = S if kind == "seq_aux_loss" else B * S
    losses = []
    for start in range(0, B * S, length):
        own = [(t, e) for t, e in pairs if start <= t < start + length]
        f = [E / (K * length) * sum(1 for _, e in own if e == i) for i in range(E)]
        normed = [s / s.sum() for s in scores[start : start + length]]
        P = np.mean(normed, 0)
        losses.append(sum(f[i] * P[i] for i in range(E)))
    return config.moe_aux_loss_coeff * float(np.mean(losses))

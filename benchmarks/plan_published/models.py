"""Published architectures by name, from `models.yaml`."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.tools.plan.cost.architecture import Architecture, LayerKind

FILE = Path(__file__).parent / "models.yaml"


@lru_cache(maxsize=1)
def _entries() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [(re.compile(entry["match"]), entry) for entry in raw]


def published(name: str, **changes: Any) -> Architecture | None:
    """Return the published architecture that a table's name means; None: unknown.

    Args:
        name: Such as `Llama 3.1 70b 24.09 BF16` or `Qwen3_30B_a3B`.
        changes: Fields to set instead, such as `seq`.
    """
    key = re.sub(r"[^a-z0-9.]", "", name.lower())
    for pattern, entry in _entries():
        if pattern.search(key):
            return _architecture(entry, changes)
    return None


def _architecture(entry: dict[str, Any], changes: dict[str, Any]) -> Architecture:
    e = {**entry, **{k: v for k, v in changes.items() if v}}
    count, experts = int(e["layers"]), int(e.get("experts", 0))
    dense = min(int(e.get("dense", 0)), count) if experts else count
    layers: tuple[LayerKind, ...] = ("dense",) * dense + ("moe",) * (count - dense)
    heads = int(e["heads"])
    mla = e.get("mla")
    q_rank, kv_rank, nope, rope, value = mla or (0, 0, 0, 0, 0)
    kv = heads if mla else int(e.get("kv_heads", 0)) or heads
    seq = int(e["seq"])
    return Architecture(
        name=e["name"],
        hidden=int(e["hidden"]),
        layers=layers,
        attention="mla" if mla else "gqa" if kv != heads else "mha",
        heads=heads,
        kv_heads=kv,
        head_dim=nope + rope if mla else int(e.get("head_dim", 0)) or int(e["hidden"]) // heads,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope=nope,
        qk_rope=rope,
        v_head_dim=value,
        ffn=int(e.get("ffn", 0)) or 4 * int(e["hidden"]),
        gated=bool(e.get("gated", True)),
        experts=experts,
        top_k=int(e.get("top_k", 0)),
        shared_experts=int(e.get("shared_experts", 0)),
        moe_ffn=int(e.get("moe_ffn", 0)),
        shared_ffn=int(e.get("shared_ffn", 0)),
        mtp=int(e.get("mtp", 0)),
        vocab=int(e["vocab"]),
        tied=bool(e.get("tied", False)),
        seq=seq,
        window=int(e.get("window", 0)),
        positions=int(e.get("positions", 0)) or (seq if str(e["name"]).startswith("MPT") else 0),
        biases=bool(e.get("biases", False)),
    )

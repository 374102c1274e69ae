"""Published architectures by name, from `models.yaml`."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.tools.plan.cost.architecture import Architecture, LayerKind

FILE = Path(__file__).parent / "models.yaml"
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope", "qk_rope", "v_head_dim")
"""Numbers of an entry's `mla`."""


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
    count = e["layers"]
    dense = min(e.get("dense", 0), count) if e.get("experts") else count
    layers: tuple[LayerKind, ...] = ("dense",) * dense + ("moe",) * (count - dense)
    if e["name"].startswith("MPT"):
        e.setdefault("positions", e["seq"])
    ranks = dict(zip(MLA, e.get("mla", ()), strict=False))
    own = {k: v for k, v in e.items() if k not in ("layers", "dense", "mla", "match", "source")}
    return Architecture(layers=layers, **ranks, **own)

"""Published architectures by name, from `models.yaml`."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.plan_published.cells import MissingError
from telechat_moe.tools.plan.cost.architecture import Architecture, LayerKind

MULTIMODAL = re.compile(r"qwen[\d.]*vl|cogvlm|internvl|llava|blip|clip|mllama|omni")
"""Names of models with an encoder of images or sound beside the decoder."""

ACTIVE = re.compile(r"\d[bt]a\d")
"""Names that give the active parameters after all, such as `39B-A12B`: mixtures of experts."""

FILE = Path(__file__).parent / "models.yaml"
MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope", "qk_rope", "v_head_dim")
"""Numbers of an entry's `mla`."""


@lru_cache(maxsize=1)
def _entries() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [(re.compile(entry["match"]), entry) for entry in raw]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def checked_kind(name: str, architecture: Architecture | None, experts: int) -> None:
    """Refuse a name whose model is not a dense decoder, and whose other parts nothing describes.

    Args:
        name: As the table writes it.
        architecture: The published architecture of this name.
        experts: How many the row gives; at most 1: none.

    Raises:
        MissingError: The model is multimodal, or a mixture of experts without a published architecture.
    """
    if MULTIMODAL.search(_key(name)):
        raise MissingError("a term for the encoder of a multimodal model")
    if (experts > 1 or ACTIVE.search(_key(name))) and not (architecture and architecture.experts):
        raise MissingError(f"architecture of the mixture {name}")


def published(name: str, **changes: Any) -> Architecture | None:
    """Return the published architecture that a table's name means; None: unknown.

    Args:
        name: Such as `Llama 3.1 70b 24.09 BF16` or `Qwen3_30B_a3B`.
        changes: Fields to set instead, such as `seq`.
    """
    key = _key(name)
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

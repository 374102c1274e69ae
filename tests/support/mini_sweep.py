"""Write sweep files of the mini recipe (12 steps, a few thousand parameters)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mini_recipe as mini

TINY = "telechat3_moe/pretrain_tiny.yaml"
AT = "model.model_config."
KEYS = [f"{AT}n_routed_experts", f"{AT}num_experts_per_tok", f"{AT}moe_intermediate_size"]


def row(*values: object) -> list[str]:
    """Return the overrides of a structure: experts, experts for a token, and their width."""
    return [f"{key}={json.dumps(value)}" for key, value in zip(KEYS, values, strict=True)]


VARIANTS = {"few": row(4, 1, 32), "more": row(8, 2, 16), "many": row(16, 4, 8)}
"""Equal in parameters, active parameters and FLOPs but for the routers."""


def sweep(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a sweep of three variants and two seeds; a change that is None removes the key."""
    common = {
        **mini.OVERRIDES,
        "train_dataset.data_loader.config.data_path": ["1", f"{folder}/train"],
        "telechat_moe.evaluation.data_path": ["1", f"{folder}/valid"],
        "telechat_moe.evaluation.interval": 4,
        "telechat_moe.sample": None,
        "train_dataset.data_loader.sizes": [mini.STEPS * 4, 0, 0],
    }
    for key in KEYS:
        common.pop(key, None)
    texts = [f"{key}={_text(value)}" for key, value in common.items()]
    plain = {
        "recipe": TINY,
        "output_dir": f"{folder}/sweep",
        "seeds": [1, 2],
        "set": texts,
        "variants": dict(VARIANTS),
    }
    return {k: v for k, v in {**plain, **changes}.items() if v is not None}


def write(folder: Path, plain: Mapping[str, Any], name: str = "sweep.yaml") -> Path:
    """Write a sweep file, a line for each key and each row."""
    lines: list[str] = []
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            lines += [f"{key}:", *(f"  {_text(k)}: {_text(v)}" for k, v in value.items())]
        else:
            lines.append(f"{key}: {_text(value)}")
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def line_of(path: Path, start: str) -> int:
    """Return the line of a file that begins so."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip().startswith(start))


def _text(value: object) -> str:
    return json.dumps(value)

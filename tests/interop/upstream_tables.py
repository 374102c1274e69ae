"""The tables of benchmarks/upstream/tables.md. ``PYTHONPATH=. python tests/interop/upstream_tables.py`` prints them.

Operators are compiled from the 105B recipe on one device, two layers and MTP, at a small width: which primitives
there are does not depend on it. Parameters have the recipe's own width.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.upstream.__main__ import main
from telechat_moe.interop.upstream_names import pairs
from telechat_moe.recipe import load

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
SMALL = [
    f"model.model_config.{item}"
    for item in (
        "hidden_size=64",
        "intermediate_size=96",
        "moe_intermediate_size=32",
        "moe_shared_expert_intermediate_size=32",
        "n_routed_experts=16",
        "num_attention_heads=4",
        "num_key_value_heads=4",
        "vocab_size=256",
        "q_lora_rank=24",
        "kv_lora_rank=16",
    )
]


def compared(*arguments: str) -> dict[str, Any]:
    """Return what ``python -m benchmarks.upstream`` finds; its exit code under ``exit``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        with contextlib.redirect_stdout(sys.stderr):
            code = main([RECIPE, *arguments, "--json", str(path)])
        return {"exit": code, **json.loads(path.read_text())}


def small(*overrides: str) -> list[str]:
    """Return the arguments that set the small width, and overrides."""
    return [x for item in (*SMALL, *overrides) for x in ("--set", item)]


def parameter_lines() -> list[str]:
    """Return the table of a dense layer, the MoE of the next, and what stands around them."""
    config = load(RECIPE).model_config
    rows = []
    for pair in pairs(config):
        where = pair.upstream.split(".")
        if "transformer_layer" in where or (where[1] == "layers" and int(where[2]) > 1):
            continue
        if where[:3] == ["decoder", "layers", "1"] and where[3] != "mlp":
            continue
        ours = ", ".join(f"`{n}` {list(s)}" for n, s in zip(pair.names, pair.shapes, strict=True))
        rows.append((f"`{pair.upstream}`", str(list(pair.shape)), ours, pair.layout))
    return lines(("MindFormers", "shape", "ours", "layout"), rows)


def operator_lines(found: dict[str, Any]) -> list[str]:
    """Return the table of operators."""
    return lines(("part", "MindFormers", "ours"), found["operators"])


def lines(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    cells = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


if __name__ == "__main__":
    found = operator_lines(compared("--one-device", *small()))
    sys.stdout.write("\n".join([*parameter_lines(), "", *found, ""]))

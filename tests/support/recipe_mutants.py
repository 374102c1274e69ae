"""Seeded mutants of the shipped recipes, and what an accepted one must satisfy.

Independent of the loader: positions and values come from PyYAML, the rules of `assert_meaning` are
written again here from the definitions.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import yaml
from yaml_edit import RECIPES, compose, recipe_text

NAMES = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml"))
OTHER_NAMES = {
    "mtp_loss_scaling_factor": "mtp_loss_factor",
    "moe_router_dtype": "router_dense_type",
    "moe_router_score_function": "scoring_func",
    "virtual_pipeline_model_parallel_size": "pp_interleave_num",
}
NUMBER_TRAPS = ("1e-5", "2E5", "017", "0o17", "0x1f", "1:30", "1_000", ".inf", "1.0e8", "12e3")
BOOL_TRAPS = ("yes", "no", "On", "OFF", "Yes", "NO")
LINES = ("---", "a: &a [*a]", "!!python/name:os.system x", "\tx: 1", "<<: *nope", "? [1]\n: 2",
         "%YAML 1.2", "x: !!binary aGk=", "seed: 42", "run_mode: train", "on: 1", "? seed\n: 3",
         "{", "]", "- 1", ": 1", "'", "x: |\n y", "&x seed: 1", "...", "\x00", "\ufeffseed: 1",
         "1: 2", "null: 1", "deep: " + "[" * 80 + "]" * 80, "x: 2024-01-01")  # fmt: skip


@dataclasses.dataclass
class Base:
    """A recipe with the places of its keys and scalars."""

    name: str
    text: str
    keys: list[tuple[int, int]]
    scalars: list[tuple[int, int, str]]


def base(name: str, text: str) -> Base:
    keys: set[tuple[int, int]] = set()
    scalars: set[tuple[int, int, str]] = set()

    def visit(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                keys.add((key.start_mark.index, key.end_mark.index))
                visit(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                visit(item)
        else:
            span = node.start_mark.index, node.end_mark.index
            if text[span[0]] == "&":  # keep the anchor
                span = span[0] + text[span[0] :].index(" ") + 1, span[1]
            scalars.add((*span, node.tag.rpartition(":")[2]))

    visit(compose(text))
    return Base(name, text, sorted(keys), sorted(scalars))


def known_keys() -> set[str]:
    import json

    schema = json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))
    return {key for section in schema["$defs"].values() for key in section["properties"]}


class Mutator:
    """Makes one mutant per call; the same seed gives the same mutants."""

    def __init__(self, seed: int, texts: dict[str, str] | None = None) -> None:
        self.rng = random.Random(seed)
        texts = texts or {name: recipe_text(name) for name in NAMES}
        self.bases = [base(name, text) for name, text in texts.items()]
        self.known = known_keys()
        self.kinds = [
            *("typo", "duplicate", "wrong_type", "trap", "delete", "swap", "number", "number"),
            *("corrupt", "corrupt", "truncate", "line", "alias", "delete_key", "word", "two"),
        ]

    def mutant(self) -> tuple[str, str, bool]:
        """Return (kind, text, must be refused)."""
        kind, source = self.rng.choice(self.kinds), self.rng.choice(self.bases)
        text, bad = getattr(self, kind)(source)
        return f"{kind} of {source.name}", text, bad

    def replace(self, text: str, start: int, end: int, new: str) -> str:
        return text[:start] + new + text[end:]

    def typo(self, b: Base) -> tuple[str, bool]:
        start, end = self.rng.choice(b.keys)
        key = b.text[start:end]
        at = self.rng.randrange(len(key))
        new = self.rng.choice(
            [
                key[:at] + key[at + 1 :],
                key[:at] + key[at] + key[at:],
                key[:at] + self.rng.choice("aeixz_") + key[at + 1 :],
                key[:at] + key[at:][::-1],
                key.upper(),
                key + "s",
            ]
        )
        bad = new not in self.known and bool(new)
        return self.replace(b.text, start, end, new), bad

    def duplicate(self, b: Base) -> tuple[str, bool]:
        lines = b.text.splitlines(keepends=True)
        start, _ = self.rng.choice([k for k in b.keys if self._simple(b.text, k)])
        number = b.text[:start].count("\n")
        return "".join([*lines[: number + 1], *lines[number:]]), True

    def _simple(self, text: str, key: tuple[int, int]) -> bool:
        """The key begins its line and its value is a scalar or alias without an anchor."""
        line_start = text.rfind("\n", 0, key[0]) + 1
        rest = text[key[1] : text.index("\n", key[1])]
        return not text[line_start : key[0]].strip() and rest[2:3] not in ("", "&", "[", "#", "{")

    def wrong_type(self, b: Base) -> tuple[str, bool]:
        start, end, tag = self.rng.choice(b.scalars)
        new = {"int": "'zzz'", "float": "[1, 2]", "bool": "7", "str": "[[]]", "null": "{a: 1}"}[tag]
        return self.replace(b.text, start, end, new), True

    def trap(self, b: Base) -> tuple[str, bool]:
        places = [s for s in b.scalars if s[2] in ("int", "float", "bool")]
        start, end, tag = self.rng.choice(places)
        new = self.rng.choice(BOOL_TRAPS if tag == "bool" else NUMBER_TRAPS)
        return self.replace(b.text, start, end, new), True

    def delete(self, b: Base) -> tuple[str, bool]:
        lines = b.text.splitlines(keepends=True)
        del lines[self.rng.randrange(len(lines))]
        return "".join(lines), False

    def delete_key(self, b: Base) -> tuple[str, bool]:
        start, end = self.rng.choice(b.keys)
        return self.replace(b.text, start, end, ""), False

    def swap(self, b: Base) -> tuple[str, bool]:
        (s1, e1, _), (s2, e2, _) = sorted(self.rng.sample(b.scalars, 2))
        t = b.text
        return t[:s1] + t[s2:e2] + t[e1:s2] + t[s1:e1] + t[e2:], False

    def number(self, b: Base) -> tuple[str, bool]:
        start, end, tag = self.rng.choice([s for s in b.scalars if s[2] in ("int", "float")])
        value = yaml.safe_load(b.text[start:end])
        new = self.rng.choice(
            [value * 2, value + 1, value - 1, -value, 0, value // 2, value * 1000, value + 0.5, 3]
        )
        text = repr(float(new)) if tag == "float" or isinstance(new, float) else str(new)
        return self.replace(
            b.text, start, end, text.replace("e-", ".e-" if "." not in text else "e-")
        ), False

    def word(self, b: Base) -> tuple[str, bool]:
        start, end, _ = self.rng.choice(b.scalars)
        new = self.rng.choice(
            ["True", "False", "null", "''", "x", "1", "0", "-1", "[]", "{}", "1.5"]
        )
        return self.replace(b.text, start, end, new), False

    def corrupt(self, b: Base) -> tuple[str, bool]:
        text = b.text
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            at = self.rng.randrange(len(text))
            new = self.rng.choice(["", "", *"\n\t :-[]{}&*!|>'\"%#@`,?0123456789abcxyz_\x07é"])
            text = text[:at] + new + text[at + self.rng.randrange(2) :]
        return text, False

    def truncate(self, b: Base) -> tuple[str, bool]:
        return b.text[: self.rng.randrange(len(b.text))], False

    def line(self, b: Base) -> tuple[str, bool]:
        lines = b.text.splitlines()
        at = self.rng.randrange(len(lines) + 1)
        return "\n".join([*lines[:at], self.rng.choice(LINES), *lines[at:]]) + "\n", False

    def alias(self, b: Base) -> tuple[str, bool]:
        start, end, _ = self.rng.choice(b.scalars)
        new = self.rng.choice(
            ["*batch_size", "*train_dataset", "*nope", "&dp 4", "*dp", "*expert_num"]
        )
        return self.replace(b.text, start, end, new), False

    def two(self, b: Base) -> tuple[str, bool]:
        first, _ = self.number(b)
        second = self.rng.choice(self.bases)
        cut = self.rng.randrange(len(first))
        return first[:cut] + second.text[cut:], False


def has_duplicates(text: str) -> bool:
    def visit(node: Any, seen: set[int]) -> bool:
        if id(node) in seen:
            return False
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [k.value for k, _ in node.value]
            return len(set(keys)) < len(keys) or any(visit(v, seen) for _, v in node.value)
        if isinstance(node, yaml.SequenceNode):
            return any(visit(v, seen) for v in node.value)
        return False

    return visit(compose(text), set())


def assert_same(value: Any, said: Any, path: str) -> None:
    """Every leaf of the plain data is what the recipe says, none is ignored."""
    if isinstance(value, dict) and dataclasses.is_dataclass(said):
        for key, below in value.items():
            name = OTHER_NAMES.get(key, key)
            assert hasattr(said, name), f"{path}.{key} is ignored"
            assert_same(below, getattr(said, name), f"{path}.{key}")
    elif isinstance(value, dict):
        assert isinstance(said, dict), path
        assert set(value) == set(said), path
        for key, below in value.items():
            assert_same(below, said[key], f"{path}.{key}")
    elif isinstance(value, list):
        assert isinstance(said, list), path
        assert len(value) == len(said), path
        for index, (one, other) in enumerate(zip(value, said, strict=True)):
            assert_same(one, other, f"{path}.{index}")
    else:
        assert value == said, f"{path}: {value!r} was read as {said!r}"
        same = type(value) is type(said) or (type(value), type(said)) == (int, float)
        assert same, f"{path}: {value!r} was read as {said!r}"
        assert not isinstance(value, float) or math.isfinite(value), path


def assert_meaning(data: dict[str, Any]) -> None:
    """The main cross-field rules, from their definitions, on plain data."""
    m = data["model"]["model_config"]
    p = {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "expert_parallel": 1}
    p |= {"micro_batch_num": 1, "context_parallel": 1} | (data.get("parallel_config") or {})
    dp, tp, pp, ep = (p[k] for k in list(p)[:4])
    devices = dp * tp * pp * p["context_parallel"]
    assert data.get("use_parallel", False) or devices == 1
    assert m["num_attention_heads"] % tp == 0
    assert m["vocab_size"] % tp == 0
    assert m["n_routed_experts"] % ep == 0
    assert m["num_experts_per_tok"] <= m["n_routed_experts"]
    assert m["first_k_dense_replace"] <= m["num_hidden_layers"]
    assert m["qk_rope_head_dim"] % 2 == 0
    assert m["n_group"] == m["topk_group"] == 0 or m["n_routed_experts"] % m["n_group"] == 0
    assert m.get("num_nextn_predict_layers", 0) == 0 or "mtp_loss_factor" in m
    assert m["seq_length"] <= m.get("max_position_embeddings", 4096)
    interleave = (data.get("parallel", {}).get("pipeline_config") or {}).get("pipeline_interleave")
    vpp = m.get("pp_interleave_num", 1) if interleave else 1
    extra = m.get("offset", 0)
    flat = [n for row in extra for n in (row if isinstance(row, list) else [row])] if isinstance(
        extra, list
    ) else [extra]  # fmt: skip
    if pp > 1:
        rest = m["num_hidden_layers"] % (pp * vpp)
        assert sum(flat) == rest
        assert p["micro_batch_num"] >= pp
    if data["run_mode"] in ("train", "finetune"):
        config = data["train_dataset"]["data_loader"]["config"]
        assert config["seq_length"] == m["seq_length"]
        assert data["train_dataset_task"]["dataset_config"] == data["train_dataset"]
        columns = data["train_dataset"].get("input_columns")
        if columns:
            assert ("attention_mask" in columns) == config.get("create_attention_mask", True)
        strategy = data.get("parallel", {}).get("dataset_strategy")
        if isinstance(strategy, list):
            assert all(axes[0] == dp for axes in strategy)
        assert ("lr_schedule" in data) != ("grouped_lr_schedule" in data)

"""Words that published tables write, and what they mean: a word that is not here is an error, never a default."""

from collections.abc import Mapping
from typing import Any, TypeVar

from benchmarks.plan_published.cells import MissingError
from telechat_moe.tools.plan.cost.layout import Compute

Meaning = TypeVar("Meaning")


class WordError(Exception):
    """A cell whose word is not known; says the column and the words that are."""

    def __init__(self, column: str, text: str, words: Mapping[str, object]) -> None:
        listed = ", ".join(word or "(empty)" for word in words)
        super().__init__(f"column {column}: {text[:40]!r} is not known; known are {listed}")


def meaning(row: Mapping[str, Any], column: str, words: Mapping[str, Meaning]) -> Meaning:
    """Return what the word of a cell means.

    Raises:
        WordError: It is none of `words`.
    """
    text = _text(row, column)
    if text not in words:
        raise WordError(column, text, words)
    return words[text]


def _text(row: Mapping[str, Any], column: str) -> str:
    cell = row.get(column)
    return "" if cell is None else str(cell).strip().lower()


PRECISION: dict[str, Compute] = {
    "bf16": "bf16", "bfloat16": "bf16", "amp_bf16": "bf16", "fp16": "fp16", "float16": "fp16", "fp8": "fp8", "amp_fp8": "fp8",
    "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-sc": "fp8", "fp8-mx": "fp8", "fp8_tensorwise": "fp8", "fp8_rowwise": "fp8",
    "mxfp8": "fp8", "e4m3": "fp8", "hybrid": "fp8", "fp4": "fp4", "nvfp4": "fp4",
}  # fmt: skip
"""Types of matrix products; float8's differ in how they scale."""

DISPATCHER: dict[str, dict[str, object] | None] = {
    "alltoall": {"hierarchical": False, "permute_bytes": 16},
    "deepep": {"hierarchical": True, "permute_bytes": 16},
    "hybridep": {"hierarchical": True, "permute_bytes": 8},
    "allgather": None,
    "flex": None,
}
"""Fields of `Stack` by the way tokens reach their experts; None: no term prices it, or it does not say which (`flex`)."""

RECOMPUTE = {
    "": "none", "none": "none", "false": "none", "full": "full", "full_uniform": "full", "true": "full",
    "selective": "selective", "sel": "selective", "full+early_stop": "full+early_stop",
}  # fmt: skip
"""Whole policies. Megatron-LM's `uniform` recomputes every layer; `full_block` needs a number of layers (`block_layers`)."""

MODULES: dict[str, str | None] = {
    "norm": "norm", "layernorm": "norm", "act": "activation", "activation": "activation", "moe_act": "activation",
    "attn": "core_attention", "core_attn": "core_attention", "core_attention": "core_attention", "mlp": "mlp", "moe": "experts",
    "mla_up_proj": None, "shared_experts": None,
}  # fmt: skip
"""Modules by the words of MindSpeed and Megatron-LM; None: no term prices it."""


def recompute_of(row: Mapping[str, Any], column: str) -> str:
    """Return `Layout.recompute` of a cell: a policy, or modules joined by commas, blanks or `+`.

    Raises:
        WordError: A word is not known.
        MissingError: No term prices the recomputation of a module.
    """
    text = _text(row, column)
    if text in RECOMPUTE:
        return RECOMPUTE[text]
    words = text.strip("[]").replace("+", " ").replace(",", " ").split()
    parts: list[str] = []
    for word in words or [text]:
        if word not in MODULES:
            raise WordError(column, word, RECOMPUTE | MODULES | {"full_block": ""})
        module = MODULES[word]
        if module is None:
            raise MissingError(f"a term for the recomputation of {word}")
        parts.append(module)
    return "+".join(dict.fromkeys(parts))


def dispatcher_of(row: Mapping[str, Any], column: str) -> dict[str, object]:
    """Return the fields of `Stack` that a cell's dispatcher means; none if the cell is empty.

    Raises:
        WordError: The dispatcher is not known.
        MissingError: No term prices it.
    """
    if not _text(row, column):
        return {}
    fields = meaning(row, column, DISPATCHER)
    if fields is None:
        raise MissingError(f"a term for the dispatcher {_text(row, column)}")
    return fields

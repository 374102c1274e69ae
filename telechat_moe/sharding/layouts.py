"""How each module is split: one table, in logical axes.

A layout is a word for each dimension, the words name logical axes, and ``.`` is a dimension that every device
holds whole. ``telechat-moe layouts RECIPE`` prints the table with the devices of a recipe.

============  ==============================  ============================================================
word          axes of the mesh                dimension
============  ==============================  ============================================================
batch         dp                              sequences of a batch
seq           cp                              positions within a sequence
token         dp, cp                          rows ``T = B * S`` inside tensor-parallel regions
whole         dp                              rows ``T``, with all positions of each sequence (keys, values)
stream        dp, cp, and tp with sp          rows ``T`` of the residual stream
device        dp, cp, tp                      rows ``T`` in the router and among experts
tp            tp                              heads, widths, vocabulary
expert        inner axes (ep)                 experts
width         tp with ``expert_tp``, else -   width of an expert
============  ==============================  ============================================================
"""

from typing import NamedTuple

from telechat_moe.sharding.mesh import Mesh

WORDS = ("batch", "seq", "token", "whole", "stream", "device", "tp", "expert", "width")


class LayoutRule(NamedTuple):
    """Placement of one primitive of a module.

    Attributes:
        inputs: A layout for each tensor input; ``""`` is a scalar.
        outputs: Layouts of the outputs; needed where MindSpore cannot derive them.
        kind: ``layout``; ``own``: outputs are given and MindSpore does not check them
            (``self_define_shard``), for computed axes that are whole; ``tuple``: MindSpore's tuple
            strategy, for reductions over a split axis and for Gather; ``coarse``: one axis a dimension, of dp, cp
            and tp (FlashAttentionScore takes no other).
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    kind: str = "layout"


def _layout(*inputs: str, out: str | None = None) -> LayoutRule:
    return LayoutRule(inputs, () if out is None else (out,))


def _own_rule(*inputs: str, out: str) -> LayoutRule:
    return LayoutRule(inputs, (out,), "own")


def _tuple(*inputs: str) -> LayoutRule:
    return LayoutRule(inputs, (), "tuple")


# Module -> primitive -> rule. Modules whose rules depend on their position have a name after a dot.
TABLE: dict[str, dict[str, LayoutRule]] = {
    "Embedding": {
        "to_residual": _layout("stream ."),
    },
    "CausalLM.tied": {
        "head_cast": _layout("token ."),
        "head_table_cast": _layout("tp ."),
        "head_matmul": _layout("token .", "tp ."),
    },
    "TableRows": {"gather": _tuple("tp .", "token")},
    "RopeTable": {
        "gather_cos": _tuple(". .", "batch seq"),
        "gather_sin": _tuple(". .", "batch seq"),
    },
    "AttentionMask": {
        "to_float": _layout("batch . seq ."),
        "scale": _layout("batch . seq .", ""),
    },
    "RMSNorm": {
        "to_compute": _layout("stream ."),
        "weight_to_compute": _layout("."),
        "square": _layout("stream ."),
        "mean": _own_rule("stream .", out="stream ."),
        "add_eps": _layout("stream .", ""),
        "rsqrt": _layout("stream ."),
        "normalize": _layout("stream .", "stream ."),
        "scale": _layout("stream .", "."),
        "to_out": _layout("stream ."),
        "rms_norm": _layout("stream .", "."),
    },
    "AddRMSNorm": {"add": _layout("stream .", "stream .")},
    # Products: the weight of a Linear is [outputs, inputs].
    "Linear.replicated": {
        "cast": _layout("stream ."),
        "cast_weight": _layout(". ."),
        "matmul": _layout("stream .", ". ."),
    },
    "Linear.column": {
        "cast": _layout("token ."),
        "cast_weight": _layout("tp ."),
        "matmul": _layout("token .", "tp ."),
    },
    "Linear.column_whole": {
        "cast": _layout("whole ."),
        "cast_weight": _layout("tp ."),
        "matmul": _layout("whole .", "tp ."),
    },
    "Linear.row": {
        "cast": _layout("token tp"),
        "cast_weight": _layout(". tp"),
        "matmul": _layout("token tp", ". tp", out="stream ."),
    },
    "MultiLatentAttention": {
        "split_latent": _layout("stream ."),
        "split_query": _layout("batch seq tp ."),
        "split_key_value": _layout("batch . tp ."),
        "concat_query": _own_rule("batch seq tp .", "batch seq tp .", out="batch seq tp ."),
        "concat_key": _own_rule("batch . tp .", "batch . tp .", out="batch . tp ."),
        "query_heads_first": _layout("batch seq tp ."),
        "heads_first": _layout("batch . tp ."),
        "tokens_first": _layout("batch tp seq ."),
    },
    "KeptRows": {
        "add": _layout("batch . .", "batch . ."),
        "nothing": _layout("batch . .", ""),
        "always": _layout("batch . .", ""),
        "stay": _layout("batch . .", "."),
        "not_last": _layout(".", ""),
        "select": _tuple("batch . .", "batch . .", "batch . ."),
        "assign": _layout("batch . .", "batch . ."),
    },
    "PlainAttention": {
        "scale_query": _layout("batch tp seq .", ""),
        "scores": _layout("batch tp seq .", "batch tp . ."),
        "to_softmax": _layout("batch tp seq ."),
        "softmax": _layout("batch tp seq ."),
        "to_value": _layout("batch tp seq ."),
        "weighted_sum": _layout("batch tp seq .", "batch tp . ."),
    },
    "Block": {
        "to_residual": _layout("stream ."),
        "add_ffn": _layout("stream .", "stream ."),
        "add_aux": _layout(".", "."),
    },
    "MoE": {"add_shared": _layout("stream .", "stream .")},
    "Router": {
        "to_router": _layout("device ."),
        "weight_to_router": _layout(". ."),
        "gate": _layout("device .", ". ."),
        "to_float": _layout("device ."),
        "add_load": _layout(".", "."),
        "accumulate_load": _layout(".", "."),
    },
    "Dispatch": {"accumulate": _layout(".", ".")},
    "Experts": {
        "cast": _layout("stream ."),
        "cast_gate": _layout("expert . width"),
        "cast_up": _layout("expert . width"),
        "cast_down": _layout("expert width ."),
    },
    "MTPLayer": {
        "concat": _own_rule("stream .", "stream .", out="stream ."),
        "to_residual": _layout("stream ."),
    },
    "ParallelCrossEntropy": {
        "to_float": _layout("token tp"),
        "unmark": _layout("token", ""),
        "weigh": _layout("token", "token"),
        "sum_loss": _tuple("token"),
        "sum_mask": _tuple("token"),
    },
}

# Sharded weights; every device of a stage holds all others whole.
WEIGHTS: dict[str, dict[str, str]] = {
    "Embedding": {"weight": "tp ."},
    "Linear.column": {"weight": "tp ."},
    "Linear.column_whole": {"weight": "tp ."},
    "Linear.row": {"weight": ". tp"},
    "Experts": {"gate": "expert . width", "up": "expert . width", "down": "expert width ."},
}

_EXPERTS = ("expert . width", "expert . width", "expert width .")
# Cells that run on slices (Morph): inputs -> outputs.
LOCAL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Rope.query": (("batch seq tp .", "batch seq . .", "batch seq . ."), ("batch seq tp .",)),
    "Rope.key": (("batch seq . .", "batch seq . .", "batch seq . ."), ("batch seq . .",)),
    "ShareKey": (("batch . . .",), ("batch . tp .",)),
    "FlashSlice": (
        ("batch tp seq .", "batch tp . .", "batch tp . .", "batch seq"),
        ("batch tp seq .",),
    ),
    "FirstKeys": (("batch . seq .",), ("batch seq",)),
    "PartMask": (("batch seq",), ("batch . seq .",)),
    "PartMask.part": (("batch seq",), (".",)),
    "KeptRows": (("batch . .", "."), ("batch . .",)),
    "ShiftLeft": (("batch .",), ("batch .",)),
    "SwiGLU": (("token tp", "token tp"), ("token tp",)),
    "SwiGLU.replicated": (("stream .", "stream ."), ("stream .",)),
    "VocabularyRows": (("tp .", "token"), ("stream .",)),
    "Routing": (("device .", "."), ("device .", "device .", "device .", "device .", ".")),
    "RouterLosses": (("device .", "device .", "device ."), (".",)),
    "RouterLosses.by_step": (("device .", "device .", "."), (".",)),
    "TokenCrossEntropy": (("token tp", "token"), ("token",)),
    "LossBySource": (("token", "token"), (".",)),
    "PickedLogits": (("token tp", "token"), (". .",)),
    # Shape-only stubs of the cells of other pipeline stages.
    "EmbeddingStub": (("stream",), ("stream .",)),
    "BlockStub": (("stream .", "."), ("stream .", ".")),
    "MTPStub": (("stream .", "stream .", "."), ("stream .", ".")),
    "HiddenStub": (("stream .",), ("stream .",)),
    "LossStub": (("stream .",), (".",)),
    "ExpertSlots": ((".", "device ."), ("device .",)),
    "ExpertSlots.expert_tp": ((".", "token ."), ("token .",)),
    "Dispatch": (("device .", "device .", "device .", *_EXPERTS), ("device .",)),
    "Dispatch.capacity": (("device .", "device .", "device .", *_EXPERTS), ("device .", ".")),
    "Dispatch.expert_tp": (("token .", "token .", "token .", *_EXPERTS), ("stream .",)),
    "Dispatch.expert_tp.capacity": (
        ("token .", "token .", "token .", *_EXPERTS),
        ("stream .", "."),
    ),
}


def balance_axes(mesh: Mesh, kind: str, group: str) -> tuple[str, ...]:
    """Return the axes of the devices whose tokens a balance loss counts together.

    Args:
        kind: ``moe_router_load_balancing_type``.
        group: ``telechat_moe.moe.balance_group``.
    """
    if kind == "seq_aux_loss":
        return mesh.axes("cp", "tp")
    if kind == "sub_seq_aux_loss":
        return ()
    if kind == "aux_loss" and group == "ep":
        return mesh.axes("ep", "cp", "tp") if mesh.expert_tp else mesh.axes("ep")
    return mesh.axes("dp", "cp", "tp")


def resolve(word: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes of a word of a layout."""
    if word == ".":
        return ()
    if word == "stream":
        return mesh.axes("dp", "cp", "tp") if mesh.sp else mesh.axes("dp", "cp")
    if word == "width":
        return mesh.axes("tp") if mesh.expert_tp else ()
    degrees = {
        "batch": ("dp",),
        "seq": ("cp",),
        "token": ("dp", "cp"),
        "whole": ("dp",),
        "device": ("dp", "cp", "tp"),
        "tp": ("tp",),
        "expert": ("ep",),
    }
    return mesh.axes(*degrees[word])


def dimensions(layout: str, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of each dimension of a layout."""
    return tuple(resolve(word, mesh) for word in layout.split())

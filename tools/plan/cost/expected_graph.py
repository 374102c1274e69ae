"""Predict what a recipe's compiled graph must contain, stage by stage, and say where a dry run differs.

Parameters and collectives must be exactly equal, activations at the peak within `TOLERANCE`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.experts import dispatcher
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.sharding.recipe import shard_threshold
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.expected_calls import Call, Calls
from telechat_moe.tools.plan.cost.layout import MODULES, Layout
from telechat_moe.tools.plan.cost.saved_activations import Saved, saved
from telechat_moe.tools.plan.schedules.program import Kind
from telechat_moe.tools.plan.schedules.published import generate

TOLERANCE = 0.05
"""Relative difference up to which peak activations count as equal."""


@dataclass(frozen=True, kw_only=True)
class ExpectedRank:
    """What the graph of a rank must contain."""

    elements: int
    """Trained parameters whose gradients the device holds: of one graph with shared optimizer's states, its share."""

    calls: Counter[Call]
    """Collectives of a step."""

    activations: int
    """The most bytes of activations alive at once."""


def predict(recipe: Recipe, rank: int) -> ExpectedRank:
    """Return what the graph of a rank must contain.

    Raises:
        BadInputError: See `refuse`.
    """
    refuse(recipe)
    a, x = Architecture.from_recipe(recipe), Layout.from_recipe(recipe)
    calls = Calls(a, x, shard_threshold(recipe))
    stage = calls.mesh.stage(rank)
    return ExpectedRank(
        elements=calls.gradients(rank),
        calls=calls.of(rank),
        activations=activations(a, x)[stage],
    )


def refuse(recipe: Recipe) -> None:
    """Refuse a recipe of another step than the formulas are for.

    Raises:
        BadInputError: The recipe has something that no formula here covers.
    """
    c, data = recipe.model_config, recipe.train_dataset.data_loader.config
    others = sorted({*recipe.telechat_moe.sharding.recompute} - {*MODULES.values()})
    given: list[tuple[str, object, object]] = [
        ("model_type", type(c) is ModelConfig, True),
        ("moe_router_load_balancing_type", c.moe_router_load_balancing_type, "seq_aux_loss"),
        ("moe_aux_loss_coeff", bool(c.moe_aux_loss_coeff), True),
        ("moe_z_loss_coeff", c.moe_z_loss_coeff or 0.0, 0.0),
        ("compute_dtype", c.compute_dtype, "bfloat16"),
        ("params_dtype", c.params_dtype, "float32"),
        ("layernorm_compute_dtype", c.layernorm_compute_dtype, "float32"),
        ("router_dense_type", c.router_dense_type, "float32"),
        ("qk_layernorm", c.qk_layernorm, True),
        ("dispatcher", dispatcher(recipe, "Ascend"), "alltoallv"),
        ("moe_token_dispatcher_type", c.moe_token_dispatcher_type or "alltoall", "alltoall"),
        ("use_parallel", recipe.use_parallel, True),
        ("tie_word_embeddings", c.tie_word_embeddings, False),
        ("create_attention_mask", bool(data and data.create_attention_mask), False),
        ("mp_comm_recompute", recipe.recompute_config.mp_comm_recompute, True),
        ("swap_config.swap", recipe.swap_config.swap, False),
        ("telechat_moe.sharding.recompute: other modules", others, []),
    ]
    for name, found, expected in given:
        if found != expected:
            raise BadInputError(
                f"{recipe.source}: {name} is {found}; the compiled graph is predicted for {expected} only"
            )


@dataclass(frozen=True)
class _Item:
    """A section of a chunk, and the bytes of a micro-batch in it."""

    kept: float
    working: float = 0.0
    """Bytes that only its backward pass needs."""

    late: float = 0.0
    """Bytes that it leaves behind for the gradients of its weights."""


def activations(a: Architecture, x: Layout) -> list[int]:
    """Return the most bytes of activations that are alive at once on each stage.

    Forward and backward passes in their order: what micro-batches in flight keep, and in a backward pass, item by item from
    the last one, what its operators make while what it kept is still there.
    """
    chunks = _chunks(a, x)
    name = "interleaved" if x.vpp > 1 else x.schedule
    program = generate(name, x.pp, x.micro_batches, x.vpp)
    peaks: list[int] = []
    for stage in range(x.pp):
        held = peak = 0.0
        for op in program.ops[stage]:
            items = chunks[op.chunk]
            size = sum(item.kept for item in items)
            if op.kind is Kind.F:
                held += size
                peak = max(peak, held)
                continue
            left = held
            for item in reversed(items):
                peak = max(peak, left + item.working)
                left += item.late - item.kept
            held -= size
        peaks.append(round(peak))
    return peaks


def _chunks(a: Architecture, x: Layout) -> list[list[_Item]]:
    """Return the items of every chunk, in the model's order."""
    full, one = "full" in x.recompute, x.micro_batches == 1
    s = saved(columns([(a, x)]))
    entry, last = float(s.entry[0]), x.pp * x.vpp - 1
    # the gradient of MTP's embeddings comes before that of layers: of stages in the place of what it was computed from
    embedded = a.mtp * entry
    early = embedded * one
    kinds = {
        "dense": (s.dense, s.dense_working, s.dense_late, s.entry),
        "moe": (s.moe, s.moe_working, s.moe_late, s.moe_entry),
    }

    def layer(kind: str, again: bool) -> _Item:
        kept, working, late = (float(v[0]) for v in (*kinds[kind][:2], kinds[kind][2][again]))
        least = float(kinds[kind][3][0])
        if not again:
            return _Item(kept, working + early, late)
        return _Item(least, working + early + kept - least, late)

    found: list[list[_Item]] = []
    for chunk, layers in enumerate(x.chunk_kinds(a.layers)):
        items = [_Item(float(s.ends[0]))]
        if chunk == 0:  # what MTP's norm of the embeddings reads; the table's gradient
            items.append(_Item(embedded, float(s.table_gradient[0]) - early))
        items += [layer(kind, full and again) for kind, again in layers]
        if chunk == last:
            block = layer(a.layers[-1], full and x.recompute_layers is None)
            items += (_one_end if one else _end)(a, s, block)
        found.append(items)
    return found


def _end(a: Architecture, s: Saved, block: _Item) -> list[_Item]:
    """Return final norm, losses and MTP, as they go forward. MTP's loss goes back before its block, the other loss last.

    Logits' gradients in bfloat16 stay until the head's gradient, which is one product for all of them.
    """
    entry, loss, first, logits = (float(v[0]) for v in (s.entry, s.loss, s.loss_working, s.logits))
    if not a.mtp:
        return [_Item(entry), _Item(loss, max(first, float(s.head_gradient[0]) - 1.5 * logits))]
    late = a.mtp * logits / 2
    gradient = float(s.head_gradient[0]) + (a.mtp - 1.5) * logits
    items = [_Item(entry), _Item(loss, max(2 * logits + late, gradient))]
    for _ in range(
        a.mtp
    ):  # the norm's output, both inputs of the projection, the block, its output
        items.append(_Item(3 * entry, late))
        items.append(_Item(block.kept, block.working + late))
    return [*items, _Item(a.mtp * loss, first)]


def _one_end(a: Architecture, s: Saved, block: _Item) -> list[_Item]:
    """Return the same of one graph: the other loss has its gradient before MTP's layers run.

    The head's inputs and logits' gradients in bfloat16 stay for the head's gradient, the logits for the loss's value.
    """
    entry, loss, first, logits = (float(v[0]) for v in (s.entry, s.loss, s.loss_working, s.logits))
    late = loss + logits / 2
    if not a.mtp:
        return [_Item(entry), _Item(loss, first, late)]
    items = [_Item(entry), _Item(late, 0.0, late)]
    for _ in range(a.mtp):  # of the projection: both inputs, the result's gradient
        items += [_Item(3 * entry, 0.0, 1.5 * entry), block]
    return [*items, _Item(a.mtp * loss, first, a.mtp * late)]


def differences(recipe: Recipe, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return expected and found figures, and their differences, for each stage of a report of `telechat-moe dryrun --json`."""
    found: list[dict[str, Any]] = []
    for stage in report["stages"]:
        one = predict(recipe, stage["rank"])
        compiled = calls_of(stage)
        lines = [
            f"{c.phase} {c.kind} over {len(c.ranks)} ranks {list(c.ranks[:3])}..., {c.bytes} bytes: "
            f"{one.calls[c]} predicted, {compiled[c]} compiled"
            for c in sorted(one.calls.keys() | compiled.keys())
            if one.calls[c] != compiled[c]
        ]
        memory = stage["memory"]
        elements, alive = memory["gradients"] // 4, memory["activations"]
        if elements != one.elements:
            lines.append(f"trained parameters: {one.elements} predicted, {elements} compiled")
        off = one.activations / alive - 1
        if abs(off) > TOLERANCE:
            lines.append(
                f"activations at the peak: {one.activations} bytes predicted, {alive} compiled"
            )
        found.append(
            {
                "stage": stage["stage"],
                "parameters": [one.elements, elements],
                "calls": [sum(c.values()) for c in (one.calls, compiled)],
                "bytes": [sum(n * c.bytes for c, n in m.items()) for m in (one.calls, compiled)],
                "activations": [one.activations, alive],
                "differences": lines,
            }
        )
    return found


def calls_of(stage: dict[str, Any]) -> Counter[Call]:
    """Return the collectives of a stage of a dry run's report, as its first device has them."""
    found: Counter[Call] = Counter()
    for row in stage["collectives"]:
        size = row["bytes"] // row["count"]
        found[Call(row["phase"], row["kind"], tuple(row["ranks"]), size)] += row["count"]
    return found

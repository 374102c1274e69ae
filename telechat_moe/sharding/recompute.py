"""Mark by recipe what the backward pass recomputes, and what waits for it in the host's memory."""

from collections.abc import Callable, Iterator, Mapping, Set

from mindspore import nn, ops

from telechat_moe.model.block import Block
from telechat_moe.model.causal_lm import CausalLM
from telechat_moe.model.mtp import MTPLayer
from telechat_moe.sharding.apply import COLLECTIVES
from telechat_moe.sharding.cells.collective import Morphed, RouterLosses
from telechat_moe.sharding.placement import primitives


def _up(block: Block) -> Iterator[object]:
    attention = block.attention
    yield attention.q_up if attention.compress_query else attention.q_proj
    yield attention.kv_up
    # and the primitives that make queries, keys and values, which attention would keep
    yield from (attention.reshape, attention.split_query, attention.split_key_value)
    yield from (attention.rope_query, attention.share_key)
    yield from (attention.concat_query, attention.concat_key)
    yield from (attention.query_heads_first, attention.heads_first)


def _norms(block: Block) -> Iterator[object]:
    attention = block.attention
    yield block.input_norm
    yield block.ffn_norm
    if attention.norm_latents:
        yield attention.kv_norm
        if attention.compress_query:
            yield attention.q_norm


def _swiglu(block: Block) -> Iterator[object]:
    if not block.is_moe:
        yield block.ffn.act
    elif block.moe.has_shared:
        yield block.moe.shared.act


def _permute(block: Block) -> Iterator[object]:
    if block.is_moe:
        dispatch = block.moe.dispatch
        yield dispatch.permute
        yield getattr(getattr(dispatch, "rows", None), "sort_rows", None)  # of an AlltoAllV


# Names of telechat_moe.sharding.recompute -> cells and primitives of a block. "moe" is its cell.
MODULES: dict[str, Callable[[Block], Iterator[object]]] = {
    "mla_up": _up,
    "norms": _norms,
    "swiglu": _swiglu,
    "permute": _permute,
}


def primitives_of(part: object) -> list[ops.Primitive]:
    """Return a primitive, or those of a cell and of the cells below it, the bodies of :class:`Morphed` included."""
    primitives_by_id: dict[int, ops.Primitive] = {}
    left, visited = [part], set[int]()
    while left:
        current = left.pop()
        if id(current) in visited:  # the body of a Morphed may be a method of the cell above it
            continue
        visited.add(id(current))
        if isinstance(current, ops.Primitive):
            primitives_by_id[id(current)] = current
        elif isinstance(current, Morphed):
            left.append(getattr(current.body, "__self__", None))
        elif isinstance(current, nn.Cell):
            left += [below for _, below in current.cells_and_names()]
            left += [primitive for _, _, primitive in primitives(current)]
    return list(primitives_by_id.values())


def _recompute_cell(cell: nn.Cell, communication: bool) -> None:
    """Mark a cell, and the primitives that run on slices below it.

    MindSpore recomputes the operators whose scope is the cell's. Those of a :class:`Morphed` body lose their scope when it
    is expanded: where micro-batches share no network, their results would be kept.
    """
    cell.recompute(mp_comm_recompute=communication)
    for _, below in cell.cells_and_names():
        owner = getattr(below.body, "__self__", None) if isinstance(below, Morphed) else None
        if not isinstance(owner, nn.Cell):
            continue
        for _, _, primitive in primitives(owner):
            recomputed = communication or primitive.name not in COLLECTIVES
            if recomputed and "recompute" not in primitive.attrs:  # counters are marked already
                primitive.add_prim_attr("recompute", True)


def recompute(
    model: CausalLM, layers: Set[int], mtp: bool, modules: Set[str], communication: bool
) -> None:
    """Mark cells of a placed model for recomputation.

    Args:
        model: Shape-only stubs of other stages are left alone.
        layers: Numbers of the layers that are recomputed as a whole.
        mtp: The MTP layers too.
        modules: Names of :data:`MODULES`, in the layers that are not.
        communication: Collectives within them are repeated as well.
    """
    blocks = [(layer, i in layers) for i, layer in enumerate(model.layers)]
    if model.mtp_depth:
        blocks += [(layer, mtp) for layer in model.mtp]
    for cell, recomputed in blocks:
        if not isinstance(cell, Block | MTPLayer):
            continue
        block = cell if isinstance(cell, Block) else cell.block
        if block.is_moe:  # counted in the forward pass only
            router = block.moe.router
            counters = [router.add_load, router.accumulate_load, block.moe.dispatch.accumulate]
            if isinstance(router.losses, RouterLosses):
                counters += router.losses.kept()
            for primitive in counters:
                primitive.recompute(False)
        if recomputed:
            _recompute_cell(cell, communication)
            continue
        if "moe" in modules and block.is_moe:
            _recompute_cell(block.moe, communication)
        # Primitives, not cells: the outputs of a recomputed cell are kept, and here they are what is large.
        for name in modules - {"moe"}:
            for part in MODULES[name](block):
                for primitive in primitives_of(part):
                    primitive.add_prim_attr("recompute", True)


def swap(model: CausalLM, parts: Mapping[int, Mapping[str, int]]) -> None:
    """Mark primitives of a placed model, of which MindSpore moves the results that the backward pass reads.

    Args:
        model: Shape-only stubs of other stages are left alone.
        parts: Layer to dotted names of its parts, `""` the whole, with their prefetch, in operators
            (:func:`telechat_moe.recipe.swap.swapped`).
    """
    for number, named in parts.items():
        block = model.layers[number]
        if not isinstance(block, Block):
            continue
        for name, prefetch in reversed([*named.items()]):  # the first that names a primitive counts
            part: nn.Cell | ops.Primitive = block
            for step in name.split(".") if name else ():
                part = getattr(part, step)
            for primitive in primitives_of(part):
                if not primitive.attrs.get("recompute"):
                    primitive._offload(backward_prefetch=prefetch)

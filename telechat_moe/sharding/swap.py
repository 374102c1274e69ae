"""Mark what waits in the host's memory until the backward pass, by recipe: whole layers, or parts of them."""

from collections.abc import Mapping

from mindspore import nn, ops

from telechat_moe.model.block import Block
from telechat_moe.model.causal_lm import CausalLM
from telechat_moe.sharding.recompute import primitives_of


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

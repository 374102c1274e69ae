"""Rules for our own model about what the host computes in a graph for Ascend, beside those of `effect.py`."""

from collections.abc import Iterator

from telechat_moe.recipe.experts import dispatcher
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig

KEY = "telechat_moe.operators.host"


def host_operators(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The host takes primitives of a graph for Ascend that is run kernel by kernel, if it has them itself."""
    chosen, m = r.telechat_moe.operators.host, r.model.model_config
    if not chosen or not isinstance(m, ModelConfig):
        return
    chosen_text = ", ".join(chosen)
    if not compiled and r.context.device_target == "CPU":
        problem = f"{chosen_text} on CPU, where the host computes everything anyway"
        yield KEY, problem, "remove it, or context.device_target Ascend (dryrun compiles it here)"
        return
    if not m.moe_layer_names:
        yield KEY, f"{chosen_text} in a model without routed experts", "remove it"
    if len(set(chosen)) < len(chosen):
        yield KEY, f"{chosen_text}: a part twice", "each part once"
    if getattr(getattr(r.context, "jit_config", None), "jit_level", None) == "O2":
        problem = f"{chosen_text} with context.jit_config.jit_level O2, which runs the whole graph on the device"
        yield KEY, problem, "remove it, or jit_level O0 or O1"
    if "sort" in chosen and dispatcher(r, "Ascend") == "alltoallv":
        problem = (
            "sort where MoeTokenPermute sorts and copies rows in one, which the host does not have"
        )
        instead = "telechat_moe.sharding.dispatcher alltoall"
        if r.devices == 1:
            instead = "telechat_moe.operators.permute and grouped_matmul plain"
        yield KEY, problem, f"no sort, or {instead}"

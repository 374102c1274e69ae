"""The switches of the JSON file that `context.ascend_config.parallel_speed_up_json_path` names.

MindSpore reads the file (`mindspore/context.py`); the table here has its names, old names and values, to say what is
wrong with line and remedy before anything is compiled.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from telechat_moe.reading import JsonError, parse_json, real_path
from telechat_moe.recipe.schema import Broken, Recipe

KEY = "context.ascend_config.parallel_speed_up_json_path"
OPERATORS = (
    *("AlltoAll", "AlltoAllV", "MorphAllGather", "MorphReduceScatter"),
    *("AllGather", "ReduceScatter", "AllReduce"),
)
"""Names that a list of communication operators may contain."""


class Switch(NamedTuple):
    """A key of the file.

    Attributes:
        old: The name that MindSpore deprecates and still takes; empty: none.
        takes: `bool`, `list` (of operators, comma-separated), `bool or list`, or `level` (0 to 3).
    """

    old: str = ""
    takes: str = "bool"


SWITCHES: dict[str, Switch] = {
    "pp_1f1b_overlap": Switch(takes="list"),
    "recomputation_communication_overlap": Switch("recompute_comm_overlap", "bool or list"),
    "grad_matmul_communication_overlap": Switch("matmul_grad_comm_overlap", "bool or list"),
    "enable_communication_fusion": Switch("enable_task_opt"),
    "grad_computation_allreduce_overlap": Switch("enable_grad_comm_opt"),
    "grad_fa_allgather_overlap": Switch("recompute_allgather_overlap_fagrad"),
    "interleaved_matmul_comm": Switch(),
    "allreduce_and_biasadd_swap": Switch("bias_add_comm_swap"),
    "computation_allgather_overlap": Switch("enable_opt_shard_comm_opt"),
    "enable_begin_end_inline_opt": Switch(),
    "enable_concat_eliminate_opt": Switch(),
    "interleaved_layernorm_comm": Switch(),
    "enable_allreduce_slice_to_reducescatter": Switch(),
    "enable_interleave_split_concat_branch": Switch(),
    "enable_interleave_parallel_branch": Switch(),
    "enable_offloading_packed_experts": Switch(),
    "computation_communication_fusion_level": Switch("compute_communicate_fusion_level", "level"),
    "enable_flash_attention_load_balance": Switch(),
    "dataset_broadcast_opt_level": Switch(takes="level"),
}
_NEW = {switch.old: name for name, switch in SWITCHES.items() if switch.old}
_EXPECTED = {
    "bool": "true or false",
    "level": "an integer from 0 to 3",
    "list": f"a comma-separated list of {', '.join(OPERATORS)}",
    "bool or list": f"true, false or a comma-separated list of {', '.join(OPERATORS)}",
}


def path_of(recipe: Recipe) -> Path | None:
    """Return the file that a recipe names, absolute: in the recipe's folder, else in the working folder; None: none."""
    ascend = recipe.context.ascend_config
    if ascend is None or not ascend.parallel_speed_up_json_path:
        return None
    name = ascend.parallel_speed_up_json_path
    beside = real_path(recipe.source.parent / name)
    return beside if beside.exists() else real_path(name)


def switches(recipe: Recipe) -> dict[str, Any]:
    """Return what the file says, by the new names; empty without a file. Its problems are :func:`problems`' to tell."""
    path = path_of(recipe)
    try:
        content: Any = parse_json(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    items = cast("dict[str, Any]", content).items() if isinstance(content, dict) else ()
    return {_NEW.get(key, key): value for key, value in items}


def problems(recipe: Recipe) -> Iterator[Broken]:
    """Yield what is wrong with the file of a recipe, each with the file's line."""
    path = path_of(recipe)
    if path is None:
        return
    try:
        text = path.read_text(encoding="utf-8")
        parse_json(text, unique=False)
        pairs: Any = json.loads(text, object_pairs_hook=list)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        yield KEY, problem, "a JSON file beside the recipe or in the working folder"
        return
    except ValueError as error:
        place = f"{path}:{error.line}" if isinstance(error, JsonError) and error.line else str(path)
        problem = f"{place}: not JSON ({error})"
        yield KEY, problem, 'an object such as {"pp_1f1b_overlap": "AlltoAllV"}'
        return
    if not text.lstrip().startswith("{"):
        yield KEY, f"{path}:1: not an object", 'an object such as {"pp_1f1b_overlap": "AlltoAllV"}'
        return
    if not pairs:
        yield KEY, f"{path}:1: no switch, so it has no effect", "remove it, or a switch"
    written: dict[str, str] = {}
    for key, value in pairs:
        line = text[: text.find(f'"{key}"')].count("\n") + 1
        for problem, expected in _entry(key, value, written):
            yield KEY, f"{path.name}:{line}: {key}: {problem}", expected


def _entry(key: str, value: Any, written: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (found, expected) of an entry that is wrong; remember its new name."""
    name = _NEW.get(key, key)
    if name not in SWITCHES:
        matches = difflib.get_close_matches(key, [*SWITCHES, *_NEW], 1, 0.6)
        expected = f"did you mean {matches[0]!r}?" if matches else f"one of {', '.join(SWITCHES)}"
        yield "unknown key", expected
        return
    if name in written:
        yield f"written before as {written[name]}", "write it once"
    written[name] = key
    takes = SWITCHES[name].takes
    words = value.split(",") if isinstance(value, str) and "list" in takes else []
    fits = {
        "bool": isinstance(value, bool),
        "level": type(value) is int and 0 <= value <= 3,
        "list": isinstance(value, str),
        "bool or list": isinstance(value, bool | str),
    }[takes]
    if not fits:
        yield json.dumps(value), _EXPECTED[takes]
    for word in [word for word in words if word not in (*OPERATORS, "")]:
        matches = difflib.get_close_matches(word.strip(), OPERATORS, 1, 0.6)
        yield f"{word!r}", f"did you mean {matches[0]!r}?" if matches else _EXPECTED[takes]


def overlapped(recipe: Recipe) -> tuple[str, ...]:
    """Return the collectives that `pp_1f1b_overlap` names."""
    named = switches(recipe).get("pp_1f1b_overlap")
    return tuple(filter(None, named.split(","))) if isinstance(named, str) else ()


def needs(recipe: Recipe) -> Iterator[Broken]:
    """Yield the switches that are on without what they need beside them."""
    named, config = overlapped(recipe), recipe.parallel.pipeline_config
    word, stages = "no pipeline_config", recipe.parallel_config.pipeline_stage
    if config is not None:
        word = config.pipeline_scheduler
    fits = config is not None and config.pipeline_interleave and word == "zero_bubble_v"
    if named and (stages == 1 or not fits):
        problem = f"pp_1f1b_overlap with {stages} stages and {word}, which pairs no passes"
        yield KEY, problem, "parallel.pipeline_config with pipeline_scheduler zero_bubble_v"

"""Write a layout for programs: as a recipe, as Megatron's layout string, or as MindSpeed's arguments."""

from itertools import groupby
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.load import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import MODULES, Layout


def settings(layout: Layout, layers: int) -> dict[str, Any]:
    """Return the settings of a recipe, by dotted key, for a layout whose layers are placed.

    Raises:
        BadInputError: Recipes cannot say it.
    """
    _refuse(layout, "recipes")
    pp, vpp = layout.pp, layout.vpp
    base = layers // (pp * vpp)
    extra = [n - base for n in layout.chunk_layers(layers)]
    counts = layout.recompute_layers
    recompute: Any = layout.recompute == "full"
    if layout.recomputed is not None:
        recompute = list(layout.recomputed) or False
    elif counts is not None:
        recompute = _rows(list(counts), pp, vpp) if any(counts) else False
    words = [] if layout.recompute in ("none", "full", "swap") else layout.recompute.split("+")
    unknown = [word for word in words if word not in MODULES]
    if unknown:
        raise BadInputError(f"layout {layout.short()}: recipes cannot recompute {unknown[0]} alone")
    many = layout.devices > 1
    values: dict[str, Any] = {
        "use_parallel": many,
        "runner_config.batch_size": layout.micro_batch,
        "runner_config.gradient_accumulation_steps": layout.micro_batches if pp == 1 else 1,
        "parallel_config.data_parallel": layout.dp,
        "parallel_config.model_parallel": layout.tp,
        "parallel_config.context_parallel": layout.cp,
        "parallel_config.pipeline_stage": pp,
        "parallel_config.expert_parallel": layout.ep,
        "parallel_config.micro_batch_num": layout.micro_batches if pp > 1 else 1,
        "parallel_config.use_seq_parallel": layout.sequence_parallel,
        "parallel.parallel_mode": 1 if many else "STAND_ALONE",
        "parallel.enable_alltoall": many,
        "parallel.full_batch": False,
        "parallel.enable_parallel_optimizer": layout.zero > 0,
        "parallel.pipeline_config": {
            "pipeline_interleave": vpp > 1,
            "pipeline_scheduler": "gpipe" if layout.schedule == "gpipe" else "1f1b",
        },
        "model.model_config.pp_interleave_num": vpp,
        "model.model_config.offset": _rows(extra, pp, vpp) if any(extra) else 0,
        "recompute_config.recompute": recompute,
        "recompute_config.select_recompute": False,
        "telechat_moe.sharding.recompute": [MODULES[word] for word in words],
        "telechat_moe.sharding.expert_tensor_parallel": layout.etp > 1,
    }
    if layout.swapped:
        item = {"layers": list(layout.swapped), "backward_prefetch": layout.prefetch}
        values |= {"swap_config.swap": True, "swap_config.layer_swap": [item]}
    if layout.schedule == "gpipe":
        values["parallel.pipeline_config"]["pipeline_interleave"] = True
    return values


def _refuse(layout: Layout, who: str, only_places: bool = False) -> None:
    """Refuse a layout with a setting that a program cannot express.

    Raises:
        BadInputError: The program cannot express it; the message names the layout and the setting.
    """
    is_placed = layout.schedule in ("1f1b", "interleaved", "gpipe")
    reasons = [] if is_placed else [f"place layers for {layout.schedule}"]
    some = layout.recompute_layers is None or any(layout.recompute_layers)
    unsaid = {
        "swap whole layers": layout.recompute == "swap" and some,
        "place MTP before its head": layout.ends != "last",
        "shard gradients or parameters": layout.zero > 1,
    }
    reasons += [] if only_places else [word for word, is_set in unsaid.items() if is_set]
    if reasons:
        raise BadInputError(
            f"layout {layout.short()}: {who} cannot {' or '.join(reasons)}; --pick another, or leave --beyond-recipes out"
        )


def _rows(numbers: list[int], pp: int, vpp: int) -> list[Any]:
    """Return one number for each chunk in the form of recipes: a list, or a list for every round."""
    rows = [numbers[v * pp : (v + 1) * pp] for v in range(vpp)]
    return rows[0] if vpp == 1 else rows


def write_recipe(
    name: str, overrides: list[str], layout: Layout, comment: str, node: int | None = None
) -> str:
    """Return the text of a complete recipe: that of `name` with the user's settings, this layout and a comment at the top.

    `node` are the devices of a node, for exchanges that go by node.

    Raises:
        RecipeError: The recipe with this layout breaks a rule.
        BadInputError: Recipes cannot say it.
    """
    import yaml

    source = load(name, overrides)
    changes = settings(layout, source.model_config.num_hidden_layers)
    data = source.train_dataset
    columns = len(data.construct_args_key or data.input_columns or [])
    if layout.devices > 1:
        changes["parallel.dataset_strategy"] = [[layout.dp, 1]] * columns
    if layout.exchange != "alltoall" or source.model_config.moe_token_dispatcher_type:
        changes["model.model_config.moe_token_dispatcher_type"] = layout.exchange
    if layout.exchange != "alltoall" and node is not None:
        changes["model.model_config.npu_nums_per_device"] = node
    changed = source.to_dict()
    for key, value in changes.items():
        _put(changed, key, value)
    changed["model"]["model_config"]["batch_size"] = layout.micro_batch
    callbacks: list[dict[str, Any]] = changed.get("callbacks") or []
    batches = {"micro_batch_num": "parallel_config", "gradient_accumulation_steps": "runner_config"}
    for callback in callbacks:
        for name, section in batches.items():
            if callback.get(name) is not None or "micro_batch_num" in callback:
                callback[name] = changes[f"{section}.{name}"]
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=100)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *folders, last = key.split(".")
    for name in folders:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
    tree[last] = {**(tree.get(last) or {}), **value} if isinstance(value, dict) else value


def layout_string(a: Architecture, layout: Layout) -> str:
    """Return Megatron's `--pipeline-model-parallel-layout`: E embedding, t layer, m MTP, L loss, | between chunks.

    The string does not express recomputation or swapping.

    Raises:
        BadInputError: Megatron cannot say it.
    """
    _refuse(layout, "Megatron's layout", only_places=True)
    chunks = ["t" * n for n in layout.chunk_layers(len(a.layers))]
    chunks[0] = "E" + chunks[0]
    chunks[-1 - (layout.ends != "last")] += "m" * a.mtp
    chunks[-1] += "L"
    words: list[str] = []
    for chunk, group in groupby(chunks):
        number = len(list(group))
        words.append(f"({chunk}|)*{number}" if number > 1 else chunk + "|")
    return "".join(words).removesuffix("|")


def mindspeed_arguments(a: Architecture, layout: Layout) -> list[str]:
    """Return arguments for MindSpeed-LLM; smaller chunks are filled up with no-op layers.

    Raises:
        BadInputError: MindSpeed cannot say it.
    """
    _refuse(layout, "MindSpeed's arguments with no-op layers")
    counts = layout.chunk_layers(len(a.layers))
    size = max(counts)
    # position of every layer that is not there, in a model whose chunks all have `size`
    idle = [c * size + i for c, n in enumerate(counts) for i in range(n, size)]
    arguments = [
        "--tensor-model-parallel-size", layout.tp,
        "--pipeline-model-parallel-size", layout.pp,
        "--context-parallel-size", layout.cp,
        "--micro-batch-size", layout.micro_batch,
        "--global-batch-size", layout.global_batch,
        "--num-layers", size * len(counts),
    ]  # fmt: skip
    if idle:
        arguments += ["--noop-layers", ",".join(map(str, idle))]
    if a.dense_layers and a.moe_layers:  # positions count the no-op layers before them
        positions = [i for i in range(size * len(counts)) if i not in idle]
        arguments += ["--first-k-dense-replace", positions[a.dense_layers - 1] + 1]
    if a.mtp:
        arguments += ["--mtp-num-layers", a.mtp]
    if layout.vpp > 1:
        arguments += ["--num-layers-per-virtual-pipeline-stage", size]
    if layout.sequence_parallel:
        arguments.append("--sequence-parallel")
    if layout.zero:
        arguments.append("--use-distributed-optimizer")
    if layout.ep > 1 and layout.etp == 1 and layout.tp > 1:
        if layout.ep % layout.tp:
            raise BadInputError(
                f"layout {layout.short()}: MindSpeed spreads experts over all {layout.tp} tensor-parallel ranks or none"
            )
        arguments += ["--expert-model-parallel-size", layout.ep // layout.tp, "--moe-tp-extend-ep"]
    elif layout.ep > 1:
        arguments += ["--expert-model-parallel-size", layout.ep]
    if layout.etp > 1:
        arguments += ["--expert-tensor-parallel-size", layout.etp]
    recomputed = layout.recompute_layers
    if layout.recompute == "full" and (recomputed is None or any(recomputed)):
        # one number for all chunks: at least what each needs
        count = size if recomputed is None else max(recomputed)
        arguments += ["--recompute-granularity", "full", "--recompute-method", "block"]
        arguments += ["--recompute-num-layers", count]
    return [str(word) for word in arguments]

"""What waits in the host's memory: MindFormers' spelling, what it means for our layers, and what is refused."""

import re

import pytest

from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.swap import matched, swapped
from telechat_moe.recipe.uses import Use

RECIPE = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel_config.data_parallel": 2,
    "runner_config.gradient_accumulation_steps": 2,
    "callbacks": "[]",
    "model.model_config.moe_router_enable_expert_bias": False,
    "swap_config.swap": True,
}
ALONE = {"use_parallel": False, "parallel_config.data_parallel": 1}
LAYERS, OPERATORS = "swap_config.layer_swap", "swap_config.op_swap"


def read(changes: dict[str, object], use: Use = "dryrun") -> dict[int, dict[str, int]]:
    values = {**RECIPE, **changes}
    sets = [f"{k}={v}" for k, v in values.items()]
    return swapped(load("telechat3_moe/pretrain_tiny.yaml", sets, use=use))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {i: {"attention.core": 1} for i in range(4)}),
        ({"swap_config.default_prefetch": 9}, {i: {"attention.core": 9} for i in range(4)}),
        ({LAYERS: "[{layers: [1, 3], backward_prefetch: 2}]"}, {1: {"": 2}, 3: {"": 2}}),
        (
            {
                LAYERS: "[{layers: [1], backward_prefetch: 2}]",
                OPERATORS: "[{op_name: ['.*\\.act', ffn], layers: [0, 2], backward_prefetch: 4}]",
            },
            {1: {"": 2}, 0: {"ffn.act": 4, "ffn": 4}},
        ),
        (
            {
                OPERATORS: "[{op_name: 'a.*', layers: [0], backward_prefetch: 4}]",
                "recompute_config.recompute": "[1, 2]",
            },
            {0: {"attention": 4, "add_attention": 4, "add_ffn": 4}},
        ),
        ({OPERATORS: "[{op_name: add_ffn, layers: True, backward_prefetch: 4}]",
          "recompute_config.recompute": "[1, 2]"}, {0: {"add_ffn": 4}, 3: {"add_ffn": 4}}),
    ],
)  # fmt: skip
def test_parts_of_layers(changes: dict[str, object], expected: object) -> None:
    assert read(changes) == expected


@pytest.mark.parametrize(
    "pattern", [r"a\.b", r".*\.b", r"a", r"a.*", r".*\.c", r"(a|b)\.c", "", r"a\."]
)
def test_patterns_match_as_mindformers_matches(pattern: str) -> None:
    """MindFormers' own walk over cells, on a layer with the same names."""
    utils = pytest.importorskip("mindformers.parallel_core.training_graph.transformer.utils")
    names, marked = ["a", "ab", "a.b", "a.c", "ab.c"], []

    class Part:
        def __init__(self, name: str) -> None:
            below = [n for n in names if n.rpartition(".")[0] == name]
            self.name, self._cells = name, {n.rpartition(".")[2]: Part(n) for n in below}

        def offload(self, backward_prefetch: int) -> None:
            marked.append(self.name)

    utils.LayerSetting.set_pattern_swap(Part(""), pattern.split(r"\."), 1)
    assert matched(pattern, names) == sorted(marked, key=names.index)


@pytest.mark.parametrize(
    ("use", "changes", "key", "message"),
    [
        ("train", ALONE, "swap", "one device"),
        ("train", {"runner_config.gradient_accumulation_steps": 1}, "swap", "one micro-batch"),
        ("dryrun", {"runner_config.gradient_accumulation_steps": 1}, "swap",
         "one micro-batch.*gradient_accumulation_steps > 1"),
        ("dryrun", {OPERATORS: "[{op_name: 'attention\\.cor', layers: True, backward_prefetch: 1}]"},
         "op_swap.0.op_name", "matches no operator.*attention.core"),
        ("dryrun", {OPERATORS: "[{op_name: ffn, layers: [1, 2], backward_prefetch: 1}]"},
         "op_swap.0.op_name", "matches no operator.*moe"),
        ("dryrun", {OPERATORS: "[{op_name: 'ffn\\.act', layers: [0], backward_prefetch: 1}]",
                    "telechat_moe.sharding.recompute": "[swiglu]"},
         "op_swap.0.op_name", "computes again"),
        ("dryrun", {OPERATORS: "[{op_name: ffn, layers: [0], backward_prefetch: 1}]",
                    LAYERS: "[{layers: [0, 1], backward_prefetch: 1}]"},
         "op_swap.0.op_name", "layer_swap swaps as a whole"),
        ("dryrun", {LAYERS: "[{layers: [0], backward_prefetch: 0}]"},
         "layer_swap.0.backward_prefetch", "integer >= 1"),
        ("dryrun", {LAYERS: "[{layers: [0]}]"}, "layer_swap.0.backward_prefetch", "missing"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(
    use: Use, changes: dict[str, object], key: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        read(changes, use)
    assert [p.key for p in caught.value.problems] == [f"swap_config.{key}"]
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"swap_config.swap": False, "telechat_moe.swap.pool_mib": 1}, "swap", "no effect"),
        ({"telechat_moe.swap": "{}", "optimizer.swap": True}, "swap", "says nothing"),
        ({"telechat_moe.swap": "{}"}, "swap", "says nothing"),
        ({"telechat_moe.swap.pool_mib": 0}, "swap.pool_mib", "integer >= 1"),
    ],
)
def test_a_pool_without_effect_is_refused(
    changes: dict[str, object], key: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read(changes, "train")
    assert [p.key for p in caught.value.problems] == [f"telechat_moe.{key}"]


@pytest.mark.parametrize(
    ("use", "changes", "message"),
    [
        (
            "train",
            {**ALONE, "telechat_moe.operators.adamw": "plain"},
            "True on one device with the plain AdamW on CPU",
        ),
        ("mindformers", {"context.memory_optimize_level": "O1"}, "memory_optimize_level O1"),
    ],
)
def test_moments_that_would_stay_are_refused(
    use: Use, changes: dict[str, object], message: str
) -> None:
    off = {"swap_config.swap": False, "trainer.type": "PretrainTrainer"}
    with pytest.raises(RecipeError, match=message) as caught:
        read({**off, "optimizer.swap": True, **changes}, use)
    assert "optimizer.swap" in [p.key for p in caught.value.problems]


@pytest.mark.parametrize("use", ["train", "dryrun", "plan"])
@pytest.mark.parametrize("key", ["overlap_exchange", "pipeline_schedule"])
def test_moments_are_swapped_in_any_order_of_passes(use: Use, key: str) -> None:
    stages = {
        "parallel_config.data_parallel": 1,
        "parallel_config.pipeline_stage": 2,
        "parallel_config.micro_batch_num": 2,
        "runner_config.gradient_accumulation_steps": 1,
        "telechat_moe.sharding.pipeline_schedule": "zb-h1",
    }
    beside = {
        "parallel_config.expert_parallel": 2,
        "telechat_moe.sharding.dispatcher": "alltoallv",
        "telechat_moe.sharding.overlap_exchange": True,
    }
    chosen = (
        {"overlap_exchange": beside, "pipeline_schedule": stages}[key] if use == "train" else {}
    )
    pool = {"telechat_moe.swap.pool_mib": 64} if use == "train" else {}
    assert not read({"swap_config.swap": False, "optimizer.swap": True, **chosen, **pool}, use)


def test_one_process_takes_swapped_moments() -> None:
    read({"swap_config.swap": False, "optimizer.swap": True, **ALONE}, "train")


def test_processes_take_swapping() -> None:
    pool = {"telechat_moe.swap.pool_mib": 64, "telechat_moe.swap.pool_folder": "pool"}
    assert read({**pool, LAYERS: "[{layers: [1], backward_prefetch: 2}]"}, "train") == {1: {"": 2}}


@pytest.mark.parametrize("key", ["overlap_exchange", "pipeline_schedule"])
def test_swapping_in_an_order_of_our_own_is_refused(key: str) -> None:
    asked = {"overlap_exchange": True, "pipeline_schedule": "1f1b"}[key]
    changes = {f"telechat_moe.sharding.{key}": asked}
    with pytest.raises(RecipeError, match="True with an order of passes of our own"):
        read({**changes, LAYERS: "[{layers: [1], backward_prefetch: 2}]"}, "train")

"""The planner's program as a recipe's pipeline schedule: what each rank runs, and what is refused."""

import json
from pathlib import Path

import pytest

from telechat_moe.recipe import Recipe, RecipeError, find, load
from telechat_moe.sharding.recipe import recomputed_layers, stages_of
from telechat_moe.tools.plan.cost.columns import stage_of_chunk
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.schedules.program import Program
from telechat_moe.tools.plan.schedules.published import generate
from telechat_moe.tools.plan.schedules.ranks import rank_orders

STAGES = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "callbacks.1.micro_batch_num": 4,
    "model.model_config.num_hidden_layers": 4,
}
IN_TURN = {
    "parallel.pipeline_config.pipeline_interleave": True,
    "model.model_config.pp_interleave_num": 2,
}
IN_A_V = {**IN_TURN, "parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v"}


def recipe(schedule: object, **changes: object) -> Recipe:
    values = {**STAGES, **changes, "telechat_moe.sharding.pipeline_schedule": schedule}
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()])


def test_ranks_of_a_stage_run_its_passes():
    layout = {"parallel_config.data_parallel": 2}
    orders = rank_orders(recipe("zb-h1", **layout))
    assert orders is not None
    assert orders[0] == orders[1] != orders[2] == orders[3]
    # Stage 1 of ZB-H1 with two stages holds one dW back (Qi et al. 2024, figure 3).
    assert orders[3][:6] == [
        ("F", 0, 0),
        ("D", 0, 0),
        ("F", 0, 1),
        ("D", 0, 1),
        ("W", 0, 0),
        ("F", 0, 2),
    ]


EXCHANGES = {
    "parallel_config.data_parallel": 2,
    "parallel_config.expert_parallel": 2,
    "telechat_moe.sharding.dispatcher": "alltoallv",
    "telechat_moe.sharding.overlap_exchange": True,
}


def test_pairs_stay_pairs_where_exchanges_run_beside_computation():
    """Stage 1 runs one forward ahead, then a forward beside the dX before it (Megatron-LM's overlap), its dW behind."""
    orders = rank_orders(recipe("1f1b-overlap", **EXCHANGES))
    assert orders is not None
    assert orders[3][:3] == [("F", 0, 0), ("FD", 0, 1, 0, 0), ("W", 0, 0)]
    alone = rank_orders(recipe("1f1b-overlap"))
    assert alone is not None
    assert alone[1][:4] == [("F", 0, 0), ("F", 0, 1), ("D", 0, 0), ("W", 0, 0)]
    in_a_v = rank_orders(recipe("dualpipev", **EXCHANGES, **IN_A_V))
    assert in_a_v is not None
    both = {(one[1], one[3]) for one in in_a_v[0] if len(one) == 5}
    assert both == {(0, 1), (1, 0)}  # a forward of one chunk beside a backward of the other


def test_one_stage_pairs_its_micro_batches():
    one = {
        "parallel_config.pipeline_stage": 1,
        "parallel_config.micro_batch_num": 1,
        "runner_config.gradient_accumulation_steps": 3,
        "callbacks": "[]",
        "model.model_config.moe_router_enable_expert_bias": False,
    }
    orders = rank_orders(recipe("null", **EXCHANGES, **one))
    pairs = [("F", 0, 0), ("FB", 0, 1, 0, 0), ("FB", 0, 2, 0, 1), ("B", 0, 2)]
    assert orders == {0: pairs, 1: pairs}


def test_a_program_without_pairs_leaves_nothing_beside_an_exchange():
    with pytest.raises(RecipeError, match="zb-h1 with 4 micro-batches has no pair"):
        rank_orders(recipe("zb-h1", **EXCHANGES))


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "synthesised"])
def test_chunks_in_a_v(schedule: str):
    """Stage 0 holds chunks 0 and 3: the forward of its second one comes after both of stage 1."""
    orders = rank_orders(recipe(schedule, **IN_A_V))
    assert orders is not None
    first, last = orders[0].index(("F", 0, 0)), orders[0].index(("F", 1, 0))
    assert first < last
    passes = {(k, c, m) for k in "FDW" for c in (0, 1) for m in range(4)}
    for order in orders.values():
        assert {
            (k, c, m) for kind, c, m in order for k in ("DW" if kind == "B" else kind)
        } == passes


def test_without_a_schedule_the_order_is_mindspores():
    assert rank_orders(recipe("null")) is None


@pytest.mark.parametrize(
    ("schedule", "layout", "message"),
    [
        ("dualpipe", {}, "holds each weight once; dualpipev"),
        ("zb-v", {}, "schedule zb-v: 1 chunks a stage; 2 chunks a stage"),
        (
            "zb-v",
            IN_TURN,
            r"stages \[0, 1, 1, 0\], the recipe's on \[0, 1, 0, 1\]; .* zero_bubble_v",
        ),
        (
            "interleaved",
            IN_A_V,
            r"on \[0, 1, 1, 0\]; pipeline_interleave True with pp_int",
        ),
        (
            "zigzag",
            {},
            "no such schedule; one of gpipe, 1f1b, .*, synthesised, or a JSON file of a program",
        ),
        ("none.json", {}, "cannot be read: No such file or directory; a file"),
    ],
)
def test_what_the_layout_cannot_express_is_refused(schedule, layout, message: str):
    with pytest.raises(RecipeError, match=message) as error:
        rank_orders(recipe(schedule, **layout))
    assert f"telechat_moe.sharding.pipeline_schedule: {schedule}" in str(error.value)


def write(folder: Path, program: Program) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({"program": program.to_json()}))
    return path


def test_a_program_from_a_file(tmp_path: Path):
    path = write(tmp_path, generate("gpipe", 2, 4, 1))
    assert rank_orders(recipe(path)) == rank_orders(recipe("gpipe"))
    for stages, micro in ((2, 2), (4, 4)):
        with pytest.raises(RecipeError, match=f"for {stages} stages and {micro} micro-batches"):
            rank_orders(recipe(write(tmp_path, generate("gpipe", stages, micro, 1))))


def test_what_the_recipe_says_is_refused_with_its_line(tmp_path: Path):
    text = find("telechat3_moe/pretrain_tiny.yaml").read_text()
    assert "\n  sharding:" not in text
    at = text.splitlines().index("telechat_moe:") + 1
    lines = text.splitlines()
    lines.insert(at, "  sharding: {pipeline_schedule: zigzag}")
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    with pytest.raises(RecipeError, match="no such schedule") as error:
        rank_orders(load(tmp_path / "mine.yaml", [f"{k}={v}" for k, v in STAGES.items()]))
    assert [problem.line for problem in error.value.problems] == [at + 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"not JSON \(Expecting value: line 1"),
        ("[]", "no program: "),
        ("{}", "no program: it lacks 'name'"),
        ('{"routes": []}', "do not fit together"),
        ('{"routes": [[0, 2]]}', "do not fit together"),
        ('{"route_of": [0, 0, 0, 5]}', "do not fit together"),
        ('{"ops": [[], [], []]}', "do not fit together"),
        ('{"ops": [[["F", 0]], []]}', "no program: "),
        ('{"ops": [[["F", 0, 0]], []]}', "program gpipe: F of chunk 0, micro-batch 1: 0 times"),
    ],
)
def test_a_file_that_holds_no_program_is_refused(tmp_path: Path, content: str, said: str):
    path = tmp_path / "mine.json"
    changed = json.loads(content) if len(content) > 2 else None
    good = generate("gpipe", 2, 4, 1).to_json()
    path.write_text(content if changed is None else json.dumps(good | changed))
    with pytest.raises(RecipeError, match=said):
        rank_orders(recipe(path))


def test_a_deadlock_is_refused_with_what_each_stage_waits_for(tmp_path: Path):
    good = generate("gpipe", 2, 4, 1)
    first = list(good.ops[0])
    first[3], first[4] = first[4], first[3]  # wants a gradient before it sends the last activation
    second = list(good.ops[1])
    program = Program("swapped", 2, 4, good.routes, (tuple(first), tuple(second)))
    with pytest.raises(RecipeError, match=r"cannot finish \(deadlock\):\n.*stage 0 is stopped at"):
        rank_orders(recipe(write(tmp_path, program)))


def test_a_recipe_of_a_v_has_its_layers_where_they_are_sharded():
    """The second list of offsets is by stage, and the model runs through it from the last stage to the first."""
    numbers = {
        "model.model_config.num_hidden_layers": 7,
        "model.model_config.offset": [[1, 0], [0, 2]],
        "recompute_config.recompute": [[1, 0], [0, 3]],
    }
    folded = recipe("null", **IN_A_V, **numbers)
    layout, stages = Layout.from_recipe(folded), stages_of(folded)
    assert stages
    assert layout.chunks == (2, 1, 3, 1)
    assert layout.recompute_layers == (1, 0, 3, 0)
    places = zip(stage_of_chunk(layout), layout.chunks, strict=True)
    assert [stage for stage, n in places for _ in range(n)] == [x.stage for x in stages.layers]
    marked = [is_marked for chunk in layout.chunk_kinds(["moe"] * 7) for _, is_marked in chunk]
    assert {i for i, is_marked in enumerate(marked) if is_marked} == recomputed_layers(
        folded, stages
    )

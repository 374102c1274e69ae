"""What the versions of MindFormers do differently, by their own code, and what `check` says of it for each."""

import importlib.util
import re
from collections import Counter

import pytest
from test_mindformers_dryrun import MODEL, SMALL, TELECHAT, layout, operators

from telechat_moe.errors import BadInputError
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.mindir import COLLECTIVES
from telechat_moe.interop.mindformers_dryrun import compile_mindformers
from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.uses import Use
from telechat_moe.versions import mindformers_version

PER_TOKEN = "calculate_per_token_loss=True"
ACCUMULATE = "runner_config.gradient_accumulation_steps=2"
METHOD, DEGREE = "parallel_config.context_parallel_algo", "parallel_config.ulysses_degree_in_cp"
HYBRID, ULYSSES, BY_TWO = f"{METHOD}=hybrid_cp", f"{METHOD}=ulysses_cp", f"{DEGREE}=2"
SHARED = "parallel_config.context_parallel=4"
WIDE = "model.model_config.v_head_dim=192"
DATA = "train_dataset.data_loader.config"
COLUMNS = "[input_ids,labels,loss_mask,position_ids,actual_seq_len]"
ENDS = [
    f"{DATA}.create_compressed_eod_mask=True",
    f"{DATA}.create_attention_mask=False",
    *(f"train_dataset.{key}={COLUMNS}" for key in ("input_columns", "construct_args_key")),
]
NONE_SET = [
    f"{DATA}.{key}=False" for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
]
NETWORK = "trainer={type: CausalLanguageModelingTrainer, model_name: telechat3_moe}"


def refusals(overrides: list[str], use: Use) -> list[str]:
    """Return what is wrong with a recipe of MindFormers' own network for a version."""
    try:
        load(TELECHAT, [NETWORK, *overrides], use=use)
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([PER_TOKEN], "calculate_per_token_loss: True with a pipeline or accumulation"),
        ([PER_TOKEN, *layout(128, 2, 1, 16), ACCUMULATE], "with a pipeline or accumulation"),
        ([HYBRID], "context_parallel_algo: hybrid_cp, which the networks of MindFormers 1.9.0"),
        ([*ENDS, *NONE_SET], "create_compressed_eod_mask: True without .* fails at the second"),
        ([f"{DATA}.pad=5", *NONE_SET], "config.pad: 5 without .* in the later ones"),
    ],
)
def test_what_one_version_cannot_is_refused_for_it(overrides: list[str], message: str) -> None:
    assert [line for line in refusals(overrides, "mindformers-1.9") if re.search(message, line)]
    assert not [line for line in refusals(overrides, "mindformers-2.1") if re.search(message, line)]


@pytest.mark.parametrize("use", ["mindformers-1.9", "mindformers-2.1"])
def test_a_key_over_which_another_is_put(use: Use) -> None:
    sections = [f"{MODEL}.{PER_TOKEN}", f"runner_wrapper.{PER_TOKEN}"]
    put_over = [line for line in refusals(sections, use) if "puts the top-level key" in line]
    assert len(put_over) == 2
    assert not [x for x in refusals([*sections, PER_TOKEN], use) if "the top-level key" in x]


@pytest.mark.parametrize("use", ["mindformers-1.9", "mindformers-2.1"])
def test_how_devices_share_a_sequence(use: Use) -> None:
    unread = [f"{METHOD}: ulysses_cp, without effect: the network gathers keys and values; coloss"]
    narrow = [f"{DEGREE}: 2, with which MindFormers' networks compile only if MLA's values are as"]
    idle = [f"{DEGREE}: 2, without effect: no heads are split; 1"]
    for overrides, plugin, lines in (
        ([ULYSSES], False, unread),
        ([BY_TWO], False, narrow),
        ([ULYSSES, BY_TWO], False, unread + narrow),
        ([ULYSSES, BY_TWO, WIDE], False, []),
        ([ULYSSES, BY_TWO, WIDE], True, unread + idle),
    ):
        network = "trainer.type=TelechatMoeTrainer" if plugin else NETWORK
        problems = [
            x for x in refusals([network, SHARED, *overrides], use) if "parallel_config" in x
        ]
        assert len(problems) == len(lines), problems
        assert all(part in line for part, line in zip(lines, problems, strict=True)), problems


def compiled(*overrides: str) -> Counter[str]:
    """Compile a rank of a small network of MindFormers; return how many operators of each kind its graph has."""
    return Counter(operator.kind for operator in operators(graph_of(*overrides)))


def graph_of(*overrides: str) -> RankGraph:
    shared = f"{MODEL}.moe_shared_expert_intermediate_size=32"
    (graph,) = compile_mindformers(TELECHAT, [0], overrides=[*SMALL, shared, *overrides])
    return graph


def collectives(*overrides: str) -> Counter[str]:
    """Return how many of each collective the graph has."""
    counts = compiled(*overrides)
    return Counter({kind: count for kind, count in counts.items() if kind in COLLECTIVES})


compiles = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow(group="mindformers"),
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]


class TestMindFormers:
    pytestmark = compiles

    def test_per_token_loss_is_chosen_at_the_top_level(self) -> None:
        plain = compiled(*layout(2, 2, 1, 2))
        assert compiled(*layout(2, 2, 1, 2), f"{MODEL}.{PER_TOKEN}") == plain
        assert compiled(*layout(2, 2, 1, 2), PER_TOKEN) != plain

    @pytest.mark.parametrize(
        "overrides", [layout(1, 2, 2, 2, micro=4), [*layout(2, 2, 1, 2), ACCUMULATE]]
    )
    def test_per_token_loss_of_several_micro_batches(self, overrides: list[str]) -> None:
        if mindformers_version() == "1.9.0":
            with pytest.raises(BadInputError, match="Unstack"):
                compiled(*overrides, PER_TOKEN)
        else:
            assert compiled(*overrides, PER_TOKEN)

    def test_how_devices_share_a_sequence(self) -> None:
        """The method's name changes nothing; heads are split by the degree, where values are as wide as queries."""
        heads = [f"{MODEL}.num_attention_heads=8", f"{MODEL}.num_key_value_heads=8"]
        degrees = [*layout(1, 2, 1, 2), SHARED, *heads]
        gathered = collectives(*degrees)
        assert collectives(*degrees, ULYSSES) == gathered
        if mindformers_version() == "1.9.0":
            with pytest.raises(BadInputError, match="hybrid_cp is not supported"):
                compiled(*degrees, HYBRID)
        else:
            assert collectives(*degrees, HYBRID) == gathered
        with pytest.raises(BadInputError, match="Reshape"):
            compiled(*degrees, ULYSSES, BY_TWO)
        assert collectives(*degrees, BY_TWO, WIDE)["AlltoAll"] > gathered["AlltoAll"]

"""What documents leave of attention, against the mask itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.cli import main
from telechat_moe.data.indexed import write_indexed
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.documents import pack, read_lengths
from telechat_moe.tools.plan.cost.flops import keys_per_token
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.roofline import causal_share
from telechat_moe.tools.plan.report.step import of_recipe

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 24))
def test_pairs_are_those_of_the_mask(lengths: list[int], seq: int) -> None:
    stream = np.repeat(np.arange(len(lengths)), lengths)
    count = len(stream) // seq
    if not count:
        with pytest.raises(BadInputError, match="at least one sequence"):
            pack(np.array(lengths), seq)
        return
    rows = stream[: count * seq].reshape(count, seq)
    mask = (rows[:, :, None] == rows[:, None, :]) & np.tri(seq, dtype=bool)
    packed = pack(np.array(lengths), seq)
    np.testing.assert_array_equal(packed.pairs, mask.sum((1, 2)))
    assert packed.share == pytest.approx(mask.mean())


def test_attention_costs_what_the_mask_leaves() -> None:
    recipe = load(RECIPE)
    causal = Architecture.from_recipe(recipe)
    short = Architecture.from_recipe(recipe, pair_share=pack(np.full(64, 512), 4096).share)
    x = Layout.from_recipe(recipe)
    shares = causal_share(columns([(causal, x), (short, x), (short, x.with_changes(skips=False))]))
    assert shares == pytest.approx([0.5, 513 / 2 / 4096, 1.0])
    assert keys_per_token(short) == pytest.approx(513 / 2)
    steps = [of_recipe(recipe, "ascend-910b", pair_share=a.pair_share) for a in (causal, short)]
    core = [s.step_s for s in steps]
    assert core[1] < core[0]
    masked = load(
        RECIPE,
        [
            "train_dataset.data_loader.config.create_attention_mask=true",
            "train_dataset.input_columns=null",
            "train_dataset.construct_args_key=null",
            "model.model_config.use_attn_mask_compression=false",
        ],
    )
    assert not Layout.from_recipe(masked).skips
    assert of_recipe(masked, "ascend-910b").step_s > core[0]


def test_lengths_are_read_from_an_index_and_from_a_text(tmp_path) -> None:
    write_indexed(tmp_path / "d", [np.arange(n) for n in (5, 1, 9)], np.uint16)
    (tmp_path / "d.txt").write_text("5\n1\n\n9\n")
    for name in ("d.idx", "d.txt"):
        assert read_lengths(str(tmp_path / name)).tolist() == [5, 1, 9]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5\n-1\n", "line 2: '-1'"),
        ("5\n2.5\n", "line 2: '2.5'"),
        ("\n", "no lengths"),
        ("7\n" * 3, "21 tokens, expected at least one sequence of 4,096"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_list_of_lengths_is_said(tmp_path, capsys, text: str | None, said: str) -> None:
    file = tmp_path / "lengths.txt"
    if text is not None:
        file.write_text(text)
    words = ["plan", "simulate", RECIPE, "--device", "ascend-910b", "--documents", str(file)]
    assert main(words) == 3
    assert said in capsys.readouterr().err


def test_the_command_says_what_documents_leave(tmp_path, capsys) -> None:
    (tmp_path / "lengths.txt").write_text("1024\n" * 400)
    words = [RECIPE, "--device", "ascend-910b", "--documents", str(tmp_path / "lengths.txt")]
    assert main(["plan", "simulate", *words]) in (0, 1)
    assert "25.0% of a causal mask's pairs" in capsys.readouterr().out

"""`telechat-moe layouts`."""

import json

from telechat_moe.cli import main

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def test_groups_and_words_of_a_rank(capsys):
    """Rank 17 of dp4 x tp8 x pp8 with ep4 inside tp: written down by hand."""
    assert main(["layouts", RECIPE, "--rank", "17", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["groups"] == {
        "dp": [1, 9, 17, 25],
        "cp": [17],
        "tp": [16, 17, 18, 19, 20, 21, 22, 23],
        "ep": [16, 17, 18, 19],
    }
    assert (answer["stage"], answer["layers"]) == (0, [0, 1, 2, 3, 4])
    parts = {word: found["parts"] for word, found in answer["words"].items()}
    assert parts["batch"] == 4
    assert parts["tp"] == 8
    assert parts["stream"] == 32
    assert parts["expert"] == 4


def test_table_and_refusal(capsys):
    assert main(["layouts", RECIPE, "--rank", "255"]) == 0
    printed = capsys.readouterr().out
    assert "Linear.row" in printed
    assert "stage 7" in printed
    assert main(["layouts", RECIPE, "--rank", "256"]) == 2
    assert "ranks 0 to 255" in capsys.readouterr().err

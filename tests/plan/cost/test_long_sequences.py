"""The recipes of 128K and 256K: the model of the 4K recipe, what a device holds, and what it gathers."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.expected_graph import predict

SHORT = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
PAGE = Path(__file__).parents[3] / "docs" / "long_sequences.md"
OF_LENGTH = {"seq_length", "max_position_embeddings", "rope_theta"}


@pytest.mark.parametrize(("kilo", "devices", "context"), [(128, 256, 4), (256, 512, 8)])
def test_a_long_recipe(kilo: int, devices: int, context: int, tmp_path: Path) -> None:
    """The model is that of 4K but for what depends on length; the page has its degrees and its memory."""
    name, tokens = f"telechat3_moe/pretrain_105b_a4b_{kilo}k.yaml", kilo * 1024
    recipe, short = load(name), load(SHORT)
    model, other = asdict(recipe.model_config), asdict(short.model_config)
    assert {key for key in model if model[key] != other[key]} == OF_LENGTH
    assert model["seq_length"] == model["max_position_embeddings"] == tokens
    assert model["rope_theta"] > 0.0424 * tokens**1.628  # Men et al. 2024, figure 1
    parallel = recipe.parallel_config
    assert (recipe.devices, parallel.context_parallel) == (devices, context)
    assert parallel.expert_parallel == context * parallel.model_parallel
    out = tmp_path / "step.json"
    assert main(["plan", "simulate", name, "--device", "ascend-910b", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    page = PAGE.read_text(encoding="utf-8")
    assert f"{figures['step_s']:.2f} s" in page
    for stage in (0, 1, 7):
        row = re.search(rf"^\| {kilo}K \| {stage}\b[^|]*\|(.*GiB)?(.*)\|$", page, re.M)
        assert row
        sizes = {k: v / 2**30 for k, v in figures["stages"][stage].items() if k.endswith("_bytes")}
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        columns = [sizes[f"{kind}_bytes"] for kind in kinds]
        printed = [float(x) for x in row[2].split("|")]
        assert printed == pytest.approx([*columns, sizes["peak_bytes"]], abs=0.006)


@pytest.mark.parametrize(("copies", "gathers"), [(1, {8: 32768, 4: 131072}), (2, {32: 131072})])
def test_latents_are_gathered_as_the_compiled_graph_does(
    copies: int, gathers: dict[int, int]
) -> None:
    """One gather over context and tensor where data parallelism divides other rows, two without it."""
    strategy = f"parallel.dataset_strategy={[[copies, 1]] * 4}"
    sets = [f"parallel_config.data_parallel={copies}", strategy]
    calls = predict(load("telechat3_moe/pretrain_105b_a4b_128k.yaml", sets), 0).calls
    latent = {
        len(call.ranks): call.bytes // 2 // 512
        for call in calls
        if call.phase == "forward" and call.kind == "AllGather" and call.bytes in SIZES
    }
    assert latent == gathers


SIZES = {2 * 512 * rows for rows in (32768, 131072)}

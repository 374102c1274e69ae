"""Layouts in other programs' words, read back by the rules of their documents."""

import random
import re
from dataclasses import replace

import pytest

from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.search.emit import layout_string, mindspeed_arguments

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def _stages(text: str) -> list[str]:
    """Read `--pipeline-model-parallel-layout`: stages are split by |, x*n and (xy|)*n repeat (docs of Megatron Core)."""
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


def _value(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def _random(rng: random.Random) -> tuple[Architecture, Layout]:
    recipe = load(LARGE)
    pp, vpp = rng.choice([(1, 1), (2, 1), (4, 1), (2, 3), (4, 2)])
    n, dense = pp * vpp, rng.randint(0, 3)
    chunks = [rng.randint(1, 4) for _ in range(n)]
    if n > 1:
        chunks[0], chunks[-1] = rng.randint(0, 3), rng.randint(0, 3)
    ends = rng.choice(["last", "mtp-before"]) if pp > 1 else "last"
    if ends != "last":
        chunks[-1] = 0
    chunks[0] += not any(chunks)
    total = sum(chunks)
    dense = min(dense, total)
    a = replace(
        Architecture.from_recipe(recipe), layers=("dense",) * dense + ("moe",) * (total - dense)
    )
    layout = Layout.from_recipe(recipe).with_changes(
        dp=4, tp=1, cp=1, pp=pp, vpp=vpp, ep=1, etp=1, micro_batches=8, chunks=tuple(chunks), ends=ends,
        schedule="interleaved" if vpp > 1 else "1f1b", recompute="none", recompute_layers=None,
    )  # fmt: skip
    return a, layout


def test_megatron_reads_the_same_chunks() -> None:
    rng = random.Random(3)
    for _ in range(200):
        a, layout = _random(rng)
        chunks = _stages(layout_string(a, layout))
        assert tuple(stage.count("t") for stage in chunks) == layout.chunks
        layers = "".join(chunks)
        assert layers == "E" + "t" * len(a.layers) + "m" * a.mtp + "L"
        assert chunks[-1].endswith("L")
        at = len(chunks) - 1 - (layout.ends != "last")
        assert [i for i, stage in enumerate(chunks) if "m" in stage] == [at] * bool(a.mtp)


def test_mindspeed_builds_the_same_model() -> None:
    """No-op layers are counted from 0 among `--num-layers` (MindSpeed, docs/features/noop-layers.md), and so are the first
    dense ones (MindSpeed-LLM, `_transformer_block_build_layers`).
    """
    rng = random.Random(4)
    seen = 0
    for _ in range(200):
        a, layout = _random(rng)
        if layout.ends != "last":
            continue
        words = mindspeed_arguments(a, layout)
        number = int(_value(words, "--num-layers") or 0)
        idle = {int(i) for i in (_value(words, "--noop-layers") or "").split(",") if i}
        count = layout.pp * layout.vpp
        per = int(_value(words, "--num-layers-per-virtual-pipeline-stage") or number // layout.pp)
        assert number == per * count
        first = int(_value(words, "--first-k-dense-replace") or (0 if a.moe_layers else number))
        kinds = [None if i in idle else "dense" if i < first else "moe" for i in range(number)]
        built = [[k for k in kinds[c * per : (c + 1) * per] if k] for c in range(count)]
        assert tuple(map(len, built)) == layout.chunks
        assert tuple(k for chunk in built for k in chunk) == a.layers
        assert _value(words, "--mtp-num-layers") == str(a.mtp)
        seen += bool(idle) and 0 < a.dense_layers < len(a.layers) and layout.chunks[0] == 0
    assert seen > 5  # dense layers behind no-op ones


def test_experts_of_cut_and_whole_groups() -> None:
    a, layout = _random(random.Random(5))
    both = layout.with_changes(
        tp=2, ep=4, dp=4, pp=1, vpp=1, chunks=(len(a.layers),), ends="last", schedule="1f1b"
    )
    words = mindspeed_arguments(a, both)
    assert "--moe-tp-extend-ep" in words
    assert _value(words, "--expert-model-parallel-size") == "2"
    cut = mindspeed_arguments(a, both.with_changes(ep=4, etp=2))
    assert _value(cut, "--expert-tensor-parallel-size") == "2"
    assert _value(cut, "--expert-model-parallel-size") == "4"
    with pytest.raises(Exception, match="all 4 tensor-parallel ranks or none"):
        mindspeed_arguments(a, both.with_changes(tp=4, ep=2))

"""Compiled graphs of MindFormers' own class and of ours: parameters, operators, and the tables in the docs."""

import importlib.util
from pathlib import Path

import pytest
from upstream_tables import RECIPE, SMALL, compared, operator_lines, parameter_lines, small

from benchmarks.upstream import compare as upstream
from benchmarks.upstream.compare import Row, compare_parameters, component_of
from telechat_moe.interop import upstream_names
from telechat_moe.recipe import load

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
DOCS = Path(__file__).parents[2] / "benchmarks" / "upstream" / "tables.md"


def counts(found, part):
    """Return primitive, with its type, to number of MindFormers' graph and of ours."""
    (row,) = [row for row in found["operators"] if row[0] == part]
    sides = [[item.split(" ", 1) for item in side.split(", ")] for side in row[1:]]
    return [{kind: int(number) for number, kind in side} for side in sides]


@pytest.mark.slow
def test_one_device():
    """Same parameters; the operators that the mathematics asks for are there as often; the docs have this table."""
    found = compared("--one-device", *small())
    assert found["exit"] == 0
    assert found["problems"] == []
    assert found["elements"]["mindformers"] == found["elements"]["telechat-moe"] > 100_000
    assert len(found["parameters"]) == 46
    for part, kind in (
        ("norms", "RmsNorm fp32"),
        ("attention", "FlashAttentionScore bf16"),
        ("products of attention", "MatMul bf16"),
        ("dispatch, experts, combine", "Swiglu bf16"),
        ("router and balance loss", "Sigmoid fp32"),
        ("router and balance loss", "AssignAdd"),
        ("head", "MatMul bf16"),
        ("losses", "Log"),
    ):
        theirs, ours = counts(found, part)
        assert theirs[kind] == ours[kind] > 0, (part, kind)
    # gate and up: one product there, two here
    theirs, ours = counts(found, "dispatch, experts, combine")
    assert (theirs["GroupedMatmul bf16"], ours["GroupedMatmul bf16"]) == (2 * 2, 3 * 2)
    # upstream's linear layers give back the type that they got, fp32 behind a norm
    theirs, ours = counts(found, "dense and shared MLP")
    assert theirs["Swiglu fp32"] == ours["Swiglu bf16"] == 3
    text = DOCS.read_text()
    missing = [line for line in operator_lines(found) if line not in text]
    assert not missing, (
        f"PYTHONPATH=. python tests/interop/upstream_tables.py prints what is now: {missing}"
    )


def test_names_in_the_docs():
    text = DOCS.read_text()
    assert [line for line in parameter_lines() if line not in text] == []


def test_what_differs_is_said():
    """Rows of graphs that do not hold the same parameters."""
    recipe = load(RECIPE, [*upstream.ONE_DEVICE, *SMALL])
    theirs = {
        "output_layer.weight": (256, 64),
        "decoder.final_layernorm.weight": (65,),
        "odd": (2,),
    }
    ours = {"norm.weight": (64,), "extra": (3,)}
    graphs = iter([theirs, ours])
    original = upstream.parameters
    upstream.parameters = lambda graph: dict(next(graphs))
    try:
        rows = compare_parameters(None, None, recipe)
    finally:
        upstream.parameters = original
    assert [row.problem for row in rows] == [
        "MindFormers has [65], expected [64]",
        "ours are nothing, expected [256, 64]",
        "MindFormers' only, in no table",
        "ours only, in no table",
    ]
    assert rows[2] == Row("odd", (), "", (2,), (), "MindFormers' only, in no table")


def test_the_input_of_mtp_is_on_another_stage(monkeypatch):
    recipe = load(RECIPE, [*upstream.ONE_DEVICE, *SMALL])
    pairs = [p for p in upstream_names.pairs(recipe.model_config) if "norm" in p.names[0]]
    pairs = [p for p in pairs if p.names[0] in ("mtp.0.embed_norm.weight", "mtp.0.norm.weight")]
    monkeypatch.setattr(upstream_names, "pairs", lambda config: pairs)
    for stage, mine in ((0, True), (1, False)):
        graphs = [{}, {p.names[0]: p.shapes[0] for p in pairs}]
        theirs_and_ours = iter(graphs if mine else [{p.upstream: p.shape for p in pairs}, {}])
        monkeypatch.setattr(upstream, "parameters", lambda graph, held=theirs_and_ours: next(held))
        rows = compare_parameters(None, None, recipe, stage)
        assert [bool(row.problem) for row in rows] == [
            row.ours[0] == "mtp.0.norm.weight" for row in rows
        ]
        assert len(rows) == 2


@pytest.mark.parametrize(
    ("module", "is_upstream", "part"),
    [
        ("model.decoder.layers.3.self_attention.linear_q_up_proj", True, "products of attention"),
        ("model.decoder.layers.3.self_attention.apply_rotary_emb2", True, "rotation"),
        ("model.mtp.layers.0.transformer_layer.mlp.experts", True, "dispatch, experts, combine"),
        ("model.mtp.layers.0.transformer_layer", True, "residual stream"),
        ("model.mtp.compute_language_model_loss.cross_entropy", True, "losses"),
        ("model.decoder.layers.0.mlp.linear_fc1", True, "dense and shared MLP"),
        ("layers.0.attention.out", False, "products of attention"),
        ("mtp.0.block.moe.shared.gate", False, "dense and shared MLP"),
        ("mtp.0.block.moe.router", False, "router and balance loss"),
        ("mtp_loss.token_loss.part", False, "losses"),
        ("optimizer", False, None),
    ],
)
def test_parts(module, is_upstream, part):
    assert component_of(module, is_upstream) == part


@pytest.mark.slow
def test_split():
    """Cut over data, tensor and expert parallelism: the whole shapes are the same, though the cuts are not."""
    layout = [f"parallel_config.{key}_parallel=2" for key in ("data", "model", "expert")]
    layout += ["parallel_config.pipeline_stage=1", "parallel_config.micro_batch_num=1"]
    layout += ["model.model_config.offset=0", "model.model_config.num_hidden_layers=2"]
    found = compared("--rank", "3", *small(*layout))
    assert found["exit"] == 0
    assert len(found["parameters"]) == 46


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 255])
def test_105b(rank):
    """The first and the last stage of the 105B recipe as it is, on 256 devices."""
    found = compared("--rank", str(rank))
    assert found["exit"] == 0
    assert found["problems"] == []
    # MTP's input is read on the last stage there, on the first here: a norm, and a copy of the embedding.
    moved = 2560 if rank == 0 else -2560 - 131072 * 2560
    elements = found["elements"]
    assert elements["telechat-moe"] - elements["mindformers"] == moved
    assert elements["mindformers"] > 10**9

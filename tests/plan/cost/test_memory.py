"""Memory: parameters against exact counts, activations against Korthikanti et al. 2022, in-flight micro-batches."""

import math
from dataclasses import replace

import pytest

from benchmarks.plan_memory.small import RECIPE, SETTINGS
from benchmarks.plan_published.models import published
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.expected_graph import activations
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.memory import (
    WORKSPACE,
    in_flight,
    layer_activations,
    local_parameters,
    memory,
)
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.cost.step import evaluate

A100 = load_device("a100")


@pytest.mark.parametrize("name", ["llama3 8b", "deepseekv3", "qwen3 30b", "mixtral 8x7b", "mpt7b"])
@pytest.mark.parametrize("pp", [1, 4])
def test_stages_hold_every_parameter_once(name, pp):
    a = published(name)
    assert a is not None
    dense, experts = local_parameters(columns([(a, Layout(pp=pp, dp=8, ep=8))]))
    spare = a.vocab * a.hidden if a.tied and pp > 1 else 0  # first and last stage hold a copy each
    elements = dense.sum() + experts.sum() * 8 - spare
    assert elements == pytest.approx(a.parameters, rel=2e-5)  # shifts of the last norm


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_gpt_layer(tp):
    """Korthikanti et al. 2022: s b h (34 + 5 a s / h), dropout masks (3 s b h) and GeLU's input kept (8) among the 34."""
    h, a, s, b = 12288, 96, 2048, 1
    gpt = Architecture(hidden=h, layers=("dense",) * 2, heads=a, seq=s, vocab=51200, gated=False)
    layout = Layout(tp=tp, sequence_parallel=tp > 1, micro_batch=b).with_changes(flash=False)
    dense, _, entry = layer_activations(columns([(gpt, layout)]))
    published_bytes = s * b * h * (34 + 5 * a * s / h) / tp
    masks = (
        2 * s * b * h / tp
    )  # of the two residual branches, one byte each: these models train without dropout
    assert dense[0] == pytest.approx(published_bytes - masks, rel=0.04)
    assert entry[0] == 2 * s * b * h / tp


def test_micro_batches_in_flight():
    gpt = Architecture(hidden=512, layers=("dense",) * 8, heads=8, seq=128, vocab=512, gated=False)
    flat = in_flight(columns([(gpt, Layout(pp=4, micro_batches=16))]))[0]
    assert flat.tolist() == [4, 3, 2, 1]
    short = in_flight(columns([(gpt, Layout(pp=4, micro_batches=2))]))[0]
    assert short.tolist() == [2, 2, 2, 1]
    all_of_them = in_flight(columns([(gpt, Layout(pp=4, micro_batches=16, schedule="gpipe"))]))[0]
    assert all_of_them.tolist() == [16] * 4
    mixed = in_flight(
        columns([(gpt, Layout(pp=4, vpp=2, micro_batches=16, schedule="interleaved"))])
    )[0]
    # 1 + (P - 1) / (P V) times 1F1B's on the first stage (Narayanan et al. 2021, section 2.2)
    assert mixed[0] == pytest.approx(4 * (1 + 3 / 8))


def test_zero_levels_divide_what_they_say():
    gpt = Architecture(hidden=1024, layers=("dense",) * 8, heads=8, seq=128, vocab=512, gated=False)
    tables = [evaluate(gpt, [Layout(dp=8, zero=z)], A100).memory for z in (0, 1, 2, 3)]
    for level, (name, since) in enumerate((("optimizer", 1), ("gradients", 2), ("parameters", 3))):
        del level
        for z, table in enumerate(tables):
            total = getattr(tables[0], name)[0, 0]
            assert getattr(table, name)[0, 0] == pytest.approx(total / (8 if z >= since else 1))


OWN = [
    {"dp": 4, "tp": 8, "pp": 8, "ep": 4, "recompute": "full"},
    {"dp": 4, "tp": 8, "pp": 8, "ep": 32, "sequence_parallel": False},
    {"dp": 8, "cp": 8, "tp": 1, "pp": 4, "ep": 64, "micro_batches": 4},
    {
        "dp": 8,
        "tp": 4,
        "pp": 3,
        "vpp": 3,
        "ep": 8,
        "etp": 4,
        "micro_batches": 9,
        "recompute": "norm+activation",
    },
    {"dp": 8, "tp": 4, "pp": 1, "ep": 32, "micro_batches": 1, "recompute": "full"},
    {"dp": 8, "cp": 4, "tp": 1, "pp": 1, "ep": 32, "zero": 1, "micro_batches": 1},
]


@pytest.mark.parametrize("change", OWN)
def test_our_own_step_by_its_tensors(change):
    """Many configurations at once, against stage by stage, pass by pass, which compiled graphs confirm."""
    recipe = load("telechat3_moe/pretrain_105b_a4b_4k.yaml")
    a, base = Architecture.from_recipe(recipe), Layout.from_recipe(recipe)
    x = base.with_changes(
        zero=0, recompute="none", recompute_layers=None, chunks=None
    ).with_changes(**change)
    x = x.with_changes(schedule="interleaved" if x.vpp > 1 else "1f1b")
    table = columns([(a, x)])
    footprint = memory(table)
    alive = (footprint.activations + footprint.buffers)[0] - WORKSPACE
    assert alive == pytest.approx(activations(a, x), rel=0.06)
    dense, experts = local_parameters(table)
    sp, named = x.sequence_parallel and x.tp > 1, {w.name: w for w in weights(recipe.model_config)}
    mesh = Mesh(dp=x.dp, cp=x.cp, tp=x.tp, pp=x.pp, ep=x.ep, sp=sp, expert_tp=x.etp > 1)
    counts = x.chunk_layers(len(a.layers))
    stages = [chunk % x.pp for chunk, count in enumerate(counts) for _ in range(count)]
    shards, elements = WeightShards(mesh, named, stages, x.pp - 1), [0] * x.pp
    for name, weight in named.items():
        parts = math.prod(mesh.size(axes) for axes in shards.axes(name))
        elements[shards.stage(name)] += weight.trained * math.prod(weight.shape) // parts
    assert (dense + experts)[0] == pytest.approx(elements, rel=1e-4)


def test_policies_that_choose_operator_by_operator():
    """torchtitan's `selective`: every other product and attention's result, as torch counts them in one layer.

    Products in order: query, key, value, output, gate, up, down; the first, third, fifth and seventh are kept.
    """
    a = published("llama3 8b", seq=8192)
    assert a is not None
    h, kv, f = a.hidden, a.kv_heads * a.head_dim, a.ffn
    by_hand = h + kv + f + h + h + h  # the last two: attention's result, the layer's input
    dense, _, _ = layer_activations(columns([(a, Layout(recompute="save_half"))]))
    assert dense[0] / (2 * a.seq) == pytest.approx(by_hand, rel=0.08)


def test_products_inputs_in_float8_are_half_as_large():
    """Of a dense layer: the outputs of both norms, and what goes into the last product."""
    a = published("llama3 8b", seq=8192)
    assert a is not None
    wide, narrow = (
        layer_activations(columns([(a, Layout().with_changes(input_bytes=size))]))[0][0]
        for size in (2, 1)
    )
    assert wide - narrow == a.seq * (2 * a.hidden + a.ffn)


def test_what_fsdp_keeps_from_the_first_micro_batch_to_the_last():
    """2 bytes of every parameter and 4 of its gradient besides the shards; the last stage's outputs."""
    a = published("llama3 8b", seq=8192)
    assert a is not None
    x = Layout(
        dp=8, pp=2, zero=2, micro_batches=4, parameter_bytes=4, optimizer_bytes=8
    ).with_changes(gathered=True)
    gathered, shards = (
        memory(columns([(a, single)])) for single in (x, x.with_changes(gathered=False, zero=3))
    )
    dense = local_parameters(columns([(a, x)]))[0]
    assert (gathered.parameters - shards.parameters) == pytest.approx(2 * dense)
    assert gathered.gradients == pytest.approx(4 * dense)
    ahead = (
        memory(columns([(a, x.with_changes(gathered=on))])).buffers[0, 1] for on in (True, False)
    )
    assert next(ahead) - next(ahead) == 3 * 2 * a.seq * a.vocab


def test_swapped_moments_are_not_on_the_device_and_take_the_link():
    """8 bytes of each parameter of a device, over its link to the host; the update waits for the slower of both."""
    a = Architecture(hidden=4096, layers=("dense",) * 8, heads=32, ffn=16384, seq=2048, vocab=32000)
    device = load_device("ascend-910b")
    on_device = Layout(dp=8, zero=1)
    away = on_device.with_changes(optimizer_bytes=4, host_bytes=8)
    x, y = columns([(a, on_device)]), columns([(a, away)])
    count = a.parameters / 8
    freed = memory(x).optimizer[0, 0] - memory(y).optimizer[0, 0]
    assert freed == pytest.approx(8 * count, rel=1e-4)
    copy = 8 * count / (device.host_bandwidth * device.constants.intra_share)
    seconds = evaluate([a], [away], device).optimizer_s[0]
    assert seconds == pytest.approx(copy * 9 / 8, rel=1e-4)
    assert evaluate([a], [on_device], device).optimizer_s[0] < copy
    fast = replace(device, host_bandwidth=1e30)
    assert evaluate([a], [away], fast).optimizer_s == pytest.approx(
        evaluate([a], [on_device], device).optimizer_s
    )
    with pytest.raises(BadInputError, match="host_bandwidth is missing"):
        evaluate([a], [away], replace(device, host_bandwidth=0.0))


OF_GRAPHS = [
    # one graph: the end of the backward pass, where all that gradients of weights need is alive; of one dense and five
    # MoE layers 6, 5 or 2 are recomputed
    ({"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": True}, (6,), [8_845_672]),
    ({"dp": 2, "cp": 2, "ep": 4}, (5,), [17_002_856]),
    # or its beginning
    ({"dp": 2, "micro_batch": 2}, (2,), [57_758_038]),
    # accumulators: gradients of weights come at once
    (
        {"dp": 2, "pp": 4, "micro_batch": 2, "micro_batches": 8, "chunks": (1, 2, 2, 1)},
        (1, 2, 2, 0),
        [9_123_842, 8_972_358, 8_316_998, 39_588_220],
    ),
    # some layers of a chunk are recomputed: when their backward pass runs, what those behind them kept is gone
    (
        {"dp": 2, "ep": 2, "pp": 2, "micro_batch": 2, "micro_batches": 4, "chunks": (4, 2)},
        (2, 1),
        [31_095_180, 41_128_200],
    ),
    # interleaved: chunks of a stage have different numbers of micro-batches in flight
    (
        {"dp": 2, "ep": 2, "pp": 2, "vpp": 2, "micro_batch": 2, "micro_batches": 4, "chunks": (1, 2, 2, 1)},
        (0, 2, 1, 0),
        [34_267_342, 42_193_128],
    ),
    (
        {"tp": 2, "ep": 2, "pp": 2, "vpp": 3, "micro_batches": 4, "chunks": (1,) * 6},
        (1, 0, 1, 0, 0, 1),
        [7_649_482, 17_711_502],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "recomputed", "compiled"), OF_GRAPHS)
def test_activations_are_those_of_compiled_graphs(change, recomputed, compiled):
    """Bytes by the liveness analysis of MindSpore 2.9's graphs of `benchmarks.plan_memory`."""
    a = Architecture.from_recipe(load(RECIPE, SETTINGS))
    layout = {"chunks": (6,), "micro_batches": 1, "recompute": "full", "residual_bytes": 4} | change
    x = Layout(**layout, recompute_layers=recomputed, own_graph=True)
    x = x.with_changes(schedule="interleaved" if x.vpp > 1 else "1f1b")
    assert activations(a, x) == pytest.approx(compiled, rel=0.023)
    step = simulate_step(a, x, load_device("ascend-910b"))
    activation_bytes = step.table.memory
    states = (
        activation_bytes.parameters
        + activation_bytes.gradients
        + activation_bytes.optimizer
        + activation_bytes.constant
    )
    assert step.peak_bytes - states[0] == pytest.approx(compiled, rel=0.023)


def test_gradients_of_one_graph_are_shards():
    """With ZeRO-1 each is reduced at once; accumulators of several micro-batches are whole."""
    a = Architecture.from_recipe(load(RECIPE, SETTINGS))
    one, two = (
        memory(columns([(a, Layout(dp=4, zero=1, micro_batches=m, own_graph=True))]))
        for m in (1, 2)
    )
    assert two.gradients == pytest.approx(4 * one.gradients)

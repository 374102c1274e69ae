"""A schedule of the planner, imposed on the graphs, gives the bits of MindSpore's own order."""

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import schedule_run as run
import sharded_compare as compare

from telechat_moe.errors import BadInputError
from telechat_moe.graph.inline import inlined
from telechat_moe.graph.mindir import MindIR, find_value
from telechat_moe.graph.reorder import in_order
from telechat_moe.graph.rewrite import for_cpu
from telechat_moe.graph.tap import tapped
from telechat_moe.ops import native

SLOW = [name for name in run.CASES if name not in run.FAULTS]


def compiled(tmp_path_factory: pytest.TempPathFactory, case: str) -> Path:
    folder = tmp_path_factory.mktemp(case)
    compare.call(folder, "compile", [case], script=run.__file__)
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """A compiled pipeline of two stages and three micro-batches."""
    return compiled(tmp_path_factory, "short")


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> Path:
    """One stage and three micro-batches on two devices that exchange rows beside computation."""
    return compiled(tmp_path_factory, "beside")


def differences(folder: Path, job: str, devices: int) -> list[str]:
    """Return what differs by a bit from MindSpore's order."""
    found = []
    for rank in range(devices):
        outs = (folder / name / f"out_{rank}.pickle" for name in (run.OWN, job))
        (steps, state), (other_steps, other_state) = (pickle.loads(p.read_bytes()) for p in outs)
        assert state.keys() == other_state.keys()
        found += [n for n in state if state[n].tobytes() != other_state[n].tobytes()]
        for step, others in zip(steps, other_steps, strict=True):
            assert np.isfinite(step[0]).all()
            found += [
                "answer" for a, b in zip(step, others, strict=True) if a.tobytes() != b.tobytes()
            ]
    return found


def run_all(folder: Path, case: str) -> None:
    """Run every job of a case; each must have the bits of MindSpore's order."""
    devices = run.CASES[case].devices
    compare.call(folder, "work", [case], devices, script=run.__file__)
    for program in run.programs(case):
        assert differences(folder, program.name, devices) == [], program.name


@pytest.mark.slow
def test_bits_of_the_own_order(short: Path):
    """dX and dW in one go and apart, in the schedule's and in any order; what is wrong on purpose is seen."""
    run_all(short, "short")
    for fault in run.FAULTS["short"]:
        assert differences(short, fault, 2), fault


@pytest.mark.slow
def test_exchanges_beside_computation(beside: Path):
    """They have the bits of exchanges that the graph waits for; rows that are read before they arrive are seen."""
    run_all(beside, "beside")
    for fault in run.FAULTS["beside"]:
        assert differences(beside, fault, 2), fault


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_runs_beside_an_exchange(beside: Path, rank: int):
    """Products must run after the start and before the wait of every exchange, but for the combines of passes alone."""
    model = MindIR((beside / "1f1b-overlap-full" / f"rank_{rank}.mindir").read_bytes())
    behind, starts, products = dict[str, set[str]](), dict[int, str](), set[str]()
    found: list[tuple[str, int]] = []
    for node in model.proto.graph.node:
        behind[node.name] = set().union(*({i} | behind[i] for i in node.input if i in behind))
        if (primitive := model.primitive(node)) is None:
            continue
        kind, tag = (find_value(primitive.attribute, key) for key in ("reg_op_name", "tag"))
        kind = kind or primitive.op_type
        if kind.endswith("Start"):
            starts[tag] = node.name
        elif kind.endswith("Wait"):
            start = starts.pop(tag)
            between = {n for n in behind[node.name] if start in behind[n]}
            found.append((kind, len(between & products)))
        elif kind in ("MatMul", "BatchMatMul", "GroupedMatmul", "GroupedMatmulGrad"):
            products.add(node.name)
    assert not starts
    alone, pair = (
        ["MoeDispatchWait", "MoeCombineWait"],
        ["MoeDispatchWait"] * 2 + ["MoeCombineWait"] * 2,
    )
    assert [kind for kind, _ in found] == [*alone, *pair, *pair, *alone]
    assert [i for i, (_, product) in enumerate(found) if not product] == [1, 11]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_program(tmp_path: Path, case: str):
    compare.call(tmp_path, "compile", [case], script=run.__file__)
    run_all(tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_passes_follow_each_other(short: Path, rank: int):
    """Every product of a pass waits for all products of the pass before it: no runtime can change the order."""
    graph = pickle.loads((short / "graphs.pickle").read_bytes())[rank]
    order = pickle.loads((short / "orders.pickle").read_bytes())["random 0"][rank]
    model = MindIR(for_cpu(in_order(graph.mindir, order), rank, graph.groups).mindir)
    kinds = {n.name: p.op_type for n in model.proto.graph.node if (p := model.primitive(n))}
    token, behind, passes = 0, dict[str, int](), [set[str]() for _ in range(len(order) + 1)]
    held: dict[str, set[str]] = {}
    for node in model.proto.graph.node:
        kind = kinds.get(node.name, "")
        before = max((behind[i] for i in node.input if i in behind), default=0)
        held[node.name] = set().union(*(held[i] for i in node.input if i in held))
        if node.domain.startswith("pass/") and kind == "Custom":
            token += 1
            assert passes[token - 1] <= held[node.name]
            before = token
        elif kind in ("MatMul", "BatchMatMul"):
            assert before == token, f"{node.domain} runs before its pass, number {token}"
            passes[token].add(node.name)
            held[node.name].add(node.name)
        behind[node.name] = before
    assert token == len(order)
    assert sum(map(len, passes[:-1])) > 5 * len(order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order[1:], r"before F\(chunk 0 of the stage, micro-batch 0\)|lacks F"),
        (lambda order: order[:-1], r"lacks W\(chunk 0 of the stage, micro-batch 2\)"),
        (lambda order: [*order, order[-1]], r"W\(chunk 0 of the stage, micro-batch 2\) twice"),
        (lambda order: order[::-1], "before"),
    ],
)
def test_an_order_of_other_passes_is_refused(short: Path, change, message: str):
    graph = pickle.loads((short / "graphs.pickle").read_bytes())[0]
    order = pickle.loads((short / "orders.pickle").read_bytes())["zb-h1"][0]
    with pytest.raises(BadInputError, match=message):
        in_order(graph.mindir, change(order))


@pytest.mark.slow
def test_taps_name_operators_alike_in_any_order(short: Path):
    """So that what two schedules compute can be compared call by call."""
    graph = pickle.loads((short / "graphs.pickle").read_bytes())[0]
    orders = pickle.loads((short / "orders.pickle").read_bytes())
    own, library = inlined(graph.mindir), str(native.path())
    plans = [
        tapped(in_order(graph.mindir, orders[name][0]), library, planned=own)[1]
        for name in ("1f1b", "random 0")
    ]
    first, second = ([(n.path, n.kind, n.backward, n.index) for n in p.nodes] for p in plans)
    assert first == second
    assert len(set(first)) == len(first) > 500
    assert not any(kind == "TelechatTap" for _, kind, *_ in first)

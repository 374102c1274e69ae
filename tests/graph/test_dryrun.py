"""The parts of the dry run's reading that need no compilation, and its command."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from mindspore.train import mind_ir_pb2 as pb

from telechat_moe.cli import dryrun, main
from telechat_moe.graph import mindir
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.mindir import MindIR
from telechat_moe.graph.nodes import Graph, call_counts, module_of
from telechat_moe.graph.page import page
from telechat_moe.graph.read import Expected, read, sent_bytes
from telechat_moe.graph.report import NOTES, Subject, difference, overlap_text, report, swap_text
from telechat_moe.graph.schedule import PassEvent, in_flight, timeline, unmatched
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.units import size_text


def test_module_of_a_scope():
    path = "Default/network-Pipeline/network-LossVector/model-CausalLM/layers-CellList/0-Block/attention-X/AllGather-op3"
    assert module_of(path) == "layers.0.attention"
    assert module_of("Default/AllReduce-op0") == "unknown"


def test_group_names():
    mesh = Mesh(dp=2, tp=2, pp=2, sp=True, ep=4)
    assert mesh.group_name([4, 5], 5) == "tp"
    assert mesh.group_name([5, 7], 5) == "dp"
    assert mesh.group_name([4, 5, 6, 7], 5) == "dp x tp = ep"
    assert mesh.group_name(range(8), 5) == "all"
    assert mesh.group_name([1, 5], 5) == "pp"
    assert mesh.group_name([4, 7], 7) == "4,7"


@pytest.mark.parametrize("new", range(8, 16))
def test_substituted_groups_are_the_mesh_s(new):
    mesh = Mesh(dp=2, cp=2, tp=2, pp=2, ep=2)
    for axes in (("dp",), ("cp",), ("tp",), ("dp", "cp"), ("dp", "tp"), ("ep",)):
        given = mesh.group(8, mesh.axes(*axes))
        assert mesh.substitute(given, 8, new) == mesh.group(new, mesh.axes(*axes))
    assert mesh.substitute([0, 8], 8, new) == [new - 8, new]


def test_bytes_that_a_device_sends():
    assert sent_bytes("AllReduce", 100, 4) == 150
    assert sent_bytes("AllGather", 100, 4) == 75
    assert sent_bytes("Receive", 100, 2) == 0
    assert sent_bytes("Send", 100, 2) == 100


class Builder:
    """Writes MindIR by hand."""

    def __init__(self):
        self.proto = pb.ModelProto()
        self.graphs = {}

    def graph(self, name):
        main = not self.graphs
        graph = self.proto.graph if main else self.proto.functions.add()
        graph.name = name
        self.graphs[name] = graph
        return graph

    def node(
        self, graph, name, kind, *inputs, shape=(2, 2), scope="Default/network-Net", **attributes
    ):
        node = self.graphs[graph].node.add()
        node.name, node.domain = name, scope
        node.input.extend(inputs)
        node.output.append(name)
        if kind in self.graphs or kind in self.names(graph):
            node.op_type = f"REF::{kind}"
        else:
            primitive = self.proto.primitives.add()
            primitive.name, primitive.op_type = f"{kind}:{len(self.proto.primitives)}", kind
            node.op_type = f"REF::{primitive.name}"
            for key, value in attributes.items():
                attribute = primitive.attribute.add()
                attribute.name = key
                text = isinstance(value, str)
                attribute.type = pb.AttributeProto.STRING if text else pb.AttributeProto.INT64
                if text:
                    attribute.s = value.encode()
                else:
                    attribute.i = value
        attribute = node.attribute.add()
        attribute.name, attribute.type = "shape", pb.AttributeProto.TENSORS
        tensor = attribute.tensors.add()
        tensor.dims.extend(shape)
        tensor.data_type = 1
        return node

    def given(self, graph, name, shape):
        """Add an input, of the main graph a parameter."""
        graph = self.graphs[graph]
        if graph is self.proto.graph:
            given = graph.parameter.add()
            given.dims.extend(shape)
            given.data_type = 1
        else:
            given = graph.input.add()
            tensor = given.tensor.add()
            tensor.dims.extend(shape)
            tensor.data_type = 1
        given.name = name

    def integer(self, graph, name, value):
        node = self.graphs[graph].node.add()
        node.name, node.op_type = name, "Constant"
        attribute = node.attribute.add()
        attribute.name, attribute.i, attribute.type = "value", value, pb.AttributeProto.INT64

    def text(self, graph, name, value):
        self.integer(graph, name, 0)
        attribute = self.graphs[graph].node[-1].attribute[0]
        attribute.s, attribute.type = value.encode(), pb.AttributeProto.STRING

    def names(self, graph):
        return {node.name for node in self.graphs[graph].node}

    def compiled(self):
        return RankGraph(
            rank=0,
            devices=4,
            mindir=self.proto.SerializeToString(),
            groups={"g": [0, 1], "w": [0, 1, 2, 3]},
            layouts={},
            build_seconds=0.1,
            compile_seconds=2.0,
            peak_memory=2**30,
        )


def called_graph():
    """A function called twice, once through a partial application; a branch that is not taken."""
    b = Builder()
    for name in ("main", "layer", "no"):
        b.graph(name)
    b.node("layer", "layer:x", "AllReduce", "in", group="g")
    b.node("layer", "layer:d", "Gather", "layer:x", shape=(-1,))
    b.node("layer", "layer:v", "AlltoAllV", "layer:d", group="w", shape=(-1,))
    b.node("no", "no:x", "AllGather", "in", group="g")
    b.node("main", "a", "layer", "x")
    b.node("main", "p", "Partial", "layer", "a")
    b.node("main", "n", "Partial", "no", "a")
    b.node("main", "s", "Switch", "condition", "p", "n")
    b.node("main", "b", "s")
    b.node("main", "norm", "AllReduce", "b", group="w", scope="Default", shape=())
    return b


def test_calls_multiply():
    compiled = called_graph().compiled()
    model = MindIR(compiled.mindir)
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    assert call_counts(model, functions) == {"main": 1, "layer": 2, "no": 0}
    found = read(compiled, Mesh(dp=2, tp=2), Expected(100)).collectives
    assert {(c.kind, c.group, c.phase, c.times, c.bytes, c.floor) for c in found} == {
        ("AllReduce", "tp", "forward", 2, 16, 16),
        ("AlltoAllV", "dp x tp", "forward", 2, 400, 0),
        ("AllReduce", "dp x tp", "optimizer", 1, 4, 4),
    }


def test_the_compiled_parser_reads_what_mindspore_s_reads(monkeypatch):
    data = called_graph().compiled().mindir
    fast = MindIR(data)
    assert type(fast.proto) is not pb.ModelProto
    assert str(fast.proto) == str(pb.ModelProto.FromString(data))
    monkeypatch.setitem(sys.modules, "google._upb", None)
    slow = mindir._message_class.__wrapped__()
    assert slow is pb.ModelProto  # of an old protobuf


def test_recomputed_nodes_are_told_apart():
    b = Builder()
    b.graph("main")
    b.node("main", "f", "MatMul", "x", scope="recompute_Default/network-Net")
    again = b.node("main", "r", "MatMul", "x", scope="recompute_Default/network-Net")
    mark = again.node_attr.add()
    mark.name, mark.type, mark.i = "duplicated", pb.AttributeProto.BOOL, 1
    b.node("main", "g", "MatMul", "r", "f", scope="Gradients/recompute_Default/network-Net")
    found = read(b.compiled(), Mesh(dp=2, tp=2), Expected(0))
    assert {phase: sum(kinds.values()) for phase, kinds in found.operators.items()} == {
        "forward": 1,
        "recompute": 1,
        "backward": 1,
        "optimizer": 0,
    }
    assert found.recomputed == {"MatMul": 1}
    assert found.memory.left_behind == 16  # f only: r is made again
    assert found.memory.activations == 3 * 16  # f, r and g


def shared_graph():
    """A network that two micro-batches share: a product that is kept and one that runs again."""
    b = Builder()
    for name in ("main", "1▸net", "2◂net"):
        b.graph(name)
    for name in ("x", "w", "w16"):
        b.given("1▸net", f"f:{name}", (4, 4))
    net = {"scope": "recompute_Default/network-Net"}
    b.node("1▸net", "f:m", "MatMul", "f:x", "f:w16", shape=(4, 8), **net)
    b.node("1▸net", "f:g", "AllGather", "f:m", group="g", shape=(8, 8), **net)
    b.node("1▸net", "f:r", "Reshape", "f:m", shape=(32,), scope="Default")
    b.node("1▸net", "f:p", "Partial", "2◂net", "f:m", "f:r", "f:x", "f:w", "f:w16")
    b.node("1▸net", "f:out", "MakeTuple", "f:g", "f:p")
    b.graphs["1▸net"].output.add().name = "f:out"
    for name in ("m", "r", "x", "w", "w16", "sens"):
        b.given("2◂net", f"b:{name}", (4, 8))
    b.node("2◂net", "b:g", "AllGather", "b:m", group="g", shape=(8, 8), **net)
    b.node("2◂net", "b:s", "ReduceScatter", "b:g", "b:x", group="g", scope="Gradients/Default/x")
    b.node("2◂net", "b:w", "AssignAdd", "b:s", scope="Default")
    b.given("main", "w", (4, 4))
    b.integer("main", "one", 1)
    b.node("main", "w16", "Cast", "w", shape=(4, 4), scope="Default")
    for micro in (0, 1):
        b.node("main", f"x{micro}", "StridedSlice", "batch", scope="Default")
        call = b.node("main", f"F{micro}", "1▸net", f"x{micro}", "w", "w16", scope="Default")
        mark = call.node_attr.add()
        mark.name, mark.type, mark.i = "micro", pb.AttributeProto.INT64, micro
    for micro in (0, 1):
        b.node("main", f"t{micro}", "TupleGetItem", f"F{micro}", "one", scope="Default")
        b.node("main", f"B{micro}", f"t{micro}", "sens", scope="Default")
    return b


def test_a_network_that_micro_batches_share():
    found = read(shared_graph().compiled(), Mesh(dp=2, tp=2), Expected(0))
    calls = {(c.kind, c.phase): c.times for c in found.collectives}
    assert calls == {
        ("AllGather", "forward"): 2,
        ("AllGather", "recompute"): 2,
        ("ReduceScatter", "backward"): 2,
    }
    assert found.recomputed == {"AllGather": 2}
    assert found.operators["backward"]["AssignAdd"] == 2
    assert [str(e) for e in found.order] == ["F0", "F1", "B0", "B1"]
    # The product once, although two views of it are kept; no weights.
    product, gathered, batch = 4 * 4 * 8, 4 * 8 * 8, 4 * 2 * 2
    assert found.memory.left_behind == product
    assert found.memory.copies == 4 * 4 * 4  # w16; w is a parameter
    # Both products and inputs and the second gather: before B0 frees the first product, its own gather needs as much.
    assert found.memory.activations == 2 * (product + batch) + gathered
    assert sum(found.memory.alive.values()) == found.memory.activations


ORDERS = {
    0: [
        *[PassEvent("F", 0), PassEvent("sf", 0, peer=1, tag=0, bytes=8)],
        *[PassEvent("F", 1), PassEvent("sf", 1, peer=1, tag=1, bytes=8)],
        *[PassEvent("rb", 0, peer=1, tag=0, bytes=8), PassEvent("B", 0)],
        *[PassEvent("rb", 1, peer=1, tag=1, bytes=8), PassEvent("B", 1)],
    ],
    1: [
        *[PassEvent("rf", 0, peer=0, tag=0, bytes=8), PassEvent("F", 0), PassEvent("B", 0)],
        PassEvent("sb", 0, peer=0, tag=0, bytes=8),
        *[PassEvent("rf", 1, peer=0, tag=1, bytes=8), PassEvent("F", 1), PassEvent("B", 1)],
        PassEvent("sb", 1, peer=0, tag=1, bytes=8),
    ],
}


def test_order_in_flight_and_time_line():
    assert in_flight(ORDERS[0]) == 2
    assert in_flight(ORDERS[1]) == 1
    lanes = timeline(ORDERS)
    assert [(str(s.event), s.start, s.end) for s in lanes[0]] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("B0", 4, 6),
        ("B1", 7, 9),
    ]
    assert unmatched(ORDERS) == []
    other = {0: ORDERS[0], 1: [e for e in ORDERS[1] if str(e) != "sb1>0"]}
    assert unmatched(other) == ["rank 0: 1 x rb1>1 (8 bytes); rank 1 sends that 0 times"]


def test_parts_of_a_sequence_are_one_micro_batch_in_flight():
    first, second = PassEvent("F", 0), PassEvent("F", 0, part=1)
    order = [
        first,
        second,
        PassEvent("B", 0, part=1),
        PassEvent("F", 1, chunk=1, part=1),
        PassEvent("B", 0),
    ]
    assert [str(event) for event in order] == ["F0", "F0:1", "B0:1", "F1.1:1", "B0"]
    assert in_flight(order[:3]) == 1
    assert in_flight(order) == 2


def report_of(compiled, times=1):
    """A report as the verb makes it, from a graph written by hand."""
    from telechat_moe.graph import report as module

    mesh = Mesh(dp=2, tp=2)
    stage = module._stage(read(compiled, mesh, Expected(100 * times)), compiled, mesh)
    stage["order"] = [module._event(e) for e in ORDERS[0]]
    stage["order_text"] = " ".join(map(str, ORDERS[0]))
    return {
        "recipe": "a <recipe>.yaml",
        "model": "telechat-moe",
        "layout": "dp2 tp2",
        "devices": 4,
        "target": "CPU",
        "mindspore": "2.9.0",
        "limits": module.LIMITS,
        "notes": NOTES,
        "stages": [stage],
        "overlapped": [],
        "unmatched_transfers": [],
        "check": None,
    }


class Page(HTMLParser):
    """Every address and every tag of a page."""

    def __init__(self):
        super().__init__()
        self.addresses, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href")]


def test_page_is_whole_and_fetches_nothing():
    one, two = report_of(called_graph().compiled()), report_of(called_graph().compiled(), 2)
    text = page(one, difference(one, two))
    parsed = Page()
    parsed.feed(text)
    assert parsed.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert "url(" not in text
    assert "{{" not in text
    assert "a &lt;recipe&gt;.yaml" in text
    assert parsed.tags.count("rect") == 4
    for word in ("AlltoAllV", "dp x tp", "in words"):
        assert word in text


@pytest.mark.parametrize("micro_batches", [2, 24])
def test_the_order_of_micro_batches_fits_the_page(micro_batches: int):
    report = report_of(called_graph().compiled())
    both = [(m, kind) for kind in "FB" for m in range(micro_batches)]
    report["stages"][0]["order"] = [
        {"kind": k, "micro": m, "chunk": 0, "peer": None} for m, k in both
    ]
    width = float(re.findall(r"<svg width=([\d.]+) ", page(report))[0])
    assert width <= 1048  # of the page's 1080, without its padding
    assert page(report).count("<rect") == 2 * micro_batches


def test_difference():
    one, two = report_of(called_graph().compiled()), report_of(called_graph().compiled(), 2)
    found = difference(one, two)["stages"][0]
    rows = {r["kind"]: r for r in found["collectives"] if r["phase"] == "forward"}
    assert rows["AlltoAllV"]["bytes"] == [800, 1600]
    assert rows["AllReduce"]["bytes"] == [32, 32]
    groups = {(r["group"], r["kind"]): r["bytes"] for r in found["groups"]}
    assert groups["dp x tp (4)", "AlltoAllV"] == [800, 1600]
    assert groups["dp x tp (4)", "together"] == [804, 1604]
    assert found["operators"] == {}


def test_sizes():
    assert size_text(512) == "512 B"
    assert size_text(3 * 2**20) == "3.00 MiB"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rank", "1"], 2, "ranks 0 to 0"),
        (["--check-rank", "0"], 2, "is the rank that others are derived from"),
        (["--devices", "3"], 3, "3 devices were given"),
        (["--rank", "0", "--stage", "all"], 2, "not allowed with"),
        (["--mindformers", "--target", "CPU"], 2, "Ascend's operators only"),
        (["--html", "/no/such/folder/x.html"], 2, "does not exist"),
        (["--set", "nonsense=1"], 3, "nonsense"),
        (["--hidden-on", "ascend-910b"], 2, "pairs no passes; it needs"),
    ],
)
def test_refusals(arguments, code, words, capsys):
    assert main(["dryrun", "telechat3_moe/pretrain_tiny.yaml", *arguments]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--mindformers", "--diff-mindformers"])
def test_without_mindformers(option, monkeypatch, capsys):
    monkeypatch.setattr("telechat_moe.versions.find_spec", lambda name: None)
    result = report_of(called_graph().compiled())
    monkeypatch.setattr(dryrun, "_our_model", lambda *args: (_subject(), lambda *ranks: ["graph"]))
    monkeypatch.setattr("telechat_moe.graph.report.report", lambda *args: result)
    assert main(["dryrun", "telechat3_moe/pretrain_tiny.yaml", option]) == 3
    assert "found no mindformers, no mindspore, no numpy. Install" in capsys.readouterr().err


def test_a_switch_that_overlaps_nothing_is_said():
    graphs = [called_graph().compiled()]
    named = _subject()._replace(overlapped=("MorphAllGather",))
    assert "names MorphAllGather, of which no pair" in overlap_text(report(named, graphs, "Ascend"))
    assert not overlap_text(report(_subject(), graphs, "Ascend"))
    result = report(named, graphs, "Ascend")
    assert "names MorphAllGather, of which no pair" in page(result)
    result["stages"][0]["overlap"] = [{"exchanges": []}, {"exchanges": ["AlltoAllV"]}]
    assert not overlap_text(result)


def _subject():
    return Subject("tiny", Mesh(), Expected(0))


def other_rank(change):
    """Return rank 3's graph of the one that is written by hand, as it is or changed, with that rank's groups."""
    b = called_graph()
    if change == "operation":
        b.proto.primitives[1].op_type = "Sub"
    graph = b.compiled()
    groups = {"g": [1, 2] if change == "group" else [2, 3], "w": [0, 1, 2, 3]}
    return replace(graph, rank=3, groups=groups)


@pytest.mark.parametrize(
    ("change", "code", "difference"),
    [
        (None, 0, None),
        ("operation", 1, "derived Gather [-1], compiled Sub [-1]"),
        ("group", 1, "derived AllReduce [2, 2] over [2, 3], compiled AllReduce [2, 2] over [1, 2]"),
    ],
)
def test_a_rank_that_is_checked(change, code, difference, monkeypatch, capsys, tmp_path):
    """The verb around a compilation that is not run: what another rank's graph is compared with."""
    graphs = {0: called_graph().compiled(), 3: other_rank(change)}
    subject = Subject("tiny", Mesh(dp=2, tp=2), Expected(0))

    def compiled(ranks, step):
        return [graphs[rank] for rank in ranks]

    monkeypatch.setattr(dryrun, "_our_model", lambda *args: (subject, compiled))
    target = tmp_path / "report.json"
    command = ["dryrun", "x.yaml", "--check-rank", "3", "--json", str(target)]
    assert main(command) == code
    printed = capsys.readouterr().out
    said = "NOT equal" if code else "equal"
    assert f"rank 3 compiled too: {said} to what was derived from rank 0" in printed
    assert "AlltoAllV" in printed
    assert "Front end only" in printed
    check = json.loads(target.read_text())["check"]
    assert check["same"] is (code == 0)
    if difference is None:
        assert check["differences"] == []
    else:
        assert difference in check["differences"][0]
        assert difference in printed


@pytest.mark.parametrize("swapped", [True, False])
def test_what_is_moved_to_the_host_is_not_on_the_device(swapped):
    """Between the ways there and back only the host's memory has it; the formula is 4 bytes an element."""
    made, network = Builder(), "Default/network-Net/model-CausalLM/layers-CellList/1-Block"
    made.graph("main")
    x = "accu_grads.x"  # else it would be a weight, and so all that is made of it
    made.given("main", x, (2, 2))
    made.text("main", "there", "CPU")
    made.text("main", "back", "Ascend")
    made.node("main", "kept", "Add", x, x, shape=(100,), scope=network)
    if swapped:
        where = {"shape": (100,), "backward_prefetch": 6}
        made.node("main", "out", "MoveTo", "kept", "there", scope=network, **where)
    made.node("main", "narrow", "Mul", "kept", x, shape=(10,), scope=network)
    made.node("main", "wide", "Tile", "narrow", shape=(70,), scope=network)
    made.node("main", "end", "ReduceSum", "wide", shape=(1,), scope=network)
    gradients = f"Gradients/{network}"
    again = "kept"
    if swapped:
        made.node("main", "in", "MoveTo", "out", "back", scope=gradients, **where)
        again = "in"
    made.node("main", "down", "Mul", again, "end", shape=(10,), scope=gradients)
    made.node("main", "update", "Assign", x, "down", scope="Default/optimizer-AdamW")
    graph = made.compiled()
    subject = Subject("r", Mesh(dp=4), Expected(1))
    stage = report(subject, [graph], "Ascend")["stages"][0]
    memory, found = stage["memory"], stage["swapping"]
    assert memory["activations"] == 4 * (100 + 10 + (0 if swapped else 70))
    assert (found["tensors"], found["bytes"], found["host"]) == (
        (1, 400, 400) if swapped else (0,) * 3
    )
    rows = [(r["module"], r["kind"], r["prefetch"], r["count"]) for r in found["by_module"]]
    assert rows == ([("layers.*", "Add", 6, 1)] if swapped else [])
    assert ("1 activations of 400 B" in swap_text(stage)) is swapped


def test_swapped_moments_are_not_on_the_device():
    made = Builder()
    made.graph("main")
    for name in ("w", "adam_m.w", "adam_v.w"):
        made.given("main", name, (100,))
    made.node("main", "end", "Add", "w", "w", shape=(100,), scope="Default/optimizer-AdamW")
    graph = made.compiled()
    kept, away = (
        report(Subject("r", Mesh(), Expected(1), swaps_states=x), [graph], "Ascend")["stages"][0]
        for x in (False, True)
    )
    assert kept["memory"]["optimizer"] == 800
    assert away["memory"]["optimizer"] == 0
    assert kept["memory"]["total"] - away["memory"]["total"] == 800
    assert swap_text(kept) == ""
    assert swap_text(away) == "the moments, 800 B, are in the host's memory"

"""Collectives and bytes of small layouts against formulas derived from the model's code and the mesh."""

import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import read_layouts as small

from telechat_moe.graph.schedule import timeline, unmatched

FLOAT = 4
V, H, WIDTH, HEADS, Q_LORA, KV_LORA, ROPE, EXPERTS, TOP_K, EXPERT_WIDTH = (
    *(64, 32, 48, 4, 16, 16, 8, 8, 2),
    16,
)
# Compiled in two parts, so that no test runs into pytest's time limit.
FIRST = ("dp2tp2sp", "ep4", "pp2tp2", "checks", "shared")
REST = tuple(name for name in [*small.LAYOUTS, "broken", "shared_checks"] if name not in FIRST)
ONE_STAGE = [
    name
    for name, layout in small.LAYOUTS.items()
    if layout.get("pp", 1) == 1 and "target" not in layout
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Readings by layout, made in a process of their own: the few first, the rest if it is asked for."""
    made = {}

    def get(name):
        if name not in made:
            out = tmp_path_factory.mktemp("read") / "readings.pickle"
            names = FIRST if name in FIRST else REST
            command = [sys.executable, small.__file__, str(out), *names]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            made.update(pickle.loads(out.read_bytes()))
        return made[name]

    return get


class Sizes:
    """A layout in numbers: devices are ``(dp, cp, tp)``, tp next to each other."""

    def __init__(self, layout):
        self.dp, self.cp, self.tp, self.ep = (layout.get(n, 1) for n in ("dp", "cp", "tp", "ep"))
        self.sp, self.etp = layout.get("sp", False), layout.get("etp", False)
        self.zero = layout.get("zero", False)
        self.gathers, self.hops = layout.get("dispatcher") == "allgather", "hop" in layout
        self.sequences = small.sequences(layout)
        self.devices = self.dp * self.cp * self.tp
        tokens = self.sequences * small.LENGTH
        self.token = tokens // (self.dp * self.cp)
        self.whole = tokens // self.dp
        self.device = tokens // self.devices
        # Ranks of each group that rank 0 is in.
        self.tensor = tuple(range(self.tp))
        self.context = tuple(range(0, self.cp * self.tp, self.tp))
        self.tokens = tuple(range(0, self.devices, self.tp))
        self.within = tuple(range(self.cp * self.tp))
        self.all = tuple(range(self.devices))
        # What the balance loss counts over which ranks: loads of sequences, else of all their tokens.
        balance = layout.get("balance", "seq_aux_loss")
        groups = {"seq_aux_loss": self.within, "sub_seq_aux_loss": (), "ep": range(self.ep)}
        self.counted = tuple(groups.get(balance, self.all))
        self.counts = EXPERTS * (self.sequences // self.dp if balance == "seq_aux_loss" else 1)
        step = self.cp * self.tp if self.etp else 1
        self.experts = tuple(range(0, self.ep * step, step))
        self.node = self.experts[: small.NODE]
        self.nodes = self.experts[:: small.NODE]
        self.expert_copies = tuple(range(0, self.devices, self.ep * step))


class Ledger(Counter):
    """Collectives: ``(module, kind, ranks, bytes)`` to calls; groups of one device have none."""

    def put(self, module, kind, ranks, elements, times=1):
        """Add one; ``elements`` of four bytes, the larger of input and output."""
        if len(ranks) > 1:
            self[module, kind, ranks, elements * FLOAT] += times


def forward(s):
    """Return what a forward pass of one micro-batch needs, module by module."""
    ledger = Ledger()
    for module in ("embedding", "embedding"):  # the tokens, and the next ones for MTP
        embedding(s, ledger, module)
    block(s, ledger, "layers.0", moe=False)
    block(s, ledger, "layers.1", moe=True)
    block(s, ledger, "mtp.0.block", moe=True)
    for _ in range(2):
        loss(s, ledger)
    return ledger


def embedding(s, ledger, module):
    """Rows of the other devices' parts of the vocabulary are zero, so a sum gives the embedding."""
    row_parallel(s, ledger, module)


def row_parallel(s, ledger, module):
    """Products whose columns are cut leave a sum over tp."""
    ledger.put(module, "ReduceScatter" if s.sp else "AllReduce", s.tensor, s.token * H)


def mlp(s, ledger, module):
    """One gather serves gate and up."""
    if s.sp:
        ledger.put(f"{module}.up", "AllGather", s.tensor, s.token * H)
    row_parallel(s, ledger, f"{module}.down")


def block(s, ledger, name, moe):
    """Attention: latents are gathered, not the hidden state; the rotary key goes to all heads."""
    attention = f"{name}.attention"
    if s.sp:
        ledger.put(f"{attention}.q_up", "AllGather", s.tensor, s.token * Q_LORA)
        ledger.put(f"{attention}.kv_up", "AllGather", s.tensor, s.token * KV_LORA)
        ledger.put(attention, "AllGather", s.tensor, s.token * ROPE)
    ledger.put(f"{attention}.kv_up", "AllGather", s.context, s.whole * KV_LORA)
    ledger.put("local", "AllGather", s.context, s.whole * ROPE)
    row_parallel(s, ledger, f"{attention}.out")
    if not moe:
        mlp(s, ledger, f"{name}.ffn")
        return
    if not s.sp:  # under sequence parallelism, all devices have the whole shared expert
        mlp(s, ledger, f"{name}.moe.shared")
    experts(s, ledger, f"{name}.moe")
    ledger.put("local", "AllReduce", s.counted, s.counts)  # what the balance loss counts
    ledger.put("local", "AllReduce", s.all, 1)


def experts(s, ledger, module):
    """Dispatch; the buffers hold every token for every expert, as nothing may be dropped."""
    if s.gathers:
        rows = s.device * s.ep
        ledger.put("local", "AllGather", s.experts, rows * H)
        ledger.put("local", "AllGather", s.experts, rows * TOP_K, times=2)  # experts, weights
        ledger.put("local", "ReduceScatter", s.experts, rows * H)
    elif s.hops:  # tokens of all nodes, then buffers of this node's experts
        rows = s.device * len(s.nodes)
        ledger.put("local", "AllGather", s.nodes, rows * H)
        ledger.put("local", "AllGather", s.nodes, rows * TOP_K, times=2)
        ledger.put("local", "AlltoAll", s.node, EXPERTS // len(s.nodes) * rows * H, times=2)
        ledger.put("local", "ReduceScatter", s.nodes, rows * H)
    else:
        rows = s.token if s.etp else s.device
        ledger.put("local", "AlltoAll", s.experts, EXPERTS * rows * H, times=2)
    if s.etp:  # all of an expert's parts need the rows, and what the router chose for them
        ledger.put("local", "AllGather", s.tensor, s.token * H)
        ledger.put("local", "AllGather", s.tensor, s.token * TOP_K, times=2)
        row_parallel(s, ledger, "local")
    elif not s.sp:
        ledger.put(module, "AllGather", s.tensor, s.token * H)


def loss(s, ledger):
    """Vocabulary-parallel cross-entropy: maximum, sum, the label's logit; then sum and number of tokens."""
    if s.sp:
        ledger.put("head", "AllGather", s.tensor, s.token * H)
    ledger.put("local", "AllReduce", s.tensor, s.token, times=3)
    ledger.put("local", "AllReduce", s.tokens, 1, times=2)


def step(s):
    """Global norm, losses, expert loads."""
    ledger = Ledger()
    for elements in (1, 3, 2 * EXPERTS):
        ledger.put("step", "AllReduce", s.all, elements)
    return ledger


def weights(s):
    """Return ``(elements, how it is cut)`` of each trained parameter: repeated, tp, experts."""
    heads = HEADS * 16  # nope + rope, nope + value
    attention = [H, Q_LORA * H, Q_LORA, (KV_LORA + ROPE) * H, KV_LORA, H]
    found = [(n, "repeated") for n in attention] + [
        (heads * Q_LORA, "tp"),
        (heads * KV_LORA, "tp"),
        (H * HEADS * 8, "tp"),
    ]
    moe = [(EXPERTS * H, "repeated")] + 3 * [(H * EXPERT_WIDTH, "repeated" if s.sp else "tp")]
    moe += 3 * [(EXPERTS * H * EXPERT_WIDTH, "experts")]
    dense = 3 * [(H * WIDTH, "tp")]
    ends = [(V * H, "tp"), (V * H, "tp"), (H, "repeated")]
    mtp = [(H, "repeated")] * 3 + [(2 * H * H, "repeated")]
    return ends + found + dense + found + moe + mtp + found + moe


def own(s, elements, cut):
    """Return a rank's part of a parameter and the ranks that hold the same part."""
    if cut == "tp":
        return elements // s.tp, s.tokens
    if cut == "experts":
        return elements // (s.ep * (s.tp if s.etp else 1)), s.expert_copies
    return elements, s.all


def gradients(s):
    """One sum a parameter, over the devices that hold the same part; sharded: scattered."""
    ledger = Ledger()
    for elements, cut in weights(s):
        part, ranks = own(s, elements, cut)
        ledger.put("", "ReduceScatter" if s.zero else "AllReduce", ranks, part)
    return ledger


def ledger_of(reading, phase, purpose):
    """Return what was found, in the modules' names that the formulas use."""
    ledger = Counter()
    for c in reading.collectives:
        if c.phase == phase and c.purpose in purpose:
            ledger[module(c), c.kind, c.ranks, c.bytes] += c.times
    return ledger


def module(c):
    """``local``: cells that run on slices, which hold their own collectives."""
    if c.phase == "backward":
        return ""
    # Before the cell that shares the rotary key MindSpore gathers it itself, in a scope of the attention or in none.
    inserted = c.group == "cp" and c.module.endswith(".attention")
    if inserted or re.search(r"unknown|rout|dispatch|loss|share_key", c.module):
        return "local"
    return c.module.replace("mtp_embedding", "embedding").removesuffix(".rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STAGE)
def test_forward_collectives_by_module(found, name):
    s = Sizes(small.LAYOUTS[name])
    assert ledger_of(found(name)[0], "forward", ["activations"]) == forward(s)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STAGE)
def test_gradients(found, name):
    s = Sizes(small.LAYOUTS[name])
    assert ledger_of(found(name)[0], "backward", ["gradients"]) == gradients(s)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STAGE)
def test_step_and_weights(found, name):
    s = Sizes(small.LAYOUTS[name])
    assert ledger_of(found(name)[0], "optimizer", ["step"]) == step(s)
    gathered = Counter()
    for elements, cut in weights(s):
        part, ranks = own(s, elements, cut)
        if s.zero and len(ranks) > 1:
            gathered["AllGather", ranks, part * FLOAT] += 1
    weights_found = Counter()
    for (_, *rest), n in ledger_of(found(name)[0], "forward", ["weights"]).items():
        weights_found[tuple(rest)] += n
    assert weights_found == gathered


REVERSE = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STAGE)
def test_backward_mirrors_forward(found, name):
    """Each collective that is differentiated comes back as its transpose, of the same bytes.

    Not differentiated: maximum of the logits, number of tokens, chosen experts and what the balance loss counts. The
    balance losses of all layers have the same derivative, which the compiler computes once.
    """
    s = Sizes(small.LAYOUTS[name])
    expected = Counter()
    for (_, kind, ranks, size), times in forward(s).items():
        expected[REVERSE.get(kind, kind), ranks, size] += times
    gone = Ledger()
    gone.put("", "AllReduce", s.tensor, s.token, times=2)
    gone.put("", "AllReduce", s.tokens, 1, times=2)
    gone.put("", "AllReduce", s.counted, s.counts, times=2)
    gone.put("", "AllReduce", s.all, 1)
    if s.gathers:
        gone.put("", "ReduceScatter", s.experts, s.device * s.ep * TOP_K, times=2)
    if s.hops:
        gone.put("", "ReduceScatter", s.nodes, s.device * len(s.nodes) * TOP_K, times=2)
    if s.etp:
        gone.put("", "ReduceScatter", s.tensor, s.token * TOP_K, times=2)
    for (_, *rest), times in gone.items():
        expected[tuple(rest)] -= times
    backward = Counter()
    for (_, *rest), times in ledger_of(found(name)[0], "backward", ["activations"]).items():
        backward[tuple(rest)] += times
    assert backward == +expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STAGE)
def test_memory(found, name):
    """Own parts of parameters; two moments; a gradient each."""
    s, memory = Sizes(small.LAYOUTS[name]), found(name)[0].memory
    parts = 0
    for elements, cut in weights(s):
        part, ranks = own(s, elements, cut)
        parts += part // (len(ranks) if s.zero else 1) * FLOAT
    assert memory.optimizer == 2 * parts
    assert memory.gradients == parts
    assert memory.parameters == parts + 2 * EXPERTS * FLOAT  # two routers' biases


@pytest.mark.slow
def test_sent_bytes_are_of_the_usual_algorithms(found):
    for reading in found("ep4"):
        for c in reading.collectives:
            n = len(c.ranks)
            share = {"AllReduce": 2 * (n - 1), "AllGather": n - 1, "ReduceScatter": n - 1}
            assert c.sent == share.get(c.kind, n - 1) * c.bytes // n


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2", "pp2tp2"])
def test_pipeline(found, name):
    """Hidden states and MTP's embeddings go forward for each micro-batch, their gradients back."""
    first, last = found(name)
    s = Sizes(small.LAYOUTS[name])
    size = FLOAT * s.token // (s.tp if s.sp else 1) * H
    for reading, out, back in ((first, "Send", "Receive"), (last, "Receive", "Send")):
        for kind, phase in ((out, "forward"), (back, "backward")):
            here = [c for c in reading.collectives if (c.kind, c.phase) == (kind, phase)]
            assert [c.bytes for c in here] == [size] * 2 * small.MICRO
            assert [c.micro for c in here] == [0, 0, 1, 1]
            assert {c.ranks for c in here} == {(0, s.devices)}
    assert [str(e) for e in first.order if e.kind in "FB"] == ["F0", "F1", "B0", "B1"]
    assert [str(e) for e in last.order if e.kind in "FB"] == ["F0", "B0", "F1", "B1"]
    orders = {reading.rank: reading.order for reading in (first, last)}
    assert unmatched(orders) == []
    orders[last.rank] = last.order[:-1]
    assert unmatched(orders)


@pytest.mark.slow
def test_collectives_of_both_micro_batches(found):
    """A stage's collectives run for each micro-batch; layers and losses stand on their own stage."""
    s = Sizes(small.LAYOUTS["pp2tp2"])
    first, last = Ledger(), Ledger()
    embedding(s, first, "embedding")
    embedding(s, first, "embedding")
    block(s, first, "layers.0", moe=False)
    block(s, last, "layers.1", moe=True)
    block(s, last, "mtp.0.block", moe=True)
    loss(s, last)
    loss(s, last)
    for reading, expected in zip(found("pp2tp2"), (first, last), strict=True):
        twice = {
            (where, kind, tuple(reading.rank + r for r in ranks), size): n * small.MICRO
            for (where, kind, ranks, size), n in expected.items()
        }
        assert ledger_of(reading, "forward", ["activations"]) == twice


@pytest.mark.slow
def test_a_lost_placement_shows(found):
    """The row-parallel products' output rule taken out of the table: no ReduceScatter but the embedding's."""
    expected = forward(Sizes(small.LAYOUTS["dp2tp2sp"]))
    ledger = ledger_of(found("broken"), "forward", ["activations"])
    assert ledger != expected
    assert {key[0] for key in ledger if key[1] == "ReduceScatter"} == {"embedding"}


@pytest.mark.slow
def test_a_derived_rank_is_the_compiled_one(found):
    same, wrong, good, bad = found("checks")
    assert same
    assert good["check"]["same"]
    assert good["check"]["derived_from"] == 0
    assert not wrong
    assert "AllReduce" in " ".join(bad["check"]["differences"])


PASSES = {
    "shared": ["F0 F1 B0 B1", "F0 B0 F1 B1"],
    "shared_recompute": ["F0 F1 B0 B1", "F0 B0 F1 B1"],
    "shared_vpp2": [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ],
    "shared_accumulate": ["F0 B0 F1 B1 F2 B2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_order_of_passes(found, name):
    """One forward, one backward behind as many forwards as a stage is away from the last; likewise with chunks."""
    readings = found(name)
    orders = {reading.rank: reading.order for reading in readings}
    passes = [" ".join(str(e) for e in order if e.kind in "FB") for order in orders.values()]
    assert passes == PASSES[name]
    drawn = timeline(orders)
    for rank, order in orders.items():  # nobody waits for ever
        assert len(drawn[rank]) == sum(e.kind in "FB" for e in order)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "shared_recompute", "shared_vpp2"])
def test_transfers_of_shared_graphs_match(found, name):
    assert unmatched({reading.rank: reading.order for reading in found(name)}) == []


@pytest.mark.slow
def test_stand_ins_and_a_shared_graph_change_nothing(found):
    """The same collectives and parameters, but for the lookup: a gather with all-reduce in the flat graph."""

    def collectives(reading):
        counted = Counter()
        for c in reading.collectives:
            counted[c.kind, c.group, c.phase, c.purpose, c.bytes] += c.times
        return counted

    for flat, shared in zip(found("flat"), found("shared"), strict=True):
        assert flat.parameters == shared.parameters
        here, there = collectives(flat), collectives(shared)
        lookups = (here - there) + (there - here)
        if flat.rank:
            assert not lookups
        table = small.sequences(small.LAYOUTS["flat"]) // 2 * small.LENGTH * H * FLOAT
        assert {size for *_, size in lookups} <= {table}
        assert sum((here - there).values()) == sum((there - here).values())


@pytest.mark.slow
def test_exchanges_by_tokens(found):
    """Every token goes to its experts and back, for both layers with experts and each micro-batch."""
    _, last = found("shared")
    s = Sizes(small.LAYOUTS["shared"])
    for phase in ("forward", "backward"):
        here = [c for c in last.collectives if c.kind == "AlltoAllV" and c.phase == phase]
        assert {(c.ranks, c.bytes) for c in here} == {((4, 5), s.device * TOP_K * H * FLOAT)}
        assert sum(c.times for c in here) == 2 * 2 * small.MICRO


@pytest.mark.slow
def test_recomputation(found):
    """Layers that are run again keep less, and their collectives run again once a micro-batch."""
    for plain, again in (("dp2", "recompute"), ("shared", "shared_recompute")):
        for one, two in zip(found(plain), found(again), strict=True):
            assert not one.recomputed
            assert two.recomputed["MatMul"] > 0
            assert two.memory.activations < one.memory.activations
            forward = {n: two.operators["forward"][n] for n in ("FlashAttentionScore", "AlltoAllV")}
            assert {n: two.recomputed[n] for n in forward} == forward


@pytest.mark.slow
def test_a_derived_rank_of_a_shared_graph_is_the_compiled_one(found):
    same, wrong, good, _ = found("shared_checks")
    assert same
    assert good["check"]["derived_from"] == 4
    assert not wrong


@pytest.mark.slow
def test_ascend_s_attention_keeps_its_module(found):
    """MindSpore drops the scope of an operator that is called with an unpacked tuple."""
    alive = [key for reading in found("shared") for key in reading.memory.alive]
    modules = {module for _, module, kind, _ in alive if kind == "FlashAttentionScore"}
    blocks = ("layers.0", "layers.1", "mtp.0.block")
    assert modules == {f"{block}.attention.core" for block in blocks}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gathered", "once"])
def test_hops_between_nodes(found, name):
    """Between nodes: every token to every node, or once to those that need it, as counted over all choices of experts."""
    (reading,) = found(name)
    s = Sizes(small.LAYOUTS[name])
    nodes, own = len(s.nodes), EXPERTS // len(s.nodes)
    between, inside = Counter(), Counter()
    for c in reading.collectives:
        if "dispatch" in c.module and c.purpose == "activations":
            group = {s.nodes: between, s.node: inside}[c.ranks]
            group[c.phase, c.kind, c.bytes] += c.times
    layers = 2
    row, routing = s.device * nodes * H * FLOAT, s.device * nodes * TOP_K * FLOAT
    expected = {
        ("forward", "AllGather", row): layers,
        ("forward", "AllGather", routing): 2 * layers,
        ("forward", "ReduceScatter", row): layers,
        ("backward", "ReduceScatter", row): layers,
        ("backward", "ReduceScatter", routing): layers,  # experts have no derivative
        ("backward", "AllGather", row): layers,
    }
    if name == "once":
        chosen = list(combinations(range(EXPERTS), TOP_K))
        pairs = sum(len({expert // own for expert in some}) for some in chosen) / len(chosen)
        row, routing = (
            round(s.device * pairs * n) * FLOAT for n in (H, 2 * TOP_K)
        )  # routing: experts and weights
        expected = {
            ("forward", "AlltoAll", nodes * FLOAT): layers,
            ("forward", "AlltoAllV", row): 2 * layers,
            ("forward", "AlltoAllV", routing): layers,
            ("backward", "AlltoAllV", row): 2 * layers,
            ("backward", "AlltoAllV", routing): layers,
        }
    assert between == expected
    rows = s.device * TOP_K * H * FLOAT
    assert inside == {
        ("forward", "AlltoAll", own * FLOAT): layers,
        ("forward", "AlltoAllV", rows): 2 * layers,
        ("backward", "AlltoAllV", rows): 2 * layers,
    }


def test_mindspore_can_be_imported_after_a_graph_was_read(tmp_path):
    """Reading imports protobuf, which chooses its parser once for a process."""
    program = "from telechat_moe.graph.mindir import MindIR; MindIR(b''); import mindspore.train.mind_ir_pb2"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

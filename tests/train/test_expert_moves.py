"""Experts that move between ranks: rows, map and checkpoints against whole tensors that NumPy reorders."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
from mini_recipe import SPREAD

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from mindspore import Tensor, communication, nn, ops

from telechat_moe.checkpoint.rank_shards import balance
from telechat_moe.graph.mindir import COLLECTIVES, kinds
from telechat_moe.moe.placement import SlotMap
from telechat_moe.moe.planner import Proposal
from telechat_moe.ops.permute import Permute
from telechat_moe.processes import Control
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.problems import Missing
from telechat_moe.recipe.uses import unread
from telechat_moe.sharding.cells.dispatch import PaddedDispatch
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.train.expert_moves import MovingExperts
from telechat_moe.train.rank_graph import build_step, compile_recipe
from telechat_moe.train.rank_step import places_of_rows
from telechat_moe.train.ranks import RankCoordinator

LAYERS, EXPERTS = 2, 8
PREFIX = re.compile(r"^(adam_.|ema)\.")
DP4 = {
    **SPREAD,
    "parallel_config__data_parallel": 4,
    "parallel_config__expert_parallel": 4,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "model__model_config__num_hidden_layers": 3,
    "telechat_moe__moe__placement": "{every: 2, window: 2, bandwidth: 1.0e+30}",
    "telechat_moe__ema__decay": 0.75,
}
COPIES = {**DP4, "parallel_config__expert_parallel": 2}
PARTS = {
    **COPIES,
    "parallel_config__model_parallel": 2,
    "telechat_moe__sharding__expert_tensor_parallel": True,
}
LAYOUTS = {
    "dp4 ep4": DP4,
    "dp4 ep2": COPIES,
    "dp4 ep2 zero1": {
        **COPIES,
        "parallel__enable_parallel_optimizer": True,
        "parallel__parallel_optimizer_config__parallel_optimizer_threshold": 0,
    },
    "dp4 tp2 ep2 x tp": PARTS,
    "dp2 pp2 ep2": {
        **COPIES,
        "parallel_config__data_parallel": 2,
        "parallel_config__pipeline_stage": 2,
        "parallel_config__micro_batch_num": 2,
        "callbacks__1__micro_batch_num": 2,
        "model__model_config__num_hidden_layers": 4,
    },
}


def recipe(layout: str) -> Recipe:
    arguments = mini.arguments(Path("data"), Path("run"), **LAYOUTS[layout])
    return load(arguments[1], arguments[4::2])


class Impatient(Control):
    """Does not wait for long where a rank has failed."""

    def barrier(self, name: str, rank: int, ranks: int, patience_s: float = 60.0) -> None:
        super().barrier(name, rank, ranks, patience_s)


class Messages:
    """The rows of one exchange among the threads of a group."""

    def __init__(self, size: int) -> None:
        self.sent: list[list[np.ndarray]] = [[] for _ in range(size)]
        self.ready = Barrier(size, timeout=60)
        self.travelled = 0

    def exchange(
        self,
        member: int,
        x: np.ndarray,
        order: Tensor,
        sent: Tensor,
        received: Tensor,
        arrival: Tensor,
    ) -> np.ndarray:
        counts = sent.asnumpy()
        assert counts.sum() == len(x)
        self.sent[member] = np.split(x[order.asnumpy()], np.cumsum(counts)[:-1])
        self.ready.wait()
        rows = [by_receiver[member] for by_receiver in self.sent]
        assert [len(part) for part in rows] == received.asnumpy().tolist()
        self.ready.wait()
        self.travelled += sum(len(part) for r, part in enumerate(self.sent[member]) if r != member)
        return np.concatenate(rows)[arrival.asnumpy()]


class Program:
    """Stands for a rank's graph: parameters in memory, rows that go to other threads."""

    def __init__(self, rank: int, shards: dict[str, np.ndarray], messages: dict) -> None:
        self.rank, self.shards, self.messages = rank, shards, messages

    def row_exchanges(self, groups: list[tuple[int, ...]]) -> dict:
        exchanges = {}
        for group in (g for g in groups if self.rank in g):
            of_group = self.messages.setdefault(group, Messages(len(group)))
            exchanges[group] = partial(of_group.exchange, group.index(self.rank))
        return exchanges

    def value(self, name: str) -> np.ndarray:
        return self.shards[name]

    def put(self, name: str, shard: np.ndarray) -> None:
        assert shard.shape == self.shards[name].shape
        self.shards[name] = shard


class Team:
    """All ranks of a layout, each in a thread."""

    def __init__(self, layout: str, folder: Path) -> None:
        self.recipe = recipe(layout)
        self.shards = WeightShards.of(self.recipe)
        random = np.random.default_rng(1)
        names = [*self.shards.names, *(f"ema.{n}" for n in self.shards.weights)]
        named = {n: self.shards.shapes[PREFIX.sub("", n)] for n in names}
        self.whole = {n: random.normal(size=x).astype(np.float32) for n, x in named.items()}
        devices = range(self.recipe.devices)
        regions = [{n: self.shards.shard(r, n) for n in self.whole} for r in devices]
        regions = [{n: x for n, x in held.items() if x is not None} for held in regions]
        holders: dict = {}
        for rank, held in enumerate(regions):
            for piece in held.items():
                holders.setdefault(piece, []).append(rank)
        owner = balance({piece: (1, ranks) for piece, ranks in holders.items()})
        sharing = SimpleNamespace(regions=regions, owner=owner)
        control = Impatient(Control.fresh(folder).folder)
        routers = [n for n in self.shards.weights if n.endswith("router.weight")]
        self.programs, self.ranks = [], []
        self.messages: dict[tuple[int, ...], Messages] = {}
        for rank in devices:
            held = {n: self.cut(self.whole[n], x) for n, x in regions[rank].items()}
            slots = {
                n.replace("router.weight", "dispatch.expert_slot"): np.arange(EXPERTS)
                for n in routers
                if n in held
            }
            self.programs.append(Program(rank, held | slots, self.messages))
            given = self.programs[rank], sharing, RankCoordinator(control, rank, len(devices))
            moving = MovingExperts(self.recipe, routers, *given)  # pyright: ignore
            self.ranks.append(moving)
        self.regions = regions

    def cut(self, whole: np.ndarray, region: tuple) -> np.ndarray:
        return whole[tuple(slice(*ends) for ends in region)].copy()

    def all(self, work: Callable[[MovingExperts], object]) -> list:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(work, self.ranks))

    def check(self, placement: SlotMap) -> None:
        """Hold every tensor of every rank against the whole one, its experts put into their slots."""
        layers = sorted({n.split("moe.")[0] for n in self.shards.weights if ".moe." in n})
        for program, held in zip(self.programs, self.regions, strict=True):
            for name, region in held.items():
                expected = self.whole[name]
                if ".moe.experts." in name:
                    layer = layers.index(PREFIX.sub("", name).split("moe.")[0])
                    expected = np.empty_like(self.whole[name])
                    for expert, slot in enumerate(placement.slots[layer]):
                        expected[slot] = self.whole[name][expert]
                np.testing.assert_array_equal(
                    program.shards[name], self.cut(expected, region), name
                )
            for name in (n for n in program.shards if n.endswith("expert_slot")):
                layer = layers.index(name.split("moe.")[0])
                np.testing.assert_array_equal(program.shards[name], placement.slots[layer])


def random_map(random: np.random.Generator, old: SlotMap) -> SlotMap:
    """Return a map of which the first layer, half of the times, is as it was."""
    rows = [random.permutation(EXPERTS) for _ in old.slots]
    if random.random() < 0.5:
        rows[0] = old.slots[0]
    return SlotMap(np.array(rows), old.devices)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_comes_to_its_slot(layout: str, tmp_path: Path) -> None:
    team, random = Team(layout, tmp_path), np.random.default_rng(2)
    for _ in range(4):
        new = random_map(random, team.ranks[0].current)
        team.all(lambda rank, new=new: rank.move(new))
        team.check(new)


def test_only_rows_that_leave_a_rank_travel(tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    slots = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    slots[1] = [
        1,
        0,
        2,
        4,
        3,
        5,
        6,
        7,
    ]  # two change their slot on rank 0, two go between ranks 1 and 2
    team.all(lambda rank: rank.move(SlotMap(slots, 4)))
    tensors = [n for n in team.whole if "layers.2.moe.experts." in n]
    assert len(tensors) == 12
    (messages,) = team.messages.values()
    assert messages.travelled == 2 * len(tensors)


def crowd(team: Team) -> np.ndarray:
    """Return loads that send all tokens to the experts of the first device."""
    r = team.recipe
    pairs = r.global_batch * r.model_config.seq_length * r.model_config.num_experts_per_tok
    load = np.zeros((LAYERS, EXPERTS))
    load[:, :2] = pairs / 2
    return load


def test_a_crowd_is_spread_every_so_often(tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    load = crowd(team)
    assert team.all(lambda rank: rank.after_step(load)) == [[]] * 4
    records = team.all(lambda rank: rank.after_step(load))[0]
    assert [r["layer"] for r in records] == [0, 1]
    for r in records:
        assert (r["load_before"], r["load_after"]) == (load[0].sum(), load[0].sum() / 2)
        hidden, width = 32, 16
        assert r["bytes"] == len(r["experts"]) * 3 * 4 * hidden * width * 4
        assert r["gain_s"] == pytest.approx(load[0].sum() / 2 * 1e-6 * 2)
    owners = team.ranks[0].current.owners
    assert (owners[:, 0] != owners[:, 1]).all()
    team.check(team.ranks[0].current)


def test_loads_that_do_not_add_up_move_nothing(tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    rank, load = team.ranks[0], crowd(team)
    (record,) = rank.after_step(load * 0.9)
    assert "the loads add up to" in record["refused"]
    assert len(rank.window) == 0


def test_what_the_planner_of_rank_0_says_holds_everywhere(tmp_path: Path) -> None:
    team, zero = Team("dp4 ep4", tmp_path), np.zeros(LAYERS)
    for rank in team.ranks:
        slots = np.array([np.roll(np.arange(EXPERTS), rank.ranks.rank + 1)] * LAYERS)
        answer = Proposal(SlotMap(slots, 4), zero, zero, zero, zero)
        rank.planner = lambda loads, current, rule, answer=answer: answer
    load = crowd(team)
    for _ in range(2):
        team.all(lambda rank: rank.after_step(load))
    team.check(SlotMap(np.array([np.roll(np.arange(EXPERTS), 1)] * LAYERS), 4))


def test_a_checkpoint_brings_map_and_loads_back(tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    rank, load = team.ranks[0], crowd(team)
    rank.after_step(load)
    rank.current = SlotMap(np.array([np.roll(np.arange(EXPERTS), 3)] * LAYERS), 4)
    state, kept = rank.state(), rank.current
    assert rank.load_state(None) == ""
    assert (rank.current.slots == np.arange(EXPERTS)).all()
    assert (len(rank.window), rank.steps) == (0, 0)
    assert rank.load_state(state) == ""
    np.testing.assert_array_equal(rank.current.slots, kept.slots)
    np.testing.assert_array_equal(rank.window.loads(), load[None])
    assert rank.steps == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": [[0, 0, 2, 3, 4, 5, 6, 7]] * 2}, "experts 0, 1 are all in slot 0"),
        ({"slots": [[0, 1, 2, 3, 4, 5, 6, 7]]}, "a map of 2 layers"),
        ({"slots": [[0, 1, 2, 3]] * 2}, "a map of 2 layers, 8 experts"),
        ({"devices": 2}, "4 devices cannot become one of 2, 8 and 2"),
        ({"window": [[[16] * 8] * 2, [[-1.0] * 8] * 2]}, "is negative"),
        ({"slots": "no map"}, "placement"),
    ],
)
def test_another_map_is_replaced_with_a_sentence(change: dict, says: str, tmp_path: Path) -> None:
    rank = Team("dp4 ep4", tmp_path).ranks[0]
    note = rank.load_state(rank.state() | change)
    assert note.startswith("the experts begin in their own slots")
    assert says in note
    assert (rank.current.slots == np.arange(EXPERTS)).all()
    assert len(rank.window) == 0


def test_tensors_are_put_into_slots_and_back(tmp_path: Path) -> None:
    rank = Team("dp4 ep4", tmp_path).ranks[0]
    rank.current = random_map(np.random.default_rng(3), rank.current)
    whole = np.random.default_rng(4).normal(size=(EXPERTS, 3, 2))
    for name in ("layers.2.moe.experts.up", "adam_v.layers.2.moe.experts.up"):
        placed = whole[rank.current.experts[1]]
        for expert in range(EXPERTS):
            np.testing.assert_array_equal(placed[rank.current.slots[1, expert]], whole[expert])
        np.testing.assert_array_equal(rank.in_order(name, placed), whole)
        rows = rank.rows(name, ((2, 4), (0, 3), (0, 2)))
        np.testing.assert_array_equal(placed[2:4], whole[list(rows)])
    assert rank.in_order("layers.2.moe.router.weight", whole) is whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_of_rows_find_every_part(layout: str) -> None:
    shards, r = WeightShards.of(recipe(layout)), recipe(layout)
    name = "layers.1.moe.experts.down"
    whole = np.random.default_rng(5).normal(size=shards.shapes[name])
    stage = [shards.shard(rank, name) for rank in range(r.devices)]
    held = [x for x in stage if x is not None]
    sums = [(whole[tuple(slice(*e) for e in x)] ** 2).sum((1, 2)) for x in held]
    found = np.concatenate(sums)[places_of_rows(held)].sum(1)
    np.testing.assert_allclose(found, (whole**2).sum((1, 2)), rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"parallel_config__expert_parallel": 1}, "where every device has all experts"),
        (
            {"telechat_moe__sharding__dispatcher": "allgather"},
            "allgather, which adds up a token's experts device by device",
        ),
        (
            {
                "model__model_config__moe_token_dispatcher_type": "alltoall_deredundency",
                "model__model_config__npu_nums_per_device": 2,
            },
            "alltoall_deredundency, which adds up a token's experts node by node",
        ),
        (
            {
                "telechat_moe__sharding__expert_tensor_parallel": True,
                "parallel_config__model_parallel": 2,
            },
            "expert_tensor_parallel True, where no run with moves was compared",
        ),
        (
            {
                "model__model_config__moe_token_drop_policy": "probs",
                "model__model_config__moe_expert_capacity_factor": 1.0,
            },
            "moe_expert_capacity_factor 1.0, where no",
        ),
    ],
)
def test_where_moves_were_not_proven_they_are_refused(
    changes: dict, found: str, data: Path
) -> None:
    arguments = mini.arguments(data, Path("run"), **{**DP4, **changes})
    r = load(arguments[1], arguments[4::2])
    for use in ("train", "dryrun"):
        said = [x for x in unread(r, use, Missing(False)) if x[0] == "telechat_moe.moe.placement"]
        assert len(said) == 1
        assert found in said[0][1]
        assert said[0][2].startswith("remove it, or ")


class Copies(nn.Cell):
    """Tokens copied to the rows of their pairs."""

    def __init__(self, row_N: np.ndarray, rows: int) -> None:
        super().__init__()
        self.permute, self.row_N, self.rows = Permute(), Tensor(row_N), rows

    def construct(self, x_TH: Tensor) -> Tensor:
        return self.permute(x_TH, self.row_N, self.rows)


def test_gradients_of_a_token_are_added_up_in_the_order_of_its_choices() -> None:
    """With four of eight experts a token, in any slots: other orders of four floats have other sums."""
    random, T, K, H = np.random.default_rng(6), 16, 4, 32
    expert_TK = np.argsort(random.random((T, EXPERTS)), 1)[:, :K]
    grad_NH = random.normal(size=(T * K, H)).astype(np.float32)
    x_TH = Tensor(random.normal(size=(T, H)).astype(np.float32))
    found = set()
    for _ in range(4):
        slot_TK = random.permutation(EXPERTS)[expert_TK]
        row_N = (slot_TK * T + np.arange(T)[:, None]).reshape(-1).astype(np.int32)
        grad_PH = np.zeros((EXPERTS * T, H), np.float32)
        grad_PH[row_N] = grad_NH
        gradient = ops.GradOperation(sens_param=True)(Copies(row_N, EXPERTS * T))
        found.add(gradient(x_TH, Tensor(grad_PH)).asnumpy().tobytes())
    assert len(found) == 1


def test_a_dispatch_whose_experts_move_adds_up_so(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "create_group", lambda *_: None)
    for placement, own in (("{}", False), ("null", True)):
        changes = {**DP4, "telechat_moe__moe__placement": placement}
        arguments = mini.arguments(data, Path("run"), **changes)
        step = build_step(load(arguments[1], arguments[4::2]), 0, target="CPU")
        dispatches = [c for _, c in step.cells_and_names() if isinstance(c, PaddedDispatch)]
        assert {c.permute.differentiable for c in dispatches} == {own}


@pytest.mark.slow
def test_the_map_is_data_of_the_graph_for_ascend(data: Path) -> None:
    """A parameter and three look-ups a layer, and one small collective, which adds up squares; else the same graph."""
    graphs = []
    for placement in ("{}", "null"):
        changes = {**COPIES, "telechat_moe__moe__placement": placement}
        arguments = mini.arguments(data, Path("run"), **changes)
        graphs += compile_recipe(load(arguments[1], arguments[4::2]), [1])
    moving, plain = (kinds(g.mindir) for g in graphs)
    slots = {f"layers.{i}.moe.dispatch.expert_slot" for i in (1, 2)}
    assert set(graphs[0].layouts) - set(graphs[1].layouts) == slots
    communication = {k: moving[k] - plain[k] for k in COLLECTIVES if moving[k] != plain[k]}
    assert communication == {"AllGather": 2}
    assert moving["Gather"] - plain["Gather"] == 2 * 3

"""Experts that move between ranks: rows, map and checkpoints against whole tensors that NumPy reorders."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mini_recipe import SPREAD

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import running
from running import Moving

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.rank_shards import balance
from telechat_moe.cli import main
from telechat_moe.graph.mindir import COLLECTIVES, kinds
from telechat_moe.moe.placement import Placement
from telechat_moe.moe.planner import Proposal
from telechat_moe.processes import Control
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.uses import unread
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.train import metrics
from telechat_moe.train.expert_moves import MovingExperts
from telechat_moe.train.rank_graph import compile_recipe, places_of_rows
from telechat_moe.train.ranks import Ranks

LAYERS, EXPERTS = 2, 8
DP4 = {
    **SPREAD,
    "parallel_config__data_parallel": 4,
    "parallel_config__expert_parallel": 4,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "model__model_config__num_hidden_layers": 3,
    "telechat_moe__moe__placement": "{every: 2, window: 2, bandwidth: 1.0e+30}",
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


class Program:
    """Stands for a rank's graph: parameters in memory."""

    def __init__(self, shards: dict[str, np.ndarray]) -> None:
        self.shards = shards

    @property
    def parameters(self) -> dict[str, SimpleNamespace]:
        return {n: SimpleNamespace(asnumpy=lambda x=x: x) for n, x in self.shards.items()}

    def put(self, name: str, shard: np.ndarray) -> None:
        assert shard.shape == self.shards[name].shape
        self.shards[name] = shard


class Team:
    """All ranks of a layout, each in a thread."""

    def __init__(self, layout: str, folder: Path) -> None:
        self.recipe = recipe(layout)
        self.shards = WeightShards.of(self.recipe)
        random = np.random.default_rng(1)
        named = {n: self.shards.shapes[re.sub(r"^adam_.\.", "", n)] for n in self.shards.names}
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
        for rank in devices:
            held = {n: self.cut(self.whole[n], x) for n, x in regions[rank].items()}
            slots = {
                n.replace("router.weight", "dispatch.expert_slot"): np.arange(EXPERTS)
                for n in routers
                if n in held
            }
            self.programs.append(Program(held | slots))
            given = self.programs[rank], sharing, Ranks(control, rank, len(devices))
            moving = MovingExperts(self.recipe, routers, *given, folder / "rows")  # pyright: ignore
            self.ranks.append(moving)
        self.regions = regions

    def cut(self, whole: np.ndarray, region: tuple) -> np.ndarray:
        return whole[tuple(slice(*ends) for ends in region)].copy()

    def all(self, work: Callable[[MovingExperts], object]) -> list:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(work, self.ranks))

    def check(self, placement: Placement) -> None:
        """Hold every tensor of every rank against the whole one, its experts put into their slots."""
        layers = sorted({n.split("moe.")[0] for n in self.shards.weights if ".moe." in n})
        for program, held in zip(self.programs, self.regions, strict=True):
            for name, region in held.items():
                expected = self.whole[name]
                if ".moe.experts." in name:
                    layer = layers.index(re.sub(r"^adam_.\.", "", name).split("moe.")[0])
                    expected = np.empty_like(self.whole[name])
                    for expert, slot in enumerate(placement.slots[layer]):
                        expected[slot] = self.whole[name][expert]
                np.testing.assert_array_equal(
                    program.shards[name], self.cut(expected, region), name
                )
            for name in (n for n in program.shards if n.endswith("expert_slot")):
                layer = layers.index(name.split("moe.")[0])
                np.testing.assert_array_equal(program.shards[name], placement.slots[layer])


def random_map(random: np.random.Generator, old: Placement) -> Placement:
    """Return a map of which the first layer, half of the times, is as it was."""
    rows = [random.permutation(EXPERTS) for _ in old.slots]
    if random.random() < 0.5:
        rows[0] = old.slots[0]
    return Placement(np.array(rows), old.devices)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_comes_to_its_slot(layout: str, tmp_path: Path) -> None:
    team, random = Team(layout, tmp_path), np.random.default_rng(2)
    for _ in range(4):
        new = random_map(random, team.ranks[0].current)
        assert set(team.all(lambda rank, new=new: rank.move(new))) == {""}
        team.check(new)
    assert not list((tmp_path / "rows").iterdir())


def test_only_rows_that_leave_a_rank_are_written(tmp_path: Path) -> None:
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
    new, sent = Placement(slots, 4), {}

    def send(rank: MovingExperts) -> None:
        rank._send(tmp_path / "sent", new)
        with np.load(tmp_path / "sent" / f"rank_{rank.ranks.rank}.npz") as rows:
            sent[rank.ranks.rank] = {name: x.shape[0] for name, x in rows.items()}

    team.all(send)
    tensors = [n for n in team.whole if "layers.2.moe.experts." in n]
    assert len(tensors) == 9
    assert sent == {0: {}, 1: dict.fromkeys(tensors, 1), 2: dict.fromkeys(tensors, 1), 3: {}}


def cannot_write(rank: MovingExperts, folder: Path) -> None:
    def send(place: Path, new: Placement) -> None:
        raise OSError(28, "No space left on device")

    rank._send = send


def damages(rank: MovingExperts, folder: Path) -> None:
    send = rank._send

    def damage(place: Path, new: Placement) -> None:
        send(place, new)
        path = place / f"rank_{rank.ranks.rank}.npz"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    rank._send = damage


@pytest.mark.parametrize(
    ("fault", "says"), [(cannot_write, "rank 2: No space left on device"), (damages, "Bad CRC-32")]
)
def test_all_ranks_move_or_none(fault: Callable, says: str, tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    fault(team.ranks[2], tmp_path)
    before = team.ranks[0].current
    new = Placement(np.array([np.roll(np.arange(EXPERTS), 2)] * LAYERS), 4)
    (said,) = set(team.all(lambda rank: rank.move(new)))
    assert said.startswith("the experts stay where they are: rank ")
    assert says in said
    team.check(before)
    assert all(rank.current is not new for rank in team.ranks)


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
        assert r["bytes"] == len(r["experts"]) * 3 * 3 * hidden * width * 4
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
        answer = Proposal(Placement(slots, 4), zero, zero, zero, zero)
        rank.planner = lambda loads, current, rule, answer=answer: answer
    load = crowd(team)
    for _ in range(2):
        team.all(lambda rank: rank.after_step(load))
    team.check(Placement(np.array([np.roll(np.arange(EXPERTS), 1)] * LAYERS), 4))


def test_a_checkpoint_brings_map_and_loads_back(tmp_path: Path) -> None:
    team = Team("dp4 ep4", tmp_path)
    rank, load = team.ranks[0], crowd(team)
    rank.after_step(load)
    rank.current = Placement(np.array([np.roll(np.arange(EXPERTS), 3)] * LAYERS), 4)
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
        placed = rank.in_slots(name, whole)
        for expert in range(EXPERTS):
            np.testing.assert_array_equal(placed[rank.current.slots[1, expert]], whole[expert])
        np.testing.assert_array_equal(rank.in_order(name, placed), whole)
        rows = rank.rows(name, ((2, 4), (0, 3), (0, 2)))
        np.testing.assert_array_equal(placed[2:4], whole[list(rows)])
    assert rank.in_slots("layers.2.moe.router.weight", whole) is whole


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
    ],
)
def test_where_sums_depend_on_places_it_is_refused(changes: dict, found: str, data: Path) -> None:
    arguments = mini.arguments(data, Path("run"), **{**DP4, **changes})
    r = load(arguments[1], arguments[4::2])
    for use in ("train", "dryrun"):
        said = [x for x in unread(r, use) if x[0] == "telechat_moe.moe.placement"]
        assert len(said) == 1
        assert found in said[0][1]
        assert said[0][2].startswith("remove it, or ")


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


# ------------------------------------------------------------------ runs on four processes

RUN = {
    **DP4,
    "train_dataset__data_loader__sizes": "[80,0,0]",
    "callbacks__2__keep_checkpoint_max": 20,
    "telechat_moe__moe__placement": "{every: 1, window: 1}",
}
UNCLIPPED = {**RUN, "runner_wrapper__use_clip_grad": False}
CLIPPED = {
    **RUN,
    "parallel_config__expert_parallel": 2,
    "runner_wrapper__max_grad_norm": 0.1,
}
STILL = {"telechat_moe__moe__placement": "{every: 1, window: 1, seconds_per_pair: 1.0e-30}"}
NONE = {"telechat_moe__moe__placement": "null"}


def same(one: Path, other: Path, *, norms: bool = True) -> None:
    """Hold two runs equal to the last bit: every step, and every tensor of every checkpoint."""
    keys = ("step", "loss", "lm_loss", "aux_loss", *["grad_norm"] * norms)
    curves = [[[r[k] for k in keys] for r in records(o, "step")] for o in (one, other)]
    assert curves[0] == curves[1]
    folders = [checkpoint.list_checkpoints(o / "checkpoints") for o in (one, other)]
    assert [p.name for p in folders[0]] == [p.name for p in folders[1]]
    assert len(folders[0]) == 7
    for a, b in zip(*folders, strict=True):
        found, expected = checkpoint.load(a).tensors, checkpoint.load(b).tensors
        assert {g: set(t) for g, t in found.items()} == {g: set(t) for g, t in expected.items()}
        for group, tensors in expected.items():
            for name, tensor in tensors.items():
                assert found[group][name].tobytes() == tensor.tobytes(), (a, name)


def records(output: Path, event: str) -> list[dict]:
    return [r for r in metrics.read(output / "metrics.jsonl") if r["event"] == event]


def train(output: Path, data: Path, *flags: str, **changes: object) -> None:
    assert main([*mini.arguments(data, output, **changes), *flags]) == 0


@pytest.mark.slow
def test_moves_and_a_kill_in_one_of_them_change_no_bit(
    tmp_path: Path, data: Path, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved, killed = (tmp_path / name for name in ("plain", "moved", "killed"))
    train(plain, data, **{**UNCLIPPED, **NONE})
    moving = Moving(tmp_path, monkeypatch)
    train(moved, data, **UNCLIPPED)
    steps = {r["step"] for r in records(moved, "move")}
    assert 8 < len(steps) < 20
    same(moved, plain, norms=False)
    norms = [[r["grad_norm"] for r in records(o, "step")] for o in (moved, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-6)

    shutil.copytree(moved / ".job", killed / ".job")
    moving.stand(6)
    process = start(killed, **UNCLIPPED)
    running.until(moving.here.exists, process)
    pids = [running.rank(killed, r) for r in range(4)]
    os.kill(pids[2], signal.SIGKILL)
    text, _ = process.communicate()
    assert process.returncode == 1, text
    assert f"rank 2 (process {pids[2]}) was killed by SIGKILL" in text
    assert "the last good checkpoint is" in text
    running.wait_for_ends(pids)
    assert list((killed / ".pieces/moves/6").iterdir())
    moving.stand(0)
    moving.here.unlink()
    train(killed, data, "--resume", **UNCLIPPED)
    assert not list((killed / ".pieces").rglob("*.npz"))
    same(killed, moved)
    assert records(killed, "move") == records(moved, "move")

    # Without a map any checkpoint goes on, too.
    monkeypatch.undo()
    shutil.rmtree(killed / "checkpoints")
    shutil.copytree(moved / "checkpoints", killed / "checkpoints")
    for folder in checkpoint.list_checkpoints(killed / "checkpoints")[:3]:
        shutil.rmtree(folder)
    train(killed, data, "--resume", **{**UNCLIPPED, **NONE})
    same(killed, plain, norms=False)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "alltoallv"])
def test_with_clipping_moves_change_no_bit(
    dispatcher: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of each expert. Routed rows come with a rest that counts as the last slot's: the same but for rounding."""
    still, moved = tmp_path / "still", tmp_path / "moved"
    changes = {**CLIPPED, "telechat_moe__sharding__dispatcher": dispatcher}
    train(still, data, **{**changes, **STILL})
    assert not records(still, "move")
    assert min(r["grad_norm"] for r in records(still, "step")) > 0.1
    shutil.copytree(still / ".job", moved / ".job")
    Moving(tmp_path, monkeypatch)
    train(moved, data, **changes)
    assert len({r["step"] for r in records(moved, "move")}) > 8
    if dispatcher == "alltoall":
        same(moved, still)
        return
    curves = [[(r["loss"], r["grad_norm"]) for r in records(o, "step")] for o in (moved, still)]
    np.testing.assert_allclose(*curves, rtol=1e-5)

"""The switches for overlap reach the compiler, and what may run beside an all-to-all is what the graph leaves free."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini

from telechat_moe.graph.mindir import MindIR
from telechat_moe.graph.nodes import Graph, size_of
from telechat_moe.graph.overlap import BACKWARD, FORWARD, REMOVED, computes, pairs
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.speed_up import KEY, SWITCHES
from telechat_moe.train import rank_graph

PLACES = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.data_parallel": 2,
    "parallel_config.expert_parallel": 2,
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "model.model_config.num_hidden_layers": 4,
    "model.model_config.pp_interleave_num": 2,
    "parallel.pipeline_config.pipeline_interleave": True,
    "parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v",
    "telechat_moe.sharding.dispatcher": "alltoallv",
    "train_dataset.data_loader.sizes": "[960, 0, 0]",
}


def recipe(folder: Path, switches: dict[str, Any] | None, **changes: object) -> Recipe:
    values = {**mini.OVERRIDES, **PLACES, "callbacks.1.micro_batch_num": 4, **changes}
    if switches is not None:
        (folder / "overlap.json").write_text(json.dumps(switches))
        values[KEY] = str(folder / "overlap.json")
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()])


def functions_of(r: Recipe) -> tuple[Graph, dict[str, Graph]]:
    (graph,) = key_effects._compiler().submit(rank_graph.compile_recipe, r, [0]).result()
    model = MindIR(graph.mindir)
    functions = {p.name: Graph(model, p) for p in model.graphs()}
    return functions[model.proto.graph.name], functions


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, dict[str, Graph]]:
    folder = tmp_path_factory.mktemp("overlap")
    return functions_of(recipe(folder, {"pp_1f1b_overlap": "AlltoAllV"}))


def reached(graph: Graph, start: str, skip: bool) -> set[str]:
    """Return all nodes behind a node, by a walk of every edge."""
    users: dict[str, list[str]] = {}
    for name, node in graph.nodes.items():
        inputs = list(node.proto.input) + ([] if node.kind else [node.proto.op_type[5:]])
        if skip and node.kind == "Depend" and node.mark(REMOVED):
            inputs = inputs[:1]
        for source in inputs:
            users.setdefault(source, []).append(name)
    found, open_ = {start}, [start]
    while open_:
        for user in users.get(open_.pop(), []):
            if user not in found:
                found.add(user)
                open_.append(user)
    return found - {start}


@pytest.mark.slow
def test_passes_of_two_micro_batches_are_free_of_each_other(
    compiled: tuple[Graph, dict[str, Graph]],
) -> None:
    main, _ = compiled
    ends: dict[int, dict[str, str]] = {}
    for name, node in main.nodes.items():
        for mark in (FORWARD, BACKWARD):
            if not node.kind and node.mark(mark) is not None:
                ends.setdefault(node.mark(mark), {})[mark] = name
    assert len(ends) == 3  # 4 micro-batches, stage 0 of 2: one of step 4 twice, one of step 5
    for end in ends.values():
        f, b = end[FORWARD], end[BACKWARD]
        assert f in reached(main, b, skip=False)  # by the edge that the backend removes
        assert f not in reached(main, b, skip=True)
        assert b not in reached(main, f, skip=True)


@pytest.mark.slow
def test_what_runs_beside_an_exchange(compiled: tuple[Graph, dict[str, Graph]]) -> None:
    main, functions = compiled
    found = pairs(main, functions, ["AlltoAllV"], lambda shape: size_of(shape) or 4096)
    assert sum(pair.times for pair in found if pair.free) == 3
    assert any(pair.exchanges for pair in found)
    for pair in found:
        graphs = [functions[name] for name in pair.functions]
        for graph, parts in zip(graphs, (pair.forward, pair.backward), strict=True):
            ops = [n.name for n in graph.nodes.values() if computes(n)]
            assert sum(part.operators for part in parts) == len(ops)
        for x in pair.exchanges:
            graph = graphs[x.pass_ == "B"]
            behind = reached(graph, x.name, skip=True)
            ops = [n for n in graph.nodes.values() if computes(n) and n.name not in behind]
            free = [n for n in ops if x.name not in reached(graph, n.name, skip=True)]
            assert x.concurrent.operators == len(free)
            other = (pair.backward, pair.forward)[x.pass_ == "B"]
            part = x.number + (x.pass_ == "B")
            assert x.paired == (other[part] if part < len(other) else (0, 0.0, 0.0))


@pytest.mark.slow
def test_without_the_switch_no_pass_is_free(tmp_path: Path) -> None:
    main, functions = functions_of(recipe(tmp_path, None))
    assert pairs(main, functions, ["AlltoAllV"], lambda shape: size_of(shape) or 4096) == []


def test_mindspores_table_of_switches_is_ours(tmp_path: Path) -> None:
    """MindSpore takes every name of the table, old and new, with the values that we take, and no other name."""
    import inspect
    import re

    from mindspore.context import _Context

    source = inspect.getsource(_Context._set_speedup_config_path)
    theirs = set(re.findall(r'"(\w+)":\s*\(ms_ctx_param', source))
    ours = set(SWITCHES) | {s.old for s in SWITCHES.values() if s.old}
    assert theirs == ours
    replaced = dict(re.findall(r'"(\w+)": "(\w+)"', source))
    replaced.pop("dataset_broadcast_opt_level")
    assert replaced == {s.old: name for name, s in SWITCHES.items() if s.old}
    assert np.all([s.takes in ("bool", "list", "bool or list", "level") for s in SWITCHES.values()])


@pytest.mark.slow
def test_a_pair_that_a_control_edge_joins_is_not_free(
    compiled: tuple[Graph, dict[str, Graph]],
) -> None:
    """Where the mark of the edge that the backend removes is lost, the pair runs one after the other."""
    main, functions = compiled
    for node in main.nodes.values():
        kept = [a for a in node.proto.primal_attr if a.name != REMOVED]
        if len(kept) < len(node.proto.primal_attr):
            del node.proto.primal_attr[:]
            node.proto.primal_attr.extend(kept)
    found = pairs(main, functions, ["AlltoAllV"], lambda shape: size_of(shape) or 4096)
    assert sum(pair.times for pair in found) == 3
    assert not any(pair.free for pair in found)
    assert all(x.paired == (0, 0.0, 0.0) for pair in found for x in pair.exchanges)

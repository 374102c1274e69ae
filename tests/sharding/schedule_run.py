"""Run a pipeline's passes in the order of a program, and in MindSpore's, on the same graphs.

    python schedule_run.py compile FOLDER CASE       graphs of all ranks, and a job of each program
    msrun ... schedule_run.py work FOLDER CASE       one process a rank: all jobs, one after another

A program of its own, because compiling for a simulated device leaves marks on a process.
"""

import os
import pickle
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from sharded_momentum import Momentum
from sharded_run import RATE, Layout, recipe

from telechat_moe.graph import reorder, swapping
from telechat_moe.graph.exchanges import split
from telechat_moe.graph.mindir import Editor, MindIR, output_shapes
from telechat_moe.graph.swapping import in_pool
from telechat_moe.tools.plan.schedules.program import (
    Op,
    OpKind,
    Program,
    Times,
    loop_route,
    v_route,
)
from telechat_moe.tools.plan.schedules.published import GENERATORS, generate
from telechat_moe.tools.plan.schedules.ranks import stage_order
from telechat_moe.tools.plan.schedules.simulate import check
from telechat_moe.tools.plan.schedules.synthesise import synthesise

CASES = {
    "short": Layout(pp=2, micro=3, mtp=0),
    "beside": Layout(dp=2, ep=2, micro=3, mtp=0, dispatcher="alltoallv"),
    "two": Layout(pp=2, micro=4),
    "two-in-turn": Layout(pp=2, micro=4, vpp=2),
    "two-v": Layout(pp=2, micro=4, vpp=2, scheduler="zero_bubble_v"),
    "two-spread": Layout(pp=2, dp=2, ep=2, micro=4, zero=True),
    "two-beside": Layout(pp=2, dp=2, ep=2, micro=4, dispatcher="alltoallv"),
    "two-v-beside": Layout(
        pp=2, dp=2, ep=2, micro=4, vpp=2, scheduler="zero_bubble_v", dispatcher="alltoallv"
    ),
    "nodes-beside": Layout(dp=4, ep=4, micro=3, dispatcher="alltoallv", hop="once", node=2),
    "swap": Layout(dp=2, ep=2, micro=2, dispatcher="alltoallv", swap=5),
    "swap-stages": Layout(pp=2, micro=3, mtp=0, swap=5),
    "four": Layout(pp=4, micro=4, mtp=0),
    "four-v": Layout(pp=4, micro=8, vpp=2, scheduler="zero_bubble_v", mtp=0),
}
OWN = "own"
FAULTS = {
    "short": {"sums-as-they-come": "random 0", "another-micro-batch": "1f1b"},
    "beside": {"read-early": "1f1b-overlap-full"},
}
SWAPPED, OVERWRITTEN = "swapped", "overwritten"
SWAPS = ("swap", "swap-stages")
"""Cases that swap; their own jobs do not."""


def random_program(stages: int, route: tuple[int, ...], micro_batches: int, seed: int) -> Program:
    """Return a program that can run, its order drawn at random: F, D and W apart."""
    rng, count = random.Random(seed), len(route)
    done: set[tuple[str, int, int]] = set()
    left = [(k, c, m) for k in "FDW" for c in range(count) for m in range(micro_batches)]
    ops: list[list[Op]] = [[] for _ in range(stages)]

    def ready(kind: str, chunk: int, micro: int) -> bool:
        if kind == "F":
            return chunk == 0 or ("F", chunk - 1, micro) in done
        if kind == "W":
            return ("D", chunk, micro) in done
        after = ("F", chunk, micro) if chunk == count - 1 else ("D", chunk + 1, micro)
        return after in done

    while left:
        part = rng.choice([p for p in left if ready(*p)])
        left.remove(part)
        done.add(part)
        ops[route[part[1]]].append(Op(OpKind(part[0]), *part[1:]))
    name = f"random {seed}"
    return Program(name, stages, micro_batches, (route,), tuple(map(tuple, ops)))


def programs(case: str) -> Iterator[Program]:
    """Yield the programs that fit a case: all published ones, a synthesised one, random ones."""
    layout = CASES[case]
    pp, chunks, micro = layout.pp, layout.vpp, layout.micro_batches
    v_shape = layout.scheduler == "zero_bubble_v"
    route = (v_route if v_shape else loop_route)(pp, chunks)
    if case == "short":
        yield generate("1f1b", pp, micro, chunks)
        yield generate("zb-h1", pp, micro, chunks)
        yield random_program(pp, route, micro, 0)
        return
    if layout.dispatcher == "alltoallv":  # with pairs, beside which rows travel
        v_names = ("dualpipev",) if v_shape else ()
        for name in v_names or ("1f1b-overlap", "1f1b-overlap-full"):
            yield generate(name, pp, micro, chunks)
        return
    for name in GENERATORS:
        need, _ = GENERATORS[name]
        if (
            need in (0, chunks)
            and name != "dualpipe"
            and not (chunks == 1 and name == "interleaved")
        ):
            program = generate(name, pp, micro, chunks)
            if program.routes == (route,):
                yield program
    lasting = np.random.default_rng(1).uniform(1, 3, (3, pp * chunks))
    place = "v" if v_shape else "loop"
    yield synthesise(Times(*lasting, comm=0.1), pp, micro, placements=[place]).program
    yield random_program(pp, route, micro, 0)
    yield random_program(pp, route, micro, 1)


def planted(fault: str):
    """Return what makes a mistake on purpose while graphs are written."""
    if fault == "sums-as-they-come":

        def as_they_come(self: reorder._Orderer) -> None:
            additions = [name for names in self.sums.values() for name in names]
            for name in additions:
                if self.nodes[name].input[1] in self.placed and name not in self.placed:
                    self._write(self.nodes[name])

        return patch.object(reorder._Orderer, "_add_sums", as_they_come)

    if fault == "read-early":
        return patch.object(reorder, "split", split_and_read_early)
    impose = reorder.impose

    def with_two_exchanged(model, *given) -> None:
        impose(model, *given)
        kinds = {node.name: model.primitive(node) for node in model.proto.graph.node}
        sends = [
            n for n in model.proto.graph.node if getattr(kinds[n.name], "op_type", "") == "Send"
        ]
        first, *others = [n for n in sends if n.input]
        (shape,) = (a for a in first.attribute if a.name == "shape")
        other = next(n for n in others if shape in n.attribute)
        first.op_type, other.op_type = other.op_type, first.op_type

    return patch.object(reorder, "impose", with_two_exchanged)


def split_and_read_early(model: MindIR) -> dict[str, str]:
    """Split the exchanges; one that waits for rows takes those that it has sent instead."""
    waits = split(model)
    main = model.proto.graph
    fresh = type(main)()
    editor = Editor(model, fresh.node)
    places = {node.name: i for i, node in enumerate(main.node)}
    kinds = {n: model.primitive(main.node[places[n]]).instance_name for n in waits.values()}
    node = main.node[places[next(n for n, kind in kinds.items() if kind == "MoeCombineWait")]]
    ((shape, _),) = output_shapes(node)
    ends = [editor.constant(list(place)) for place in ([0, 0], shape, [1, 1])]
    zero = editor.constant(0)
    node.op_type = editor.primitive("StridedSlice")
    node.input[1:] = [*ends, *[zero] * 5]
    fresh.node.extend(main.node)
    del main.node[:]
    main.node.extend(fresh.node)
    return waits


def compile_case(folder: Path, case: str) -> None:
    """Compile the graphs of a case once and write a job for each program."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.sharding.recipe import mesh_of
    from telechat_moe.train.rank_graph import compile_recipe

    chosen = recipe(CASES[case], 2 if case in (*FAULTS, *SWAPS) else 4)
    graphs = compile_recipe(chosen, target="CPU", optimizer=Momentum, shared_graph=True)
    if case in SWAPS:
        _compile_swap(folder, case, graphs)
        return
    (folder / "graphs.pickle").write_bytes(pickle.dumps(graphs))
    mesh, made = mesh_of(chosen), {}
    Job.write(folder / OWN, graphs)
    for program in programs(case):
        check(program)
        paired = CASES[case].dispatcher == "alltoallv"
        made[program.name] = {
            rank: stage_order(program, mesh.stage(rank), paired) for rank in range(mesh.devices)
        }
        Job.write(folder / program.name, graphs, made[program.name])
    for fault, name in FAULTS.get(case, {}).items():
        with planted(fault):
            Job.write(folder / fault, graphs, made[name])
    (folder / "orders.pickle").write_bytes(pickle.dumps(made))


def largest_at_one_place(tensors: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Let the largest activations overwrite each other."""
    places, pool = in_pool(tensors)
    largest = max(size for size, *_ in tensors)
    return [
        pool if row[0] == largest else place for place, row in zip(places, tensors, strict=True)
    ], pool + largest


def _compile_swap(folder: Path, case: str, graphs: list) -> None:
    """Write the jobs of a case that swaps, and the same without swapping."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.rank_graph import compile_recipe

    layout = CASES[case]
    kept = recipe(replace(layout, swap=0), 2)
    graphs_kept = compile_recipe(kept, target="CPU", optimizer=Momentum, shared_graph=True)
    Job.write(folder / OWN, graphs_kept)
    Job.write(folder / SWAPPED, graphs)
    with patch.object(swapping, "in_pool", largest_at_one_place):
        Job.write(folder / OVERWRITTEN, graphs)


def work(folder: Path, case: str) -> None:
    """Run two steps of each job in this process's rank; write losses, norm, loads and all parameters."""
    import mindspore as ms
    from mindspore import Tensor
    from mindspore.communication import get_rank, init

    from telechat_moe.graph.execute import Job
    from telechat_moe.train.programs.cpu import CpuProgram

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    rank, made, layout = get_rank(), set(), CASES[case]
    rows, length = layout.sequences * layout.micro_batches, layout.length
    tokens = np.random.default_rng(3).integers(1, 64, (2, 2, rows, length)).astype(np.int32)
    places = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    weight = np.ones((rows, length), np.float32)
    for job in sorted(p.name for p in folder.iterdir() if (p / "ranks.json").exists()):
        program = CpuProgram(Job.read(folder / job), rank, made)
        program.set_parameters({n: _start(n, program) for n in program.parameters})
        scalars, found = Momentum([]).scalars, []
        for step, (ids, labels) in enumerate(tokens):
            answers = program(*scalars(step + 1, RATE), *map(Tensor, (ids, labels, weight, places)))
            found.append([answer.asnumpy().copy() for answer in answers])
        result = (found, program.shards())
        (folder / job / f"out_{rank}.pickle").write_bytes(pickle.dumps(result))


def _start(name: str, program) -> np.ndarray:
    """Return the whole tensor that a parameter starts from."""
    shape = tuple(program.parameters[name].shape)
    entry = program.graph.layouts.get(name)
    if entry is not None:
        shape = tuple(entry.shape)
    if name.startswith(("momentum", "accu_grads")) or name.endswith(("bias", "load", "dropped")):
        return np.zeros(shape, np.float32)
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.1, shape)
    return (drawn + name.endswith("norm.weight")).astype(np.float32)


if __name__ == "__main__":
    verb, place, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    os.environ.setdefault("GLOG_v", "3")
    {"compile": compile_case, "work": work}[verb](place, name)

"""The device program's own compilation, on the simulated device: the slices that it expects are those of the layout table.

What follows on a device, executing the step, has never been run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from test_reshard import LAYOUTS, recipe

from telechat_moe.graph.parameter_layout import shard_slices
from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.processes import in_children, in_clean_process
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.sharding.shards import WeightShards


def on_ascend(layout: str) -> Recipe:
    of = recipe(**LAYOUTS[layout])
    return replace(of, context=replace(of.context, device_target="Ascend"))


def as_rank(of: Recipe, rank: int, compile_: Callable[[Any], Any]) -> Any:
    """Return what `compile_` returns in a process that is a rank of Ascend devices, whose cells are built before it is."""
    path = library()

    def work() -> Any:
        device = SimulatedDevice(rank, of.devices, path)
        from telechat_moe.train.programs import device as programs

        source_of = programs.step_source

        def source(*arguments: Any, **settings: Any) -> Any:
            plain = source_of(*arguments, **settings)

            def build(number: int) -> Any:
                built = plain.build(number)
                device.to_ascend()
                return built

            return plain._replace(build=build)

        programs.step_source = source
        return compile_(programs)

    (result,) = in_children([(work, f"rank {rank}")])
    return result


@in_clean_process
def slices(layout: str, rank: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return of each parameter of a rank's native step the (begin, end) in each dimension, and its own shape."""
    of = on_ascend(layout)

    def compile_(programs: Any) -> Any:
        step = programs.compile_step(of, rank)
        regions = {}
        for name, entry in step.graph.layouts.items():
            bounds = shard_slices(entry.shape, step.graph, name)
            regions[name] = bounds and tuple((s.start, s.stop) for s in bounds)
        return regions, {name: tuple(p.shape) for name, p in step.parameters.items()}

    return as_rank(of, rank, compile_)


def check(layout: str, ranks: list[int]) -> None:
    of = on_ascend(layout)
    table, seen = WeightShards.of(of), set[str]()
    for rank in ranks:
        regions, shapes = slices(layout, rank)
        for name in table.names:
            expected = table.shard(rank, name)
            assert regions.get(name) == expected, (rank, name)
            assert (name in shapes) == (expected is not None), (rank, name)
            if expected is not None:
                assert shapes[name] == tuple(end - begin for begin, end in expected), (rank, name)
                seen.add(name)
    assert seen == set(table.names)


def test_a_device_expects_the_slices_of_the_table() -> None:
    check("dp2-zero", [1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout(layout: str) -> None:
    """The last rank of each stage: with all coordinates above 0."""
    mesh = mesh_of(on_ascend(layout))
    check(layout, [first + mesh.stage_devices - 1 for first in mesh.first_ranks()])


@in_clean_process
def forward_shapes(layout: str, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a rank's native forward graph."""
    of = on_ascend(layout)

    def compile_(programs: Any) -> Any:
        forward = programs.compile_forward(of, rank, {})
        names = set(forward.parallel_parameter_name_list)
        return {p.name: tuple(p.shape) for p in forward.get_parameters() if p.name in names}

    return as_rank(of, rank, compile_)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2-ep2", "dp4-ep2-zero", "tp2-pp2"])
def test_the_forward_graph_compiles_natively(layout: str) -> None:
    """For evaluation: no more parameters than the step has, in the same shapes."""
    rank = on_ascend(layout).devices - 1
    _, shapes = slices(layout, rank)
    forward = forward_shapes(layout, rank)
    assert forward
    table = WeightShards.of(on_ascend(layout))
    weights = {name: shape for name, shape in forward.items() if name in table.names}
    assert {name: shapes[name] for name in weights} == weights

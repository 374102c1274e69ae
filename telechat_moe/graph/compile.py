"""Compile the graph of a rank for target Ascend on this machine, in a forked child."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.processes import in_children


class Built(NamedTuple):
    """What a caller hands to :func:`compile_rank`: a finished step and one batch for it."""

    step: Any
    inputs: tuple[Any, ...]


class LayoutEntry(NamedTuple):
    """What is read of an entry of MindSpore's ``parameter_layout_dict``.

    Attributes:
        device_matrix: Sizes of the axes of a stage's devices.
        tensor_map: Axis that splits each dimension, numbered from the right, or a list of them; -1: none. A dimension
            that several axes split may be several dimensions here and in ``shard_view``.
        shard_group: Group among which the sharded optimizer splits the first dimension; empty: it does not.
        shape: Shape of the whole tensor; may be empty.
        shard_view: Shape of the shard.
    """

    device_matrix: list[int]
    tensor_map: list[Any]
    shard_group: str
    shape: list[int]
    shard_view: list[int]

    @staticmethod
    def of(entry: Sequence[Any]) -> "LayoutEntry":
        """Return the parts of MindSpore's entry by name."""
        return LayoutEntry(*entry[:2], *entry[5:8])

    def axes_by_dimension(self, shape: Sequence[int]) -> list[list[int]]:
        """Return the axes that split each dimension of a tensor, numbered from the right of the device matrix."""
        if len(self.tensor_map) == len(shape):
            nested = [x if isinstance(x, list | tuple) else [x] for x in self.tensor_map]
            return [[axis for axis in axes if axis != -1] for axes in nested]
        dimensions: list[list[int]] = []
        position = 0
        for length in shape:
            axes, extent = [], 1
            while position < len(self.tensor_map):
                axis = self.tensor_map[position]
                split = self.device_matrix[-1 - axis] if axis != -1 else 1
                factor = self.shard_view[position] * split
                if extent == length and factor != 1:
                    break
                extent *= factor
                axes += [axis] if axis != -1 else []
                position += 1
            dimensions.append(axes)
        return dimensions


def layouts_of(step: Any) -> dict[str, LayoutEntry]:
    """Return how MindSpore has split the parameters of a compiled step, by name."""
    layouts = step.parameter_layout_dict or {}
    return {name: LayoutEntry.of(entry) for name, entry in layouts.items()}


def set_parallel(mode: str, rank: int, devices: int, settings: Mapping[str, Any]) -> None:
    """Set MindSpore's parallel mode, unless the settings name another, for one of some devices, and nothing that was set before."""
    import mindspore as ms
    from mindspore.parallel._auto_parallel_context import auto_parallel_context

    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**{"parallel_mode": mode, "device_num": devices, **settings})
    # Not through set_auto_parallel_context, whose check ends at rank 4095; the compiler's does not.
    auto_parallel_context()._context_handle.set_global_rank(rank)


@dataclass(frozen=True, kw_only=True)
class RankGraph:
    """The compiled graph of one rank.

    Attributes:
        mindir: Serialised MindIR, forward, backward and optimizer.
        groups: Communication groups by name, global ranks.
        layouts: Parameter name to how MindSpore has split it.
        build_seconds: Time to build the cells.
        compile_seconds: Time in MindSpore's front end.
        peak_memory: Peak resident memory of the compiling process, bytes.
    """

    rank: int
    devices: int
    mindir: bytes = field(repr=False)
    groups: Mapping[str, list[int]] = field(repr=False)
    layouts: Mapping[str, LayoutEntry] = field(repr=False)
    build_seconds: float
    compile_seconds: float
    peak_memory: int

    def content(self) -> dict[str, Any]:
        """Return all but the MindIR, as JSON takes it."""
        return {name: value for name, value in vars(self).items() if name != "mindir"}

    @staticmethod
    def of(content: Mapping[str, Any]) -> "RankGraph":
        """Return the graph, without MindIR, of a :meth:`content`."""
        layouts = {name: LayoutEntry(*entry) for name, entry in content["layouts"].items()}
        return RankGraph(**{**content, "mindir": b"", "layouts": layouts})


def compile_ranks(
    build: Callable[[int], Built],
    ranks: Sequence[int],
    devices: int,
    settings: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
    done: Callable[[], object] | None = None,
    switches: Path | None = None,
) -> list[RankGraph]:
    """Compile what ``build`` returns for each of ``ranks``, as many at a time as there are cores.

    Args:
        build: Takes a rank; called in a forked child, where MindSpore runs as that rank; the target is
            still CPU.
        settings: For ``set_auto_parallel_context``; the rank and the number of devices are set here, and
            semi-automatic mode where they name none.
        context: For ``set_context``.
        switches: JSON file of MindSpore's switches for overlap (``parallel_speed_up_json_path``).

    Raises:
        CompileError: MindSpore refused a graph, or its compiler died.
    """
    path = library()

    def work(rank: int) -> Callable[[], RankGraph]:
        return lambda: _compile(
            lambda: build(rank),
            SimulatedDevice(rank, devices, path),
            settings,
            context or {},
            switches,
        )

    return in_children([(work(rank), f"rank {rank} of {devices}") for rank in ranks], done=done)


def _set_compiler_context(context: Mapping[str, Any], switches: Path | None) -> None:
    """Set what the compiler asks its context for.

    With the target MindSpore makes a new C++ context, which knows nothing of what Python set before, and Python keeps
    the old one; so they are set in the new one, and the old one is put back.
    """
    import mindspore as ms
    from mindspore._c_expression import MSContext
    from mindspore.context import _context

    python = _context()
    old, python._context_handle = python._context_handle, MSContext.get_instance()
    try:
        ms.set_context(**context)
        if switches is not None:
            python._set_speedup_config_path(str(switches))
    finally:
        python._context_handle = old


def _compile(
    build: Callable[[], Built],
    device: SimulatedDevice,
    settings: Mapping[str, Any],
    context: Mapping[str, Any],
    switches: Path | None,
) -> RankGraph:
    import mindspore as ms
    from mindspore.graph.api import _cell_graph_executor as executor

    ms.set_context(mode=ms.GRAPH_MODE, **context)
    set_parallel("semi_auto_parallel", device.rank, device.size, settings)
    began = time.perf_counter()
    built = build()
    ready = time.perf_counter()
    device.to_ascend()
    _set_compiler_context(context, switches)
    phase, _ = executor.compile(built.step, *built.inputs, phase="export.mindir")
    finished = time.perf_counter()
    mindir = executor._get_func_graph_proto(built.step, phase, "mind_ir")
    return RankGraph(
        rank=device.rank,
        devices=device.size,
        mindir=mindir,
        groups=device.groups(),
        layouts=layouts_of(built.step),
        build_seconds=ready - began,
        compile_seconds=finished - ready,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )

"""Record what a MindSpore graph computes, on CPU: ``capture(net, x, out="dump")``, or a recipe's training steps.

The net is compiled as MindSpore compiles it (MindIR), gets a tap behind each operator (``graph/tap.py``) and runs. So a
net that differentiates and updates is recorded with all of that, and fused operators appear as they run.
"""

import fnmatch
import re
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.graph.tap import Tapped, tapped
from telechat_moe.graph.tap_plan import TappedOperator, TapPlan
from telechat_moe.interruption import unfinished
from telechat_moe.ops import native
from telechat_moe.ops.tap import VALUES, recording
from telechat_moe.tools.align.capture.ms_layout import layouts
from telechat_moe.tools.align.capture.ms_read import Reader, name_of
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import Dump, RankDump, TensorLayout

if TYPE_CHECKING:
    from telechat_moe.recipe import Recipe

_LAYER = re.compile(r"(?:^|\.)(?:layers|mtp)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Filter:
    """Selects the operators to record."""

    # Numbers of layers; None: all layers, and operators outside of layers
    layers: frozenset[int] | None = None
    only: tuple[str, ...] = ()  # patterns of names such as `Primitive.*.attention.*`; empty: all

    def __call__(self, node: TappedOperator) -> bool:
        """Return whether an operator is recorded."""
        name = name_of(node)
        if self.only and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only):
            return False
        if self.layers is None:
            return True
        layer = _LAYER.search(name)
        return layer is not None and int(layer[1]) in self.layers


def capture(
    net: Any,
    *inputs: Any,
    out: Path | str,
    values: str = VALUES,  # or `statistics`, `fingerprint`
    layers: Iterable[int] | None = None,
    only: Sequence[str] = (),
) -> Any:
    """Run a net once, write what it computes as a tree of msprobe, and return its result.

    Raises:
        UsageError: ``out`` exists.
    """
    step = Tapped(net, Filter(None if layers is None else frozenset(layers), tuple(only)))
    with _taps(out) as taps:
        step.compile(*inputs)
        with recording(taps, values):
            result = step(*inputs)
        _write(Path(out), {(0, 0): Reader(step.plan, taps, values)}, values)
    return result


@contextmanager
def _taps(out: Path | str) -> Generator[Path, None, None]:
    """Yield a folder for what taps write, beside a folder that does not exist yet; remove it in the end."""
    out = Path(out)
    if out.exists():
        raise UsageError(f"{out}: it exists; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    taps = out.with_name(f"{out.name}.taps")
    with unfinished(out), unfinished(taps):
        try:
            yield taps
        finally:
            shutil.rmtree(taps, ignore_errors=True)


def _write(out: Path, readers: Mapping[tuple[int, int], Reader], values: str) -> Dump:
    task = "tensor" if values == VALUES else "statistics"
    ranks = {k: RankDump(*k, "mindspore", task, "mix", r.calls()) for k, r in readers.items()}
    dump = Dump(out, ranks)
    msprobe_write.write(dump, out, values=values == VALUES)
    return dump


def capture_recipe(
    recipe: "Recipe",
    out: Path | str,
    steps: range,
    *,
    values: str = VALUES,
    selection: Filter = Filter(),
    ranks: Sequence[int] | None = None,
) -> Dump:
    """Run the first steps of a recipe as in training, and write what the selected operators compute.

    A recipe for several devices runs as in ``telechat-moe run-sharded``: a process and a graph for each rank. Steps count from 0.

    Raises:
        UsageError: ``out`` exists, or the recipe has no such rank.
        BadInputError: The recipe cannot run here.
    """
    with _taps(out) as taps:
        if steps.stop > recipe.train_steps:
            raise UsageError(
                f"--steps up to {steps.stop - 1}: {recipe.source} has {recipe.train_steps} steps, numbered from 0"
            )
        if recipe.devices > 1:
            recordings = _sharded(recipe, taps, steps, values, selection, ranks)
        else:
            recordings = _single(recipe, taps, steps, values, selection)
        readers = {
            (step, rank): Reader(plan, taps / f"step{step}" / f"rank{rank}", values, shards, groups)
            for (step, rank), (plan, shards, groups) in recordings.items()
        }
        return _write(Path(out), readers, values)


_Recordings = dict[
    tuple[int, int], tuple[TapPlan, Mapping[int, TensorLayout], Mapping[str, Sequence[int]]]
]


class _TappedStep:
    """A training step with taps, which replaces the trainer's own."""

    accumulate = None

    def __init__(self, step: Any, selection: Filter, states: bool) -> None:
        self.plain, self.tapped = step, Tapped(step, selection, states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __call__(self, *inputs: Any) -> Any:
        return self.tapped(*inputs)


def _single(
    recipe: "Recipe", taps: Path, steps: range, values: str, selection: Filter
) -> _Recordings:
    from telechat_moe.interop import hf
    from telechat_moe.launch.sharded_run import Recording, record_steps
    from telechat_moe.train.engine import OneProcess
    from telechat_moe.train.trainer import Trainer

    trainer = Trainer(recipe, overwrite=True, plain=True, weights=hf.weights)
    engine = trainer.engine
    assert isinstance(engine, OneProcess)
    if engine.train_step.accumulate is not None:
        raise BadInputError(
            f"{recipe.source}: gradient accumulation in one process is not captured; "
            "set runner_config.gradient_accumulation_steps=1"
        )
    step = _TappedStep(engine.train_step, selection, values == VALUES)
    engine.train_step = step  # pyright: ignore[reportAttributeAccessIssue]
    record_steps(trainer, steps.stop, Recording(taps, 0, steps, values))
    return {(n, 0): (step.tapped.plan, {}, {}) for n in steps}


def _sharded(
    recipe: "Recipe",
    taps: Path,
    steps: range,
    values: str,
    selection: Filter,
    ranks: Sequence[int] | None,
) -> _Recordings:
    from telechat_moe.graph.execute import Job
    from telechat_moe.graph.inline import inlined
    from telechat_moe.graph.reorder import in_order
    from telechat_moe.launch.job import LOGS
    from telechat_moe.launch.sharded_run import run_ranks
    from telechat_moe.tools.plan.schedules.ranks import rank_orders
    from telechat_moe.train.rank_graph import compile_recipe

    if recipe.optimizer.swap:
        raise BadInputError(
            f"{recipe.source}: optimizer.swap True: a capture reads moments, which are out of the graph then; set it to False"
        )
    orders = rank_orders(recipe)
    chosen = range(recipe.devices) if ranks is None else ranks
    if outside := [r for r in chosen if not 0 <= r < recipe.devices]:
        raise UsageError(
            f"--ranks {outside[0]}: {recipe.source} has ranks 0 to {recipe.devices - 1}"
        )
    native.load()
    graphs: list[Any] = []
    plans = dict[int, TapPlan]()
    options = str(native.path()), selection, values == VALUES
    for graph in compile_recipe(recipe, target="CPU", full_batch=True):
        inlined_graph = inlined(graph.mindir)
        content = inlined_graph if orders is None else in_order(graph.mindir, orders[graph.rank])
        if graph.rank in chosen:
            content, plans[graph.rank] = tapped(content, *options, planned=inlined_graph)
        graphs.append(replace(graph, mindir=content))
    job = taps / "job"
    groups = Job.write(job, graphs).groups
    recording = {"folder": str(taps), "steps": list(steps), "values": values, "ranks": list(chosen)}
    run_ranks(recipe, job, taps / LOGS, steps.stop, recording)
    by_rank = {rank: (plans[rank], layouts(plans[rank], recipe, rank), groups) for rank in chosen}
    return {(step, rank): by_rank[rank] for rank in chosen for step in steps}

"""Run a few steps of every rank's graph on CPU processes, and say how these graphs differ from Ascend's.

Run by ``telechat-moe run-sharded RECIPE``. Nothing is evaluated or saved; ``telechat-moe train`` does that.
"""

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from telechat_moe.errors import UsageError
from telechat_moe.interop import hf
from telechat_moe.interruption import unfinished
from telechat_moe.launch.commands import LaunchNode, free_port
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.launch.job import (
    LOGS,
    RESOLVED,
    Orders,
    ascend_operators,
    write_job,
    write_resolved,
)
from telechat_moe.ops.tap import recording
from telechat_moe.processes import CONTROL, Control
from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.recipe.experts import dispatcher, drops, hop_between_nodes
from telechat_moe.sharding.recipe import balance_groups, mesh_of
from telechat_moe.train import preflight
from telechat_moe.train.monitor import SilentMonitor
from telechat_moe.train.ranks import RankCoordinator

if TYPE_CHECKING:
    from telechat_moe.train.trainer import Trainer

STEPS_FILE = "steps.jsonl"
MEASURED = ("loss", "lm_loss", "mtp_loss", "aux_loss", "grad_norm")

# Primitives of Ascend -> what computes the same on CPU (telechat_moe.ops, backend "plain").
PLAIN = {
    "FlashAttentionScore": "BatchMatMul, Add of the mask, Softmax, BatchMatMul",
    "FlashAttentionScoreGrad": "the gradients of these",
    "GroupedMatmul": "Gather of each block's expert, BatchMatMul",
    "GroupedMatmulV4": "Gather of each block's expert, BatchMatMul",
    "MoeTokenPermute": "OneHot and CumSum for the places, Gather",
    "MoeTokenPermuteGrad": "Gather by the inverse places",
    "MoeTokenUnpermute": "Gather, BatchMatMul with the weights",
    "MoeTokenUnpermuteGrad": "Gather and products",
    "RmsNorm": "Square, ReduceMean, Add, Rsqrt, Mul",
    "RmsNormGrad": "the gradients of these",
    "Swiglu": "SiLU, Mul",
    "SwigluGrad": "SiLUGrad, Mul",
}
# Of these, what the exchange of routed rows takes instead.
ROUTED = {
    "GroupedMatmul": "GroupedMatmul of the native library",
    "GroupedMatmulV4": "GroupedMatmul of the native library",
    "MoeTokenPermute": "counting sort of the native library",
    "MoeTokenPermuteGrad": "sums of the native library",
    "MoeTokenUnpermute": "weighted sums of the native library",
    "MoeTokenUnpermuteGrad": "sums of the native library",
}
# And where `telechat_moe.operators.attention` is fused.
FLASH = {
    "FlashAttentionScore": "flash attention of the native library",
    "FlashAttentionScoreGrad": "its gradients",
}
DISPATCH = {
    "alltoall": "Ascend's dropless dispatch sends each device as many rows as the routing says (AlltoAllV). Here "
    "every expert has a buffer for all tokens of a device and the exchange has static shapes: the same rows travel "
    "between the same devices, padded, and none is dropped.",
    "alltoallv": "each device sends the rows that the routing says, as on Ascend; they arrive sorted by expert, in a buffer for "
    "the worst routing.",
    "buffers": "buffers of the same size for every expert and a static all-to-all, on Ascend too.",
    "allgather": "tokens of the expert group are gathered by every device, on Ascend too.",
}
HOPS = {
    "": "",
    "gather": "Tokens of all nodes are gathered, on Ascend too. Within a node: ",
    "once": "A token is sent once to each node that has one of its experts, on Ascend too. Within a node: ",
}


def run(
    recipe: Recipe,
    steps: int,
    *,
    compare: bool = False,
    keep: Path | None = None,
    orders: Orders | None = None,
) -> dict[str, Any]:
    """Run the first steps of a recipe, one CPU process for each device.

    Args:
        keep: Folder to make for the graphs (MindIR, as executed).
        orders: See :func:`telechat_moe.launch.job.write_job`.

    Returns:
        The report: ``steps``, ``differences``, with ``compare`` also ``single`` and ``relative_errors``.

    Raises:
        BadInputError: The recipe cannot run here, or its data are not there.
        UsageError: ``keep`` exists, or there are fewer steps in the recipe.
        RankDiedError: A process died or hangs.
    """
    if not 1 <= steps <= recipe.train_steps:
        raise UsageError(f"--steps {steps}: {recipe.source} has {recipe.train_steps} steps")
    if keep is not None and keep.exists():
        raise UsageError(f"--keep {keep}: exists; name a folder that does not")
    if (target := recipe.context.device_target) != "CPU":
        finding = f"{target}, whose graphs are run on CPU processes for CPU recipes"
        problem = recipe.problem("context.device_target", finding, "CPU, with --set")
        raise RecipeError([problem])
    preflight.require(recipe, overwrite=True, weights=hf.weights)
    output = Path(recipe.output_dir)
    folder = write_job(recipe, output / ".job", orders)
    results = run_ranks(recipe, folder, output / LOGS, steps)
    report: dict[str, Any] = {
        "recipe": str(recipe.source),
        "layout": mesh_of(recipe).describe(),
        "processes": recipe.devices,
        "finished": len(results) == steps,
        "steps": results,
        "differences": differences(recipe, folder),
    }
    if keep is not None:
        with unfinished(keep):
            keep.mkdir(parents=True)
            for path in sorted(folder.glob("*.mindir")):
                shutil.copy(path, keep)
        report["kept"] = sorted(str(path) for path in keep.glob("*.mindir"))
    if compare and report["finished"]:
        report["single"] = single_process(recipe, steps)
        pairs = zip(report["steps"], report["single"], strict=True)
        report["relative_errors"] = [relative_errors(sharded, single) for sharded, single in pairs]
    return report


def run_ranks(
    recipe: Recipe, job: Path, logs: Path, steps: int, taps: Mapping[str, Any] | None = None
) -> list[dict[str, float]]:
    """Run the first steps of the graphs of a job, one process for each rank; return their results.

    Args:
        logs: Folder for the logs of the processes; an old one is replaced.
        taps: See :func:`run_rank`.

    Raises:
        RankDiedError: A process died or hangs.
    """
    write_resolved(recipe, job)
    control = Control.fresh(job, task={"steps": steps, "taps": taps})
    shutil.rmtree(logs, ignore_errors=True)
    HostProcesses(
        job,
        LaunchNode(local=recipe.devices, total=recipe.devices, port=free_port()),
        logs,
        ["python", "-u", "-m", "telechat_moe.launch.rank", str(job.absolute())],
        describe=lambda: f"in step {len(_read_steps(control)) + 1}",
    ).run()
    return _read_steps(control)


def relative_errors(sharded: Mapping[str, float], single: Mapping[str, float]) -> dict[str, float]:
    """Return the relative error of what was measured in a step; 0 where both are 0."""
    return {
        k: abs(sharded[k] - single[k]) / abs(single[k]) if single[k] else abs(sharded[k])
        for k in MEASURED
    }


def differences(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return how the graphs of a job differ from those for Ascend."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.graph.mindir import COLLECTIVES
    from telechat_moe.graph.rewrite import FORMS

    job, mesh = Job.read(folder), mesh_of(recipe)
    ascend: Counter[str] = Counter(ascend_operators(recipe))
    cpu: Counter[str] = sum((Counter(job.operators[r]) for r in mesh.first_ranks()), Counter())
    rewritten: Counter[str] = sum((Counter(counts) for counts in job.rewritten), Counter())
    every: Counter[str] = sum((Counter(kinds) for kinds in job.operators), Counter())
    beside, swaps = recipe.telechat_moe.sharding.overlap_exchange, recipe.swap_config.swap
    forms = PLAIN | (ROUTED if dispatcher(recipe, "CPU") == "alltoallv" else {})
    if recipe.telechat_moe.operators.attention == "fused":
        forms |= FLASH

    def missing(counts: Counter[str], others: Counter[str]) -> list[tuple[str, int]]:
        names = sorted(counts.keys() - others.keys() - {*COLLECTIVES})
        return [(name, counts[name]) for name in names]

    return {
        "counted": f"operators on the first rank of each of {mesh.pp} stage(s), collectives on all ranks",
        "operators": [
            {"ascend": name, "count": count, "cpu": forms.get(name, "other primitives")}
            for name, count in missing(ascend, cpu)
        ],
        "only_cpu": dict(missing(cpu, ascend)),
        "collectives": [
            {"ascend": name, "count": rewritten[name], "cpu": FORMS[name]}
            for name in sorted(rewritten)
        ],
        "unchanged_collectives": {
            name: every[name] - rewritten[name]
            for name in COLLECTIVES
            if every[name] > rewritten[name]
        },
        "order": "all collectives of a rank run one after another, in the order of the graph"
        + (", exchanges of rows beside computation" if beside else "")
        + (", and so do all operators, beside copies of swapped activations" if swaps else ""),
        "dispatch": dispatch_text(recipe),
    }


def dispatch_text(recipe: Recipe) -> str:
    """Say how rows reach their experts here, and what of that is otherwise on Ascend."""
    if mesh_of(recipe).ep == 1:
        return "no expert group"
    kind, (hop, _) = dispatcher(recipe, "CPU"), hop_between_nodes(recipe.model_config)
    way = "buffers" if kind == dispatcher(recipe, "Ascend") == "alltoall" else kind
    dropped = " What does not fit into the experts' capacity is dropped, on Ascend too."
    return HOPS[hop] + DISPATCH[way] + dropped * drops(recipe.model_config)


def in_shards(recipe: Recipe) -> Recipe:
    """Return a recipe whose ranks run the graphs that MindSpore splits, also where processes could train whole copies."""
    return replace(recipe, parallel=replace(recipe.parallel, parallel_mode=1))


def one_process(recipe: Recipe) -> Recipe:
    """Return the same training on one device: the same global batch in as many micro-batches, plain operators."""
    size, count = recipe.micro_batch_samples, recipe.micro_batches
    runner = replace(recipe.runner_config, batch_size=size, gradient_accumulation_steps=count)
    pipeline = replace(recipe.parallel_config, pipeline_stage=1, seq_split_num=1)
    sharding = replace(recipe.telechat_moe.sharding, pipeline_schedule=None, overlap_exchange=False)
    operators = replace(recipe.telechat_moe.operators, default="plain")
    moe = replace(recipe.telechat_moe.moe, balance_group="dp", placement=None)
    settings = replace(recipe.telechat_moe, operators=operators, sharding=sharding, moe=moe)
    return replace(
        recipe,
        use_parallel=False,
        optimizer=replace(recipe.optimizer, swap=False),
        runner_config=runner,
        parallel_config=pipeline,
        telechat_moe=settings,
    )


def single_process(recipe: Recipe, steps: int) -> list[dict[str, float]]:
    """Return the results of the first steps, run in this process with plain operators."""
    from telechat_moe.model.balance import set_groups
    from telechat_moe.train.engine import OneProcess
    from telechat_moe.train.preflight import dealt_to
    from telechat_moe.train.trainer import Trainer

    trainer = Trainer(one_process(recipe), overwrite=True, weights=hf.weights)
    assert isinstance(trainer.engine, OneProcess)
    set_groups(trainer.engine.model, balance_groups(recipe, mesh_of(recipe)))
    trainer.loader.deal_to = dealt_to(recipe)  # the micro-batches of the layout
    return record_steps(trainer, steps)


class Recording(NamedTuple):
    """What the taps of a graph write down (:mod:`telechat_moe.ops.tap`).

    Attributes:
        folder: Gets ``stepN/rankN``.
        steps: Steps, from 0.
        values: See :func:`telechat_moe.ops.tap.recording`.
    """

    folder: Path
    rank: int
    steps: Collection[int]
    values: str

    def of(self, step: int) -> AbstractContextManager[None]:
        """Return the context in which the taps of a step are recorded, an empty one for steps that are not asked for."""
        if step not in self.steps:
            return nullcontext()
        return recording(self.folder / f"step{step}" / f"rank{self.rank}", self.values)


def run_rank(job: Path, rank: int, task: Mapping[str, Any]) -> None:
    """Run the steps of one rank; rank 0 writes their results.

    Args:
        task: ``steps``, how many; ``taps``: ``folder``, the numbers of the ``steps`` and ``values`` of
            :class:`Recording`, and the ``ranks`` that record; None: none.
    """
    from telechat_moe.train.trainer import Trainer

    recipe, control = in_shards(load(job / RESOLVED)), Control(job / CONTROL)
    ranks = RankCoordinator(control, rank, recipe.devices)
    trainer = Trainer(recipe, overwrite=True, plain=True, ranks=ranks, job=job, weights=hf.weights)
    watch, taps = None, task["taps"]
    if taps is not None and rank in taps["ranks"]:
        watch = Recording(Path(taps["folder"]), rank, taps["steps"], taps["values"])
    record_steps(trainer, task["steps"], watch, control.folder / STEPS_FILE if rank == 0 else None)


def record_steps(
    trainer: "Trainer", steps: int, watch: Recording | None = None, path: Path | None = None
) -> list[dict[str, float]]:
    """Run a trainer's next steps; nothing is saved but a line a step in ``path``."""
    results: list[dict[str, float]] = []
    loop = trainer.loop(SilentMonitor())
    with trainer.loader:
        while len(results) < steps and not trainer.ranks.interrupted:
            with watch.of(len(results)) if watch is not None else nullcontext():
                result = loop.compute_step()
            values = (result.loss, *result.losses, result.norm)
            results.append({"step": trainer.state.step, **dict(zip(MEASURED, values, strict=True))})
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    return results


def _read_steps(control: Control) -> list[dict[str, float]]:
    text = control.read(STEPS_FILE) or ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

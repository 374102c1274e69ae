"""Compare `telechat-moe dryrun --mindformers` with a bare compile of the same rank: processor time, memory.

    python -m benchmarks.dryrun_mindformers.bare [--layers 8] [--experts-over 4]

Rank 0 of MindFormers' TeleChat3-MoE recipe on 256 devices (dp 4, tp 8, pp 8). The bare compile builds network, optimizer
and step by MindFormers' functions, as the recipe asks (monitors of norms, learning rates by group), and calls
MindSpore's compiler, in one process: no trainer, export, report or fork. Then, not measured, it is exported to see that
both compiled the same graph. Memory is the largest sum over a process tree, shared pages counted twice; processor
time stands still while other programs run, so that both may be measured on a busy machine, one after the other.

Needs the extras `train` and `mindformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.report import report
from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.interop.mindformers_dryrun import folder, sections_of, subject_of

RECIPE = "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
DP, TP, PP, MICRO, LENGTH = 4, 8, 8, 8, 4096


def offset(layers: int) -> list[int]:
    """Return which stages have a layer more."""
    return [int(0 < stage <= layers % PP) for stage in range(PP)]


def overrides(layers: int, experts_over: int) -> list[str]:
    """Return what is written over the recipe."""
    return [
        f"model.model_config.num_hidden_layers={layers}",
        f"model.model_config.offset={offset(layers)}",
        f"parallel_config.expert_parallel={experts_over}",
    ]


def _step(config: Any) -> Any:
    """Return the cell of a training step, made of a configuration by MindFormers' own functions."""
    from mindformers.core.lr import build_lr
    from mindformers.core.optim.build_optim import build_optim
    from mindformers.models import build_network
    from mindformers.trainer.optimizer_grouped_parameters import get_optimizer_grouped_parameters
    from mindformers.wrapper.wrapper import (
        DataOrderWrapperCell,
        MFPipelineWithLossScaleCell,
        PipelineCellWithMultiOutputs,
    )
    from mindspore.nn.wrap.cell_wrapper import _VirtualDatasetCell

    # As not written in the recipe: None, which compiles to another graph than the default of the classes, False.
    per_token = {"calculate_per_token_loss": config.calculate_per_token_loss}
    given = {"parallel_config": config.parallel_config, "moe_config": config.moe_config}
    network = build_network(config.model, default_args={**given, **per_token, "batch_size": 1})
    ordered = DataOrderWrapperCell(config.train_dataset.construct_args_key, network)
    split = _VirtualDatasetCell(PipelineCellWithMultiOutputs(ordered, micro_size=MICRO))
    rate = build_lr(config.grouped_lr_schedule.default)
    grouped = [
        {"params": one.pop("params"), "lr_scheduler": build_lr(one), "lr_config": one}
        for one in config.grouped_lr_schedule.grouped
    ]
    groups = get_optimizer_grouped_parameters(
        model=split,
        weight_decay=config.optimizer.weight_decay,
        dynamic_lr_schedule=rate,
        grouped_lr_schedule=grouped,
        model_params=set(),
        optimizer_type=config.optimizer.type,
    )
    optimizer = build_optim(
        config.optimizer, default_args={"params": groups, "learning_rate": rate}
    )
    step = MFPipelineWithLossScaleCell(
        split,
        optimizer,
        use_clip_grad=True,
        scale_sense=1.0,
        micro_batch_num=MICRO,
        parallel_config=config.parallel_config,
        print_separate_loss=True,
        use_skip_data_by_global_norm=config.use_skip_data_by_global_norm,
        **per_token,
        lr_scheduler=rate,
        grouped_lr_scheduler=grouped,
    )
    step.ascend_910b_target = True  # how overflow is asked; no chip tells
    step.set_train()
    return step


def bare(layers: int, experts_over: int, report_to: str | None) -> None:
    """Build and compile rank 0 in this process; with a file, export and report on its graph, too."""
    os.environ.update(GLOG_v="3", MS_DEV_PRECOMPILE_ONLY="1")
    path, recipe = library(), folder() / "configs" / RECIPE
    os.chdir(tempfile.mkdtemp())
    import mindspore as ms
    from mindformers import MindFormerConfig
    from mindformers.core.context.build_context import build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.trainer import Trainer
    from mindspore.common.initializer import initializer
    from mindspore.graph.api import _cell_graph_executor as executor

    device = SimulatedDevice(0, DP * TP * PP, path)
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    config = MindFormerConfig(str(recipe))
    config.context.update(device_target="CPU", save_graphs=False)
    config.context.pop("ascend_config")
    config.parallel_config.expert_parallel = experts_over
    config.model.model_config.update(num_hidden_layers=layers, offset=offset(layers))
    build_context(config)
    ms.set_auto_parallel_context(global_rank=0, device_num=device.size)
    Trainer._reassign_monitor_config(SimpleNamespace(config=config))  # norms that the step dumps
    build_parallel_config(config)
    step = _step(config)
    row = initializer("zeros", (MICRO, LENGTH), ms.int32)  # not in memory
    mask = initializer("zeros", (MICRO, 1, LENGTH, LENGTH), ms.int32)
    device.to_ascend()
    phase = "export.mindir" if report_to else "train"
    phase, _ = executor.compile(step, row, row, row, row, mask, phase=phase)
    if report_to:
        graph = RankGraph(
            rank=0,
            devices=device.size,
            mindir=executor._get_func_graph_proto(step, phase, "mind_ir"),
            groups=device.groups(),
            layouts={},
            build_seconds=0,
            compile_seconds=0,
            peak_memory=0,
        )
        subject = subject_of(*sections_of(RECIPE, overrides(layers, experts_over)))
        Path(report_to).write_text(json.dumps(report(subject, [graph], "Ascend")), encoding="utf-8")


def measure(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its processor seconds, seconds and the most GiB of its process tree."""
    before, began, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        top = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                tree = [top, *top.children(recursive=True)]
                most = max(most, sum(process.memory_info().rss for process in tree))
            except psutil.NoSuchProcess:
                pass  # ended between the two lines
            time.sleep(0.2)
        if child.returncode:
            sys.exit(child.stderr.read().decode()[-2000:] if child.stderr else "failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - began, most / 2**30


def same_graph(ours: Path, theirs: Path) -> bool:
    """Return whether two reports say the same of a rank: operators, collectives, bytes, order."""
    stages = [json.loads(file.read_text(encoding="utf-8"))["stages"][0] for file in (ours, theirs)]
    for stage in stages:
        for measured in ("build_seconds", "compile_seconds", "peak_memory"):
            del stage[measured]
    return stages[0] == stages[1]


def main() -> None:
    """Parse the arguments and run both, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts-over", type=int, default=4, metavar="DEVICES")
    parser.add_argument("--bare", action="store_true", help="only compile, in this process")
    parser.add_argument("--report", metavar="FILE", help="with --bare: report on its graph")
    args = parser.parse_args()
    if args.bare:
        bare(args.layers, args.experts_over, args.report)
        return
    results = Path(tempfile.mkdtemp())
    ours, theirs = results / "dryrun.json", results / "bare.json"
    sizes = [f"--layers={args.layers}", f"--experts-over={args.experts_over}"]
    sets = [f"--set={text}" for text in overrides(args.layers, args.experts_over)]
    alone = [sys.executable, "-m", "benchmarks.dryrun_mindformers.bare", "--bare", *sizes]
    verb = ["dryrun", RECIPE, "--mindformers", "--json", str(ours), *sets]
    commands = {"bare": alone, "dryrun": [sys.executable, "-m", "telechat_moe.cli", *verb]}
    found = {name: measure(command) for name, command in commands.items()}
    for name, (used, seconds, most) in found.items():
        print(f"{name:8} {used:7.1f} s processor, {seconds:7.1f} s, {most:5.2f} GiB")
    ratios = [b / a for a, b in zip(found["bare"], found["dryrun"], strict=True)]
    print(f"ratio    {ratios[0]:7.2f}              {ratios[1]:7.2f}    {ratios[2]:5.2f}")
    measure([*alone, f"--report={theirs}"])
    if not same_graph(ours, theirs):
        sys.exit(f"the two compiled different graphs: see {ours} and {theirs}")
    print("both compiled the same graph")


if __name__ == "__main__":
    main()

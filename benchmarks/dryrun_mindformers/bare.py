"""Compare `telechat-moe dryrun --mindformers` with a bare compile of the same rank: processor time, memory.

    python -m benchmarks.dryrun_mindformers.bare [--layers 8] [--experts-over 4]

Rank 0 of MindFormers' TeleChat3-MoE recipe on 256 devices (dp 4, tp 8, pp 8). The bare compile builds network, optimizer
and step by MindFormers' functions and calls MindSpore's compiler, in one process: no trainer, export, report or fork.
Memory is the largest sum over a process tree; processor time stands still while other programs run, so that both may
be measured on a busy machine, one after the other.

Needs the extras `train` and `mindformers`.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

import psutil

RECIPE = "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
DP, TP, PP, MICRO, LENGTH = 4, 8, 8, 8, 4096


def offset(layers: int) -> list[int]:
    """Return which stages have a layer more."""
    return [int(0 < stage <= layers % PP) for stage in range(PP)]


def bare(layers: int, experts_over: int) -> None:
    """Build and compile rank 0 in this process."""
    os.environ.update(GLOG_v="3", MS_DEV_PRECOMPILE_ONLY="1")
    from telechat_moe.graph.simulated_device import SimulatedDevice, library
    from telechat_moe.interop.mindformers_dryrun import folder

    path, recipe = library(), folder() / "configs" / RECIPE
    os.chdir(tempfile.mkdtemp())
    import mindspore as ms
    import numpy as np
    from mindformers import MindFormerConfig
    from mindformers.core.context.build_context import build_context
    from mindformers.core.lr import build_lr
    from mindformers.core.optim.build_optim import build_optim
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network
    from mindformers.wrapper.wrapper import (
        DataOrderWrapperCell,
        MFPipelineWithLossScaleCell,
        PipelineCellWithMultiOutputs,
    )
    from mindspore.graph.api import _cell_graph_executor
    from mindspore.nn.wrap.cell_wrapper import _VirtualDatasetCell

    device = SimulatedDevice(0, DP * TP * PP, path)
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    config = MindFormerConfig(str(recipe))
    config.context.update(device_target="CPU", save_graphs=False)
    config.context.pop("ascend_config")
    config.parallel_config.expert_parallel = experts_over
    config.model.model_config.update(num_hidden_layers=layers, offset=offset(layers))
    build_context(config)
    ms.set_auto_parallel_context(global_rank=0, device_num=device.size)
    build_parallel_config(config)
    given = {"parallel_config": config.parallel_config, "moe_config": config.moe_config}
    network = build_network(config.model, default_args={**given, "batch_size": 1})
    ordered = DataOrderWrapperCell(config.train_dataset.construct_args_key, network)
    split = _VirtualDatasetCell(PipelineCellWithMultiOutputs(ordered, micro_size=MICRO))
    groups = {"params": [{"params": network.trainable_params()}]}
    rate = build_lr(config.grouped_lr_schedule.default)
    optimizer = build_optim(config.optimizer, default_args={**groups, "learning_rate": rate})
    step = MFPipelineWithLossScaleCell(
        split,
        optimizer,
        use_clip_grad=True,
        scale_sense=1.0,
        micro_batch_num=MICRO,
        parallel_config=config.parallel_config,
    )
    step.set_train()
    row = ms.Tensor(np.zeros((MICRO, LENGTH), np.int32))
    mask = ms.Tensor(np.zeros((MICRO, 1, LENGTH, LENGTH), np.uint8))
    device.to_ascend()
    _cell_graph_executor.compile(step, row, row, row, row, mask, phase="train")


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


def main() -> None:
    """Parse the arguments and run both, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts-over", type=int, default=4, metavar="DEVICES")
    parser.add_argument("--bare", action="store_true", help="only compile, in this process")
    args = parser.parse_args()
    if args.bare:
        bare(args.layers, args.experts_over)
        return
    sizes = [f"--layers={args.layers}", f"--experts-over={args.experts_over}"]
    sets = (
        f"model.model_config.num_hidden_layers={args.layers}",
        f"model.model_config.offset={offset(args.layers)}",
        f"parallel_config.expert_parallel={args.experts_over}",
    )
    verb = ["dryrun", RECIPE, "--mindformers", "--json", "-", *(f"--set={text}" for text in sets)]
    commands = {
        "bare": [sys.executable, "-m", "benchmarks.dryrun_mindformers.bare", "--bare", *sizes],
        "dryrun": [sys.executable, "-m", "telechat_moe.cli", *verb],
    }
    found = {name: measure(command) for name, command in commands.items()}
    for name, (used, seconds, most) in found.items():
        print(f"{name:8} {used:7.1f} s processor, {seconds:7.1f} s, {most:5.2f} GiB")
    ratios = [b / a for a, b in zip(found["bare"], found["dryrun"], strict=True)]
    print(f"ratio    {ratios[0]:7.2f}              {ratios[1]:7.2f}    {ratios[2]:5.2f}")


if __name__ == "__main__":
    main()

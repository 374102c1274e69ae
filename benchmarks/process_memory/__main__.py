"""Measure what a rank of a sharded run needs: ``python -m benchmarks.process_memory start|run``."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.checkpoint.manifest import BrokenCheckpointError
from telechat_moe.checkpoint.stored import open_shards
from telechat_moe.files import UNSEALED, seal
from telechat_moe.graph.mindir import MindIR
from telechat_moe.graph.nodes import size_of
from telechat_moe.graph.swapping import peak_of
from telechat_moe.recipe import Recipe, load
from telechat_moe.sharding.shards import WeightShards, weight_of
from telechat_moe.train.run_graphs import shard_writers, without_memory
from telechat_moe.units import size_text

TINY = "telechat3_moe/pretrain_tiny.yaml"
LAYOUTS = {
    "ep4": {"parallel_config.data_parallel": 4, "parallel_config.expert_parallel": 4},
    "ep2": {"parallel_config.data_parallel": 2, "parallel_config.expert_parallel": 2},
    "pp2_ep2": {
        "parallel_config.data_parallel": 2,
        "parallel_config.expert_parallel": 2,
        "parallel_config.pipeline_stage": 2,
        "parallel_config.micro_batch_num": 2,
        "callbacks.1.micro_batch_num": 2,
    },
}


def peak(pid: int | str = "self") -> int:
    """Return the peak resident memory of a process, bytes; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM")), 0)


def start(recipe: Recipe, rank: int) -> None:
    """Draw the shards of a rank, as its engine does, and print seconds and memory above the shards."""
    from mindspore.nn.utils import no_init_parameters

    from telechat_moe.model import CausalLM
    from telechat_moe.model.init import InitialWeight
    from telechat_moe.train.engine import backends

    before, began = peak(), time.perf_counter()
    with no_init_parameters(), backends(recipe):
        model = CausalLM(recipe.model_config)
    weights = {p.name: InitialWeight.of(p) for p in model.get_parameters()}
    cuts = WeightShards.of(recipe)
    shards = {}
    for name in cuts.weights:
        if (region := cuts.shard(rank, name)) is not None:
            shards[name] = weights[name].draw(recipe.seed, region)
    seconds, size = time.perf_counter() - began, sum(x.nbytes for x in shards.values())
    above = peak() - before - size
    print(
        f"rank {rank} of {cuts.mesh.devices} ({cuts.mesh.describe()}): {size_text(size)} of weights in {len(shards)} shards, "
        f"{seconds:.1f} s, {size_text(above)} above them"
    )


def save_empty(recipe: Recipe, root: Path) -> Path:
    """Write a checkpoint of a recipe's layout, as its ranks do together, of zeros that take no room on the disk."""
    owner, _ = shard_writers(recipe)
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    shapes = {w: list(about.shape) for w, about in WeightShards.of(recipe).weights.items()}
    path = root / f"step-{1:08d}"
    path.mkdir(parents=True)
    by_rank = sorted(owner.items(), key=lambda item: item[1])
    for rank, pieces in groupby(by_rank, key=lambda item: item[1]):
        regions = dict(piece for piece, _ in pieces)
        arrays = without_memory(regions.items())
        for group, file in checkpoint.plan(arrays, suffix=f"_rank{rank:05d}"):
            with (path / file.name).open("wb") as written:
                written.write(file.header)
                written.truncate(file.nbytes)
            files[file.name] = {"bytes": file.nbytes, "sha256": UNSEALED}
            for output in file.outputs:
                shape = shapes[weight_of(output.name)]
                about = {"dtype": output.dtype, "shape": shape, "pieces": []}
                entry = tensors[group].setdefault(output.name, about)
                region = [list(ends) for ends in regions[output.name]]
                entry["pieces"].append({"file": file.name, "region": region})
    about = {"version": manifest.VERSION_SHARDED, "ranks": recipe.devices, "layout": {}}
    content = manifest.describe(1, {}, files, tensors, about)
    (path / manifest.FILE).write_bytes(seal(content))
    return path


def load_shards(recipe: Recipe, rank: int, path: Path) -> None:
    """Read the shards of a rank from a checkpoint, as its engine does, and print seconds and memory above the shards."""
    cuts = WeightShards.of(recipe)
    before, began, worked = peak(), time.perf_counter(), time.process_time()
    with suppress(
        BrokenCheckpointError
    ):  # nobody made checksums of the zeros; only the time counts
        checkpoint.verify(path, (rank, cuts.mesh.devices))
    verified = time.perf_counter() - began
    stored = open_shards(path, verify=False)
    opened = time.perf_counter() - began - verified
    shards = {}
    for group in stored.tensors.values():
        for name, tensor in group.items():
            if (region := cuts.shard(rank, weight_of(name))) is not None:
                shards[name] = tensor.read_region(region)
    seconds, size = time.perf_counter() - began, sum(x.nbytes for x in shards.values())
    above = peak() - before - size
    print(
        f"rank {rank} of {cuts.mesh.devices} ({cuts.mesh.describe()}): {size_text(size)} in {len(shards)} shards from "
        f"{len(list(path.iterdir())):,} files, {seconds:.1f} s ({verified:.1f} s for checksums, "
        f"{opened:.1f} s for descriptions; "
        f"{time.process_time() - worked:.1f} s of processor time), "
        f"{size_text(above)} above them"
    )


class RankTensors(NamedTuple):
    """Bytes that the graph of a rank needs, without the memory that lies idle between tensors.

    Attributes:
        parameters: Weights, moments, and gradients that micro-batches sum up.
        results: The most that results of operators, gradients and activations, take at once.
    """

    parameters: int
    results: int


def needed(job: Path, rank: int) -> RankTensors:
    """Return what the step of a rank of a job needs."""
    model = MindIR((job / f"rank_{rank}.mindir").read_bytes())
    shapes = ((tuple(p.dims), p.data_type) for p in model.proto.graph.parameter)
    return RankTensors(sum(size_of(shape) or 0 for shape in shapes), peak_of(model))


def run(layout: str, width: int, output: Path, data: Path) -> list[int]:
    """Train with evaluations and a checkpoint; return the peak memory of each rank, bytes."""
    overrides = settings(layout, width) | {
        "output_dir": str(output),
        "train_dataset.data_loader.config.data_path": f"['1', '{data}/train']",
        "telechat_moe.evaluation.data_path": f"['1', '{data}/valid']",
    }
    sets = [x for key, value in overrides.items() for x in ("--set", f"{key}={value}")]
    program = ["-m", "telechat_moe.cli", "train", TINY, "--plain", "--overwrite", *sets]
    control, peaks = output / ".job/control", [0] * load(TINY, sets[1::2]).devices
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.05)
            for rank in range(len(peaks)):
                file = control / f"rank_{rank}.pid"
                if file.exists() and (pid := file.read_text().strip()):
                    peaks[rank] = max(peaks[rank], peak(pid))
    if process.returncode:
        raise SystemExit(f"the run in {output} failed ({process.returncode})")
    return peaks


def settings(layout: str, width: int) -> dict[str, object]:
    """Return the overrides of a layout; ``width``: of the experts, most of the parameters."""
    return {
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "runner_config.batch_size": 1,
        "model.model_config.batch_size": 1,
        "model.model_config.num_hidden_layers": 4,
        "model.model_config.seq_length": 64,
        "train_dataset.data_loader.config.seq_length": 64,
        "model.model_config.moe_intermediate_size": width,
        "model.model_config.num_nextn_predict_layers": 0,
        "train_dataset.data_loader.sizes": "[12,0,0]",
        "telechat_moe.evaluation.interval": 2,
        "telechat_moe.evaluation.batches": 1,
        "telechat_moe.sample": "null",
        "lr_schedule.warmup_steps": 1,
        **LAYOUTS[layout],
    }


def compare(layout: str, width: int, output: Path, data: Path) -> None:
    """Print the peak of each rank above that of a tiny recipe, over what its tensors need."""
    peaks = {w: run(layout, w, output / f"{layout}_{w}", data) for w in (16, width)}
    overrides = [f"{key}={value}" for key, value in settings(layout, width).items()]
    weights = WeightShards.of(load(TINY, overrides)).weights.values()
    summary = json.loads((output / f"{layout}_{width}/summary.json").read_text())
    print(
        f"{layout}: {sum(math.prod(x.shape) for x in weights) / 1e6:.0f}M parameters, "
        f"the save stopped training for {summary['save_stall_ms']:.0f} ms"
    )
    for rank in range(len(peaks[width])):
        above = peaks[width][rank] - peaks[16][rank]
        tiny, large = (needed(output / f"{layout}_{w}/.job", rank) for w in peaks)
        parameters, results = large.parameters - tiny.parameters, large.results - tiny.results
        print(
            f"rank {rank}: {size_text(peaks[width][rank])} at its peak, {size_text(above)} above the tiny recipe's, "
            f"{above / (parameters + results):.2f} times what it needs: {size_text(parameters)} for weights, moments and "
            f"gradient sums, {size_text(results)} for gradients and activations"
        )


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.process_memory")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start")
    starting.add_argument("--recipe", default="telechat3_moe/pretrain_105b_a4b_4k.yaml")
    starting.add_argument("--rank", type=int, default=32)
    starting.add_argument(
        "--checkpoint",
        action="append",
        metavar="KEY=VALUE",
        help="load a checkpoint of the recipe instead, saved with these settings",
    )
    running = commands.add_parser("run")
    running.add_argument("--layout", choices=LAYOUTS, default="ep4")
    running.add_argument("--width", type=int, default=2048)
    running.add_argument("--output", type=Path, default=Path("output/process_memory"))
    running.add_argument("--data", type=Path, default=Path("output/data"))
    chosen = parser.parse_args()
    if chosen.command == "start":
        recipe = load(chosen.recipe)
        if chosen.checkpoint is None:
            start(recipe, chosen.rank)
        else:
            with tempfile.TemporaryDirectory() as root:
                path = save_empty(load(chosen.recipe, chosen.checkpoint), Path(root))
                load_shards(recipe, chosen.rank, path)
    else:
        compare(chosen.layout, chosen.width, chosen.output, chosen.data)


if __name__ == "__main__":
    main()

"""What recording costs: a training step with fingerprints of every operator, beside the same step without taps.

    python -m benchmarks.align_capture [--json FILE] [--hidden 1024] [--pairs 7]

Both run the same graph from the same file (MindIR), one with taps and one without; steps are interleaved, so that other work
on the machine hits both; CPU time is that of all threads. ``off`` is the tapped graph while nothing is recorded. Bar:
fingerprints cost less than 10 %.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import mini_recipe
import numpy as np

from telechat_moe.graph.tap import Tapped
from telechat_moe.ops import native
from telechat_moe.ops.tap import recording
from telechat_moe.recipe import load
from telechat_moe.train.trainer import Trainer

BAR = 1.10
CHOSEN = ["fingerprint"]


def settings(hidden: int, length: int, folder: Path) -> list[str]:
    """Return the overrides of a recipe with two layers of a width."""
    data = mini_recipe.write_data(folder)
    model = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": hidden // 2,
        "moe_shared_expert_intermediate_size": hidden // 2,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": 4096,
    }
    given = mini_recipe.arguments(data, folder / "run")[3:]
    values = [x for x in given if x != "--set"]
    values += [f"model.model_config.{name}={value}" for name, value in model.items()]
    values.append(f"train_dataset.data_loader.config.seq_length={length}")
    return values


class Plain(Tapped):
    """The graph from the same file without taps."""

    def __init__(self, net: object) -> None:
        super().__init__(net, lambda node: False)


def main() -> int:
    """Measure, print, and say whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="statistics and whole tensors, too")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.all:
        CHOSEN.extend(["statistics", "tensor"])
    with tempfile.TemporaryDirectory() as name:
        report = measure(args.hidden, args.length, args.pairs, Path(name))
    for key in ("plain", "off", *CHOSEN):
        row = report["seconds"][key]
        print(
            f"{key:12} {row['median']:8.3f} s {row['over_plain']:6.3f} x plain"
            f"   CPU {row['cpu']:8.3f} s {row['cpu_over_plain']:6.3f} x plain"
        )
    print(
        f"{report['taps']} taps, {report['bytes'] / 1e6:.0f} MB of tensors a step, fingerprints {report['prints'] / 1e6:.1f} MB"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["seconds"]["fingerprint"]["over_plain"] < BAR else 1


def measure(hidden: int, length: int, pairs: int, folder: Path) -> dict[str, object]:
    """Return medians and their ratios to the plain step."""
    recipe = load("telechat3_moe/pretrain_tiny.yaml", settings(hidden, length, folder))
    trainer = Trainer(recipe, overwrite=True, plain=True)
    with trainer.loader:
        batch = trainer.engine.read(trainer.loader)[0]
    inputs = (*trainer.engine.optimizer.scalars(1, 0.0), *batch)
    plain, taps = (
        Plain(trainer.engine.train_step),
        Tapped(trainer.engine.train_step, states=False),
    )
    for step in (plain, taps):
        step.compile(*inputs)
        step(*inputs)
    kinds = {
        "plain": lambda n: plain.cell(*inputs),
        "off": lambda n: taps.cell(*inputs),
        **{kind: (lambda n, kind=kind: recorded(taps, inputs, folder / f"{kind}_{n}", kind))
           for kind in CHOSEN},
    }  # fmt: skip
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for n in range(pairs + 1):
        for kind, run in kinds.items():
            began = time.perf_counter(), time.process_time()
            _synced(run(n))
            if n:  # the first round warms up
                times[kind].append(time.perf_counter() - began[0])
                cpu[kind].append(time.process_time() - began[1])
    return {
        "hidden": hidden, "length": length, "rows": recipe.runner_config.batch_size, "pairs": pairs,
        "taps": taps.plan.taps,
        "bytes": sum(tensor_bytes(line) for line in (folder / "fingerprint_1" / "index.txt").read_text().splitlines()),
        "prints": (folder / "fingerprint_1" / "values.bin").stat().st_size,
        "seconds": {k: _row(k, times, cpu) for k in kinds},
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
                    "isa": native.isa(), "threads": native.threads()},
    }  # fmt: skip


def _row(
    kind: str, times: dict[str, list[float]], cpu: dict[str, list[float]]
) -> dict[str, object]:
    """Return medians of a kind, and of its ratios to the plain step beside it."""
    ratio, cpu_ratio = (
        float(statistics.median(np.divide(x[kind], x["plain"]))) for x in (times, cpu)
    )
    return {
        "median": statistics.median(times[kind]), "over_plain": ratio, "all": times[kind],
        "cpu": statistics.median(cpu[kind]), "cpu_over_plain": cpu_ratio, "cpu_all": cpu[kind],
    }  # fmt: skip


def tensor_bytes(line: str) -> int:
    """Return the bytes of the tensor that a line of the index describes."""
    _, _, _, kind, *shape = line.split()
    return int(np.prod([int(n) for n in shape])) * (1 if kind in ("bool", "uint8") else 4)


def recorded(step: Tapped, inputs: tuple[object, ...], folder: Path, kind: str) -> object:
    """Run a step and record it."""
    with recording(folder, kind):
        return _synced(step.cell(*inputs))


def _synced(result: object) -> object:
    for x in result if isinstance(result, tuple) else [result]:
        x.asnumpy()
    return result


if __name__ == "__main__":
    sys.exit(main())

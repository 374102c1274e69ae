"""Time saving and loading of checkpoints beside torch and plain safetensors.

    python -m benchmarks.checkpoint [--sizes 230 1000] [--rounds 5] [--folder DIR] [--json FILE]

The state is three groups of fp32 arrays of equal size (weights and the two moments of AdamW). What
is compared does less than we do, and the table says so:

- ours: checksums of all bytes, fsync of all files and folders, atomic rename; loading verifies
- torch: ``torch.save`` / ``torch.load`` (pickle in a zip with CRC-32, not verified on load), no fsync
- torch+fsync: the same, then fsync of the file
- safetensors: ``safetensors.numpy.save_file`` / ``load_file``, no checksum, no fsync
- safetensors+fsync: the same, then fsync of the file

Each method has a process of its own, as a resumed run has (memory that another one has just freed
would be cheaper to get). Methods are interleaved and every round begins with another one, so that
slow moments of the machine hit all. Files are read from the page cache; a load is over when every
page of every array has been touched (safetensors maps lazily). Every load is compared with what was
saved.

Keys of the JSON: ``sizes_mib``, ``rounds``, ``results``: list of ``{size_mib, method, action (save or
load), seconds: [...], min_s, median_s, bytes_per_s (at the median), ratio_to_ours (of medians),
min_ratio_to_ours}``.

    python -m benchmarks.checkpoint --stall [RECIPE ...] [--rounds 15] [--json FILE]

How long a checkpoint stalls training (data of the recipe needed: `telechat-moe data build`): the recipe's
own trainer, a dozen steps before each save, saves in the background and at once in turn. Keys of the JSON:
``results``: list of ``{recipe, state_mib, steps, step_ms (median without a save), background: {stall_ms: [...],
median_stall_ms, share_of_step, step_ms_in_flight (median), steps_in_flight (mean number), extra_ms (stall and what
the steps in flight took longer, median)}, at_once: {stall_ms: [...], median_stall_ms, share_of_step}}``.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

from telechat_moe.checkpoint import checkpoint

METHODS = ("ours", "safetensors", "safetensors+fsync", "torch", "torch+fsync")
GROUPS = ("model", "first_moment", "second_moment")
Groups = dict[str, dict[str, np.ndarray]]


def make_state(size_mib: int) -> Groups:
    """Random arrays with the shapes of a small model: few large ones, many small ones."""
    rng = np.random.default_rng(0)
    per_group = size_mib * 2**20 // 4 // len(GROUPS)
    state: Groups = {}
    for group in GROUPS:
        left, arrays = per_group, {}
        while left > 0:
            shape = [(16, 256, 512), (4096, 256), (256, 256), (256,)][len(arrays) % 4]
            array = rng.random(shape, np.float32)
            arrays[f"layers.{len(arrays)}.weight"] = array
            left -= array.size
        state[group] = arrays
    return state


def flatten(state: Groups) -> dict[str, np.ndarray]:
    """Put the group into the name, as the other formats need it."""
    return {f"{group}.{name}": a for group, names in state.items() for name, a in names.items()}


def fsync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def make_method(
    method: str, state: Groups, folder: Path
) -> tuple[Callable[[], object], Callable[[], Mapping[str, Any]]]:
    """Return (save, load) of a method; load returns flat numpy arrays or torch tensors."""
    base, _, durable = method.partition("+")
    path = folder / base

    if base == "ours":

        def load_ours() -> dict[str, np.ndarray]:
            found = checkpoint.latest(path)
            assert found is not None
            return flatten(found.tensors)

        return lambda: checkpoint.save(path, 1, state, {}, keep_last=1), load_ours

    if base == "torch":
        import torch

        torch_state = {k: torch.from_numpy(v) for k, v in flatten(state).items()}
        save = partial(torch.save, torch_state, path)
        load = partial(torch.load, path, weights_only=True)
    else:
        save = partial(save_file, flatten(state), path)
        load = partial(load_file, path)

    def save_durably() -> None:
        save()
        fsync(path)

    return (save_durably if durable else save), load


def work(method: str, size_mib: int, folder: Path, pipe: Connection) -> None:
    """Serve one method in a process of its own: time a save and a load for each message."""
    state = make_state(size_mib)
    expected = flatten(state)
    save, load = make_method(method, state, folder)
    pipe.send(sum(a.nbytes for a in expected.values()))
    while pipe.recv():
        os.sync()
        start = time.perf_counter()
        save()
        saved = time.perf_counter()
        os.sync()
        resumed = time.perf_counter()
        loaded = {key: np.asarray(value) for key, value in load().items()}
        for array in loaded.values():
            array.reshape(-1)[::1024].sum()
        end = time.perf_counter()
        same = all(np.array_equal(loaded[key], array) for key, array in expected.items())
        del loaded
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not same:
            raise SystemExit(f"{method}: what was loaded differs from what was saved")
        pipe.send((saved - start, end - resumed))


def measure(size_mib: int, rounds: int, parent: Path) -> list[dict[str, Any]]:
    """Time all methods on a state of one size."""
    spawn = multiprocessing.get_context("spawn")
    names = [m for m in METHODS if find_spec(m.partition("+")[0]) or m == "ours"]
    times: dict[tuple[str, str], list[float]] = {}
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        pipes: dict[str, Connection] = {}
        for name in names:
            (Path(folder) / name).mkdir()
            pipes[name], theirs = spawn.Pipe()
            args = (name, size_mib, Path(folder) / name, theirs)
            spawn.Process(target=work, args=args, daemon=True).start()
            theirs.close()
            nbytes = pipes[name].recv()
        for round_ in range(rounds + 1):  # the first warms up
            shift = round_ % len(names)
            for name in names[shift:] + names[:shift]:
                pipes[name].send(True)
                save_s, load_s = pipes[name].recv()
                if round_:
                    times.setdefault((name, "save"), []).append(save_s)
                    times.setdefault((name, "load"), []).append(load_s)
        for pipe in pipes.values():
            pipe.send(False)
    return [
        {
            "size_mib": size_mib,
            "method": name,
            "action": action,
            "seconds": seconds,
            "min_s": min(seconds),
            "median_s": statistics.median(seconds),
            "bytes_per_s": nbytes / statistics.median(seconds),
            "ratio_to_ours": statistics.median(seconds) / statistics.median(times["ours", action]),
            "min_ratio_to_ours": min(seconds) / min(times["ours", action]),
        }
        for (name, action), seconds in sorted(times.items(), key=lambda t: t[0][1] != "save")
    ]


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("state", "", "method", "min", "median", "rate", "median / ours", "min / ours")
    for r in results:
        table.add_row(
            f"{r['size_mib']} MiB",
            r["action"],
            r["method"],
            f"{r['min_s']:.3f} s",
            f"{r['median_s']:.3f} s",
            f"{r['bytes_per_s'] / 1e9:.2f} GB/s",
            f"{r['ratio_to_ours']:.2f}x",
            f"{r['min_ratio_to_ours']:.2f}x",
        )
    Console().print(table)
    if not find_spec("torch"):
        print("torch is not installed: its rows are missing", file=sys.stderr)


STEPS_BETWEEN = 12


def measure_stall(recipe_name: str, rounds: int, parent: Path) -> dict[str, Any]:
    """Time the steps and saves of a recipe's trainer."""
    from telechat_moe.checkpoint.background import Saver
    from telechat_moe.recipe import load
    from telechat_moe.train.monitor import SilentMonitor
    from telechat_moe.train.trainer import Trainer

    with tempfile.TemporaryDirectory(dir=parent) as output:
        trainer = Trainer(load(recipe_name, [f"output_dir={output}"]), plain=True)
        loop = trainer.loop(SilentMonitor())
        savers = {
            name: Saver(trainer.engine.parameters(), **options) for name, options in MODES.items()
        }
        free: list[float] = []  # steps while nothing is written
        stalls: dict[str, list[float]] = {name: [] for name in MODES}
        flights: list[list[float]] = []  # steps while a save is in flight, for each save

        def step() -> float:
            began = time.perf_counter()
            loop.compute_step()
            return (time.perf_counter() - began) * 1e3

        with trainer.loader:
            for round_ in range(rounds + 1):  # the first warms up
                for name in MODES if round_ % 2 else reversed(MODES):
                    steps = [step() for _ in range(STEPS_BETWEEN)]
                    began = time.perf_counter()
                    savers[name].save("the save", trainer.state.writer())
                    stall = (time.perf_counter() - began) * 1e3
                    flight = []
                    while savers[name].busy:
                        flight.append(step())
                    savers[name].wait()
                    if round_:
                        free += steps
                        stalls[name].append(stall)
                        flights += [flight] if name == "background" else []
        nbytes = savers["background"].views.nbytes
    found = {"recipe": recipe_name, "state_mib": nbytes / 2**20}
    return found | _stall_figures(free, stalls, flights)


def _stall_figures(
    free: list[float], stalls: dict[str, list[float]], flights: list[list[float]]
) -> dict[str, Any]:
    """Summarise times of free steps, of saves, and of steps while a save is in flight."""
    normal = statistics.median(free)
    found: dict[str, Any] = {"steps": len(free), "step_ms": normal}
    for name in MODES:
        middle = statistics.median(stalls[name])
        found[name] = {
            "stall_ms": stalls[name],
            "median_stall_ms": middle,
            "share_of_step": middle / normal,
        }
    pairs = zip(stalls["background"], flights, strict=True)
    extra = [stall + sum(x - normal for x in flight) for stall, flight in pairs]
    found["background"] |= {
        "step_ms_in_flight": statistics.median([x for flight in flights for x in flight]),
        "steps_in_flight": statistics.mean(map(len, flights)),
        "extra_ms": statistics.median(extra),
    }
    return found


MODES: dict[str, Any] = {
    "background": {},
    "into_files": {"memory_share": 0.0},
    "at_once": {"background": False},
}
"""Options of a saver: it copies into memory, into the files of the checkpoint, or not at all."""


def show_stall(found: dict[str, Any]) -> None:
    """Print what saving costs the steps of a recipe."""
    after, files, once = (found[name] for name in MODES)
    print(
        f"{found['recipe']}: state {found['state_mib']:.1f} MiB, step {found['step_ms']:.1f} ms (median)\n"
        f"  in the background: training is stalled for {after['median_stall_ms']:.2f} ms, "
        f"{after['share_of_step']:.1%} of a step; the {after['steps_in_flight']:.1f} step(s) meanwhile take "
        f"{after['step_ms_in_flight']:.1f} ms; in all {after['extra_ms']:.1f} ms\n"
        f"  copied into files: {files['median_stall_ms']:.1f} ms, {files['share_of_step']:.1%} of a step\n"
        f"  at once: {once['median_stall_ms']:.1f} ms, {once['share_of_step']:.1%} of a step"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[230, 1000], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--stall", nargs="*", metavar="RECIPE", help="time a trainer's saves instead"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write (a real disk)")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    document: dict[str, Any] = {"rounds": args.rounds, "results": results}
    if args.stall is not None:
        for recipe in args.stall or ["telechat3_moe/pretrain_tiny.yaml"]:
            results.append(measure_stall(recipe, args.rounds, args.folder))
            show_stall(results[-1])
    else:
        for size in args.sizes:
            results += measure(size, args.rounds, args.folder)
        show(results)
        document = {"sizes_mib": args.sizes, **document}
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

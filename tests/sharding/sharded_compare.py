"""Compile, run and read groups of cases; put pieces of tensors together and measure differences."""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sharded_run as run

from telechat_moe.graph.execute import Job
from telechat_moe.graph.parameter_layout import shard_slices

TIMEOUT = 7200
LOSSES, NORM, LOADS, APPLIED = range(4)


class Found(NamedTuple):
    """What a case gave: one process, and each rank."""

    case: run.Case
    reference: dict[str, Any]
    ranks: list[dict[str, Any]]
    job: Job


def run_cases(folder: Path, names: Sequence[str]) -> dict[str, Found]:
    """Compile cases of one number of devices, run them in one process and on processes."""
    cases = [run.Case.of(name) for name in names]
    devices = {case.layout.devices for case in cases}
    assert len(devices) == 1, devices
    with ThreadPoolExecutor(1) as pool:  # one process leaves cores idle
        single = pool.submit(call, folder, "reference", names)
        call(folder, "compile", names)
        single.result()
    call(folder, "work", names, devices.pop())
    return {case.name: read(folder, case) for case in cases}


def call(
    folder: Path, verb: str, names: Sequence[str], processes: int = 0, script: str = run.__file__
) -> None:
    """Run a verb of ``sharded_run.py``, or another script, on processes if their number is given."""
    words = [script, verb, str(folder), *names]
    drop = ("MS_DEV_PRECOMPILE_ONLY", "MS_ROLE", "MS_NODE_ID", "RANK_ID", "RANK_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment.setdefault("GLOG_v", "3")
    command = [sys.executable, *words]
    if processes:
        environment["OMP_NUM_THREADS"] = "1"
        logs = folder / "logs"
        command = [
            *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
            *(f"--worker_num={processes}", f"--local_worker_num={processes}"),
            *("--master_addr=127.0.0.1", f"--master_port={_free_port()}"),
            *(f"--log_dir={logs}", "--join=True", "--cluster_time_out=300"),
            *words,
        ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{verb}: {done.stdout[-2000:]}{done.stderr[-3000:]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(folder: Path, case: run.Case) -> Found:
    """Read what a case wrote."""
    reference = pickle.loads((folder / f"{case.reference}.pickle").read_bytes())
    outs = [folder / f"{case.folder}_{rank}.pickle" for rank in range(case.layout.devices)]
    ranks = [pickle.loads(out.read_bytes()) for out in outs]
    return Found(case, reference, ranks, Job.read(folder / case.job))


def whole(
    found: Found, pieces: Sequence[dict[str, np.ndarray]], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return whole tensors from the pieces of all ranks.

    Copies must be equal to the last bit, except where something is done wrong on purpose.
    """
    given = {**found.reference["start"], **found.reference["last"]}
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        shape = given[name].shape
        tensor, seen = np.full(shape, np.nan, np.float32), {}
        for rank, held in enumerate(pieces):
            if name not in held:
                continue
            piece = held[name]
            where = shard_slices(shape, found.job.ranks[rank], name)
            where = where or tuple(slice(0, n) for n in shape)
            key = tuple((s.start, s.stop) for s in where)
            first, copy = seen.setdefault(key, (rank, piece))
            same = piece.tobytes() == copy.tobytes() or found.case.fault
            assert same, f"{name}: ranks {first} and {rank} hold copies that differ"
            tensor[where] = piece
        assert seen, f"{name}: no rank holds it"
        assert not np.isnan(tensor).any(), f"{name}: not whole, or not a number"
        tensors[name] = tensor
    return tensors


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of ``a - b`` over that of ``b``."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    norm = np.linalg.norm(b)
    off = float(np.linalg.norm(a - b))
    return off / norm if norm else off


def steps(ranks: Sequence[dict[str, Any]], part: int) -> np.ndarray:
    """Return one part of the steps' answers, the same on all ranks: losses, norm, loads, applied."""
    values = [np.array([np.asarray(step[part]) for step in rank["steps"]]) for rank in ranks]
    for rank, other in enumerate(values):
        np.testing.assert_array_equal(other, values[0], err_msg=f"rank {rank}")
    return values[0]


def weights(found: Found) -> dict[str, np.ndarray]:
    """Return the model's tensors after the last step; the counter of dropped pairs stays in one process."""
    names = [name for name in found.reference["last"] if not name.endswith(".dropped")]
    return whole(found, [rank["last"] for rank in found.ranks], names)


def states(found: Found) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return weights and moments after each of the first steps: whole tensors of the ranks, and of one process."""
    return [
        (whole(found, [rank["states"][s] for rank in found.ranks], expected), expected)
        for s, expected in enumerate(found.reference["states"])
    ]


def gradients(found: Found, side: int) -> list[dict[str, np.ndarray]]:
    """Return the clipped gradients of the first steps, float64, of one side of :func:`states`.

    They follow from the first moments: ``m' = beta m + c g``.
    """
    prefix = run.MOMENTS[found.case.optimizer][0] + "."
    beta = run.BETAS[0]
    scale = 1 - beta if found.case.optimizer == "adamw" else 1.0
    result, before = [], {}
    for pair in states(found):
        moments = {n: x.astype(np.float64) for n, x in pair[side].items() if n.startswith(prefix)}
        result.append({n: (x - beta * before.get(n, 0.0)) / scale for n, x in moments.items()})
        before = moments
    return result


def compared_loads(found: Found) -> tuple[np.ndarray, np.ndarray]:
    """Return the loads of all steps, of the processes and of one process."""
    ours = steps(found.ranks, LOADS)
    return ours, np.array([step[LOADS] for step in found.reference["steps"][: len(ours)]])


def steps_before_a_tie(found: Found) -> int:
    """Return how many of the first steps send each expert as many tokens as in one process.

    AdamW magnifies last bits until two experts' scores change places. That is legal after the recorded steps, for one token.
    """
    ours, expected = compared_loads(found)
    moved = np.abs(ours - expected).sum(axis=-1)  # steps, layers
    if not moved.any():
        return len(ours)
    first, layer = np.argwhere(moved)[0]
    legal = found.case.optimizer == "adamw" and first >= run.RECORDED and moved[first, layer] == 2
    where = f"step {first + 1}, MoE layer {layer}"
    assert legal, f"{where}: {moved[first, layer] / 2:g} choices of experts differ"
    return int(first)


def errors(found: Found, count: int | None = None) -> dict[str, float]:
    """Return the largest relative errors: losses, loads, gradients of the first step and of later ones, weights after the last.

    Args:
        count: Of how many steps; of all by default. Weights are compared only after all.
    """
    ours = steps(found.ranks, LOSSES)[:count]
    reference = np.array([step[LOSSES] for step in found.reference["steps"][: len(ours)]])
    scale = np.where(reference == 0, 1.0, np.abs(reference))
    measured = {"loss": float(np.max(np.abs(ours - reference) / scale))}
    loads, expected_loads = (x[:count] for x in compared_loads(found))
    measured["load"] = float(np.max(np.abs(loads - expected_loads) / np.maximum(expected_loads, 1)))
    pairs = zip(gradients(found, 0), gradients(found, 1), strict=True)
    measured["gradient"], *later = (max(difference(a[n], b[n]) for n in b) for a, b in pairs)
    measured["later gradient"] = max(later)
    if len(ours) == len(found.reference["steps"]):
        last, expected = weights(found), found.reference["last"]
        measured["weight"] = max(difference(last[n], expected[n]) for n in last)
    return measured

"""Describe this machine as a device, from a measurement of less than a minute.

Products give the peak, a copy the memory's bandwidth, an AllReduce between two processes the network; a few short
training steps give the constants of the cost model, and the coefficients of `cpu_step`, which is closer for one process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import TelechatMoeError
from telechat_moe.launch.commands import environment as environment_of_msrun
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost import cpu_step
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import Constants, Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate

RECIPE = "telechat3_moe/pretrain_19m.yaml"
START = {
    "matmul_share": 0.8,
    "matmul_half": 40.0,
    "attention_share": 0.5,
    "memory_share": 0.8,
    "layer_host_s": 2e-3,
    "step_host_s": 4e-3,
}
FITTED = tuple(START)
"""Constants that the steps determine."""

PULL = 0.02
"""Weight of staying near `START`: it decides only the constants that the steps do not determine."""

ALL_REDUCE_BYTES = (1 << 12, 1 << 24)


class MeasurementError(TelechatMoeError):
    """A measurement failed; the message holds the last lines of the process's output."""

    exit_code = 1


@dataclass(frozen=True)
class StepCase:
    """A training step to measure."""

    name: str
    overrides: tuple[str, ...]
    recipe: str = RECIPE


def variant(name: str, **changes: int) -> StepCase:
    """Return a variant of the benchmark recipe.

    Args:
        changes: ``layers``, ``hidden``, ``experts``, ``topk``, ``seq``, ``batch``, ``ffn``, ``moe``, ``mtp``, ``vocab``, ``heads``.
    """
    model = "model.model_config."
    keys = {
        "layers": ("num_hidden_layers",), "hidden": ("hidden_size",), "experts": ("n_routed_experts",),
        "topk": ("num_experts_per_tok",), "ffn": ("intermediate_size",),
        "moe": ("moe_intermediate_size", "moe_shared_expert_intermediate_size"), "mtp": ("num_nextn_predict_layers",),
        "vocab": ("vocab_size",), "heads": ("num_attention_heads", "num_key_value_heads"),
        "seq": ("seq_length", "max_position_embeddings"), "batch": ("batch_size",),
    }  # fmt: skip
    overrides = [
        f"{model}{key}={value}" for option, value in changes.items() for key in keys[option]
    ]
    if "batch" in changes:
        overrides.append(f"runner_config.batch_size={changes['batch']}")
    if "seq" in changes:
        overrides.append(f"train_dataset.data_loader.config.seq_length={changes['seq']}")
    return StepCase(name, tuple(overrides))


CALIBRATION = (
    variant("2 layers", layers=2, mtp=0),
    variant("wide", layers=2, mtp=0, hidden=512, ffn=2048, batch=2),
    variant("long", layers=2, mtp=0, seq=1024, batch=2),
    variant("small experts", layers=3, mtp=0, experts=32, topk=2, moe=96, batch=2),
    variant("vocabulary", layers=2, mtp=1, vocab=8192, batch=2),
    variant("small", layers=3, mtp=0, seq=128, batch=2, vocab=1024),
    variant("deep", layers=8, mtp=0, hidden=128, ffn=512, moe=96, seq=64, batch=2, vocab=1024),
)
"""Steps that the constants are fitted to: they differ in what they spend their time on."""


def run_measurement(
    job: dict[str, Any],
    *,
    processes: int = 1,
    beside: bool = False,
    on_result: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure in a process of its own, one thread each, and return all results by name.

    Args:
        job: What to measure, see `measure_here`.
        processes: Several talk to each other, under msrun.
        beside: A second process does the same at the same time: both share memory and caches.

    Raises:
        MeasurementError: It ended without a result.
    """
    environment = {**environment_of_msrun(), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    job_arguments = [str(Path(__file__).with_name("measure_here.py")), json.dumps(job)]
    results: dict[str, Any] = {}
    output: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, *job_arguments]
        log = Path(folder, "worker_0.log")
        if processes > 1:
            command = [
                str(Path(sys.executable).with_name("msrun")), f"--worker_num={processes}",
                f"--local_worker_num={processes}", "--join=True", f"--log_dir={folder}", "--master_port=18118",
                *job_arguments,
            ]  # fmt: skip
        start = partial(
            subprocess.Popen, command, env=environment, cwd=folder, start_new_session=True
        )
        if beside:
            stack.enter_context(start(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        process = stack.enter_context(
            start(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        for line in _lines(process, log):
            if not line.startswith("{"):
                output.append(line.rstrip())
                continue
            result = json.loads(line)
            results |= result
            on_result(result)
    if process.returncode or not results:
        tail = "\n".join(output[-5:])
        raise MeasurementError(
            f"the measurement ended with exit code {process.returncode}; its last lines:\n{tail}\n"
            "it needs mindspore: pip install 'telechat-moe[train]'"
        )
    return results


def _lines(process: subprocess.Popen[str], log: Path) -> Iterator[str]:
    """Yield what a process prints, and then what msrun's first worker wrote."""
    yield from process.stdout or ()
    process.wait()
    if not process.returncode and log.exists():
        yield from log.read_text(encoding="utf-8", errors="replace").splitlines()


def medians(results: dict[str, Any]) -> dict[str, float]:
    """Return each step's median time from what a measurement printed."""
    times: dict[str, list[float]] = results["steps"]
    return {name: float(np.median(values)) for name, values in times.items()}


def as_job(cases: Sequence[StepCase], operators: str = "fused") -> list[dict[str, Any]]:
    """Return cases as plain data for a measurement's process."""
    chosen = (f"telechat_moe.operators.default={operators}",)
    return [
        {"name": c.name, "recipe": c.recipe, "overrides": (*c.overrides, *chosen)} for c in cases
    ]


def product_shapes(architecture: Architecture, layout: Layout) -> list[tuple[int, int, int]]:
    """Return the products (m, n, k) that a recipe's layers and head compute, forward."""
    a, t = architecture, layout.micro_batch * architecture.seq
    shapes = [
        (t, a.heads * a.head_dim, a.q_lora_rank or a.hidden),
        (t, a.hidden, a.heads * a.value_dim),
        (t, 2 * a.ffn, a.hidden),
        (t, a.hidden, a.ffn),
        (t, a.vocab, a.hidden),
    ]
    if a.experts:
        expert_rows = max(t * a.top_k // a.experts, 1)
        shapes += [(expert_rows, 2 * a.moe_ffn, a.hidden), (expert_rows, a.hidden, a.moe_ffn)]
    return shapes


def of_case(case: StepCase, operators: str = "fused") -> tuple[Architecture, Layout]:
    """Return architecture and layout of a case; `plain` operators are those that `run-sharded` executes."""
    recipe = load(case.recipe, list(case.overrides))
    layout = Layout.from_recipe(recipe)
    if operators == "plain":
        layout = layout.with_changes(flash=False, fused=False, fused_loss=False)
    return Architecture.from_recipe(recipe), layout


def fit(
    cases: Sequence[tuple[Architecture, Layout]], seconds: Sequence[float], device: Device
) -> Constants:
    """Return the constants with which the cost model predicts measured steps best.

    The least squares of log(predicted / measured), bounded to a factor of 30 around `START`.
    """
    from scipy.optimize import least_squares

    architectures, layouts = [a for a, _ in cases], [x for _, x in cases]
    measured = np.log(np.asarray(seconds, dtype=np.float64))
    start = np.log([START[name] for name in FITTED])

    def constants(x: Floats) -> Constants:
        values = {name: float(value) for name, value in zip(FITTED, np.exp(x), strict=True)}
        return replace(device.constants, **values)

    def error(x: Floats) -> Floats:
        predicted = evaluate(architectures, layouts, replace(device, constants=constants(x))).step_s
        return np.concatenate([np.log(predicted) - measured, PULL * (x - start)])

    span = np.log(30.0)
    return constants(least_squares(error, start, bounds=(start - span, start + span)).x)


@dataclass(frozen=True)
class Calibration:
    """The measured and the fitted figures."""

    device: Device
    products: tuple[tuple[tuple[int, int, int], float], ...]
    """Shapes (m, n, k) and their FLOP/s."""
    steps: tuple[tuple[str, float, float], ...]
    """Name, measured and fitted seconds."""


def calibrate(
    recipe: str, *, operators: str, progress: Callable[[str, int, int], None]
) -> Calibration:
    """Measure this machine.

    Args:
        recipe: Whose products are measured for the peak.
        operators: Of the steps that are measured: ``fused``, in one process; or ``plain``, in two at once, which share
            caches and memory as the processes of `run-sharded` do.
        progress: Called with what was done, how many of how many.

    Raises:
        MeasurementError: A measurement failed.
    """
    shapes = product_shapes(*of_case(StepCase("recipe", (), recipe)))
    total, completed = len(CALIBRATION) + 4, 0

    def step(result: dict[str, Any]) -> None:
        nonlocal completed
        completed += 1
        progress(str(result.get("ready", "rates")), completed, total)

    cases = as_job(CALIBRATION, operators)
    job = {"shapes": shapes, "cases": cases}
    results = run_measurement(job, beside=operators == "plain", on_result=step)
    rates, seconds = results["flops"], medians(results)
    network = run_measurement({"all_reduce": ALL_REDUCE_BYTES}, processes=2, on_result=step)
    start, large = network["all_reduce"]
    link = ALL_REDUCE_BYTES[1] / max(large - start, 1e-9)
    base = Device(
        name="this-machine" if operators == "fused" else "this-machine-plain",
        peak_flops={"fp32": max(rates), "bf16": max(rates)},
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_bandwidth=results["bandwidth"],
        node_devices=os.cpu_count() or 1,
        intra_bandwidth=link,
        inter_bandwidth=link,
        reserved_bytes=2.0**30,
        constants=replace(Constants(), intra_share=1.0, inter_share=1.0, collective_host_s=start),
    )
    pairs = [of_case(c, operators) for c in CALIBRATION]
    took = [seconds[c.name] for c in CALIBRATION]
    coefficients = cpu_step.fit(pairs, took)
    device = replace(base, constants=fit(pairs, took, base), fitted=FITTED, step=coefficients)
    fitted = [cpu_step.predict(*pair, coefficients) for pair in pairs]
    steps = zip((c.name for c in CALIBRATION), took, fitted, strict=True)
    return Calibration(device, tuple(zip(shapes, rates, strict=True)), tuple(steps))


def as_yaml(calibration: Calibration) -> str:
    """Return the description in the format of `devices/*.yaml`."""
    import yaml

    def short(value: float) -> float:
        return float(f"{value:.6g}")

    d, usual = calibration.device, vars(Constants())
    how = {True: "fitted to seven training steps", False: "AllReduce between two processes"}
    constants = {
        name: {
            "value": short(value),
            "source": f"measured here: {how[name in FITTED]}",
            "fitted": name in FITTED,
        }
        for name, value in vars(d.constants).items()
        if value != usual[name]
    }
    document = {
        "name": d.name,
        "peak_flops": {k: short(v) for k, v in d.peak_flops.items()},
        "memory_bytes": d.memory_bytes,
        "memory_bandwidth": short(d.memory_bandwidth),
        "node_devices": d.node_devices,
        "intra_bandwidth": short(d.intra_bandwidth),
        "inter_bandwidth": short(d.inter_bandwidth),
        "reserved_bytes": d.reserved_bytes,
        "constants": constants,
        "step": {name: short(value) for name, value in d.step.items()},
        "sources": {
            "peak_flops": "the fastest of our float32 products at the recipe's shapes, one thread",
            "memory_bandwidth": "a copy of 128 MiB, bytes read and written, one thread",
            "intra_bandwidth": "AllReduce of 16 MiB between two processes",
            "step": "fitted to seven training steps, seconds per unit of each term of cpu_step",
        },
    }
    return yaml.safe_dump(document, sort_keys=False)

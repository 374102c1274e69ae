"""Runs of one small recipe in fourteen layouts, in real processes: do pairs of them pass, and are planted faults found?

    python -m benchmarks.align_faults.layout_pairs FOLDER --pairs 60 --faults 5 --real --jobs 2 --json FILE

Three steps of each layout are captured, with clipping and without; dumps that FOLDER has are used again. The experts'
rows of the router are equal in threes but for the last bit, so a third of the tokens takes other experts in another
layout. A fault is one tensor of the target's dump: what an operator made, what a call or an update was given; ``--real``
adds ten that processes computed (:data:`REAL`). Each fault is judged up to its step.
Exit codes: 0, and 1 if a right pair is called wrong or a fault is missed.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.machine import processor
from telechat_moe.checkpoint import checkpoint
from telechat_moe.data import write_indexed
from telechat_moe.numerics import is_float
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.dump import summary
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, TensorRecord
from telechat_moe.tools.align.judge.outcome import Outcome
from telechat_moe.tools.align.judge.pins import chose_otherwise

RECIPE, STEPS, ROWS = "telechat3_moe/pretrain_tiny.yaml", 3, 4
_MODEL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "num_nextn_predict_layers": 0, "seq_length": 16, "max_position_embeddings": 16,
}  # fmt: skip
_TIED = [0, 0, 0, 3, 3, 3, 6, 6]  # the row of the router that each expert has


def _rows(count: int) -> list[str]:
    return [f"runner_config.batch_size={count}", f"model.model_config.batch_size={count}"]


def _stages(micro: int) -> list[str]:
    return [f"callbacks.1.micro_batch_num={micro}", "model.model_config.offset=[0,1]"]


def _accumulated(steps: int) -> list[str]:
    key = "gradient_accumulation_steps"
    return [f"runner_config.{key}={steps}", f"callbacks.1.{key}={steps}"]


def _parallel(**degrees: Any) -> list[str]:
    settings = ["use_parallel=True", "parallel.parallel_mode=1", "parallel.full_batch=True"]
    return settings + [f"parallel_config.{name}={value}" for name, value in degrees.items()]


_SP = {"use_seq_parallel": True}
LAYOUTS = {
    "one": [],
    "plain": ["telechat_moe.operators.default=plain"],
    "dp2": [*_parallel(data_parallel=2), *_rows(2)],
    "zero": [
        *_parallel(data_parallel=2),
        *_rows(2),
        "parallel.enable_parallel_optimizer=True",
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold=0",
    ],
    "dp2_ep2": [*_parallel(data_parallel=2, expert_parallel=2), *_rows(2)],
    "tp2": _parallel(model_parallel=2),
    "tp2_sp": _parallel(model_parallel=2, **_SP),
    "tp2_recompute": [*_parallel(model_parallel=2, **_SP), "recompute_config.recompute=True"],
    "tp2_ep2": _parallel(model_parallel=2, expert_parallel=2, **_SP),
    "pp2": [*_parallel(pipeline_stage=2, micro_batch_num=2), *_rows(2), *_stages(2)],
    "tp2_pp2": [
        *_parallel(model_parallel=2, pipeline_stage=2, micro_batch_num=2, **_SP), *_rows(2), *_stages(2),
    ],
    "dp2_tp2_ep2": [
        *_parallel(data_parallel=2, model_parallel=2, expert_parallel=2, **_SP), *_rows(2),
    ],
    "dp2_accumulated": [*_parallel(data_parallel=2), *_rows(1), *_accumulated(2)],
    "cp2_pp2": [
        *_parallel(context_parallel=2, pipeline_stage=2, micro_batch_num=4), *_rows(1), *_stages(4),
        "model.model_config.use_flash_attention=True",
    ],
}  # fmt: skip
"""What each layout sets; the batch of a step is the same."""

PLANT = Path(__file__).parents[1] / "peers" / "plant_wrong_group.py"
REAL = (
    ("one", "dp2_tp2_ep2", "group", "layers.1.attention.q_up.weight"),
    ("tp2", "dp2_tp2_ep2", "group", "layers.0.ffn.down.weight"),
    ("dp2_ep2", "dp2", "missing", "layers.0.ffn.up.weight"),
    ("plain", "tp2_sp", "missing", "layers.2.ffn_norm.weight"),
    ("pp2", "dp2_accumulated", "doubled", "layers.1.moe.router.weight"),
    ("one", "tp2_ep2", "doubled", "layers.1.attention.kv_norm.weight"),
    ("tp2_pp2", "dp2_ep2", "scaled", "layers.2.attention.out.weight"),
    ("dp2", "tp2_recompute", "scaled", "layers.0.input_norm.weight"),
    ("zero", "tp2", "bias", "layers.1.moe.router.expert_bias"),
    ("tp2_sp", "pp2", "bias", "layers.2.moe.router.expert_bias"),
)
"""Faults in real processes: reference, layout, fault and weight of ``plant_wrong_group.py``."""


def _write_recipe(folder: Path, name: str, clip: bool, start: Path | None) -> Path:
    """Write the recipe of a layout, and the data that all use."""
    data = folder / "data"
    if not data.exists():
        data.mkdir(parents=True)
        rng = np.random.default_rng(0)
        documents = [rng.integers(1, 64, 30).astype(np.uint16) for _ in range(60)]
        write_indexed(data / "train", documents, np.dtype(np.uint16))
    settings = [f"model.model_config.{key}={value}" for key, value in _MODEL.items()]
    settings += [
        f"train_dataset.data_loader.config.data_path=['1', '{data}/train']",
        "train_dataset.data_loader.config.seq_length=16", f"train_dataset.data_loader.sizes=[{12 * ROWS},0,0]",
        f"runner_config.batch_size={ROWS}", f"model.model_config.batch_size={ROWS}", "lr_schedule.warmup_steps=2",
        "telechat_moe.evaluation.interval=0", "telechat_moe.sample=null", f"output_dir={folder / 'run'}",
        f"runner_wrapper.use_clip_grad={clip}", *LAYOUTS[name],
    ]  # fmt: skip
    settings += [f"load_checkpoint={start}"] if start is not None else []
    words = ["show", RECIPE, *(w for s in settings for w in ("--set", s))]
    path = folder / f"{name}{'' if clip else '_unclipped'}.yaml"
    path.write_text(_run(words), encoding="utf-8")
    return path


def _run(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "telechat_moe.cli", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"telechat-moe {' '.join(words[:2])}: {done.stdout}{done.stderr}")
    return done.stdout


def _tied(folder: Path) -> Path:
    """Return a checkpoint of the recipe's own first weights, but for the routers' rows."""
    known = folder / "tied"
    if not known.exists():
        recipe = _write_recipe(folder, "one", True, None)
        _run(["align", "capture", str(recipe), "--out", str(folder / "first"), "--steps", "0-0"])
        config, rng = load(str(recipe)).model_config, np.random.default_rng(0)
        model = {w.name: np.zeros(w.shape, np.float32) for w in weights(config)}
        for call in summary.read(folder / "first").ranks[0, 0].calls.values():
            record = call.kwargs.get("weight")
            if call.phase is Phase.OPTIMIZER and isinstance(record, TensorRecord):
                model[call.name.removeprefix("Optimizer.").rpartition(".")[0]] = record.load()
        for name, w in model.items():
            if name.endswith("router.weight"):
                bits = rng.choice([-1.0, 0.0, 1.0], w.shape) * 2.0**-23
                model[name] = (w[_TIED] * (1 + bits)).astype(np.float32)
        checkpoint.save(known, 1, {"model": model}, {})
    return next(known.glob("step*")).absolute()


def capture(folder: Path, name: str, clip: bool) -> Path:
    """Return the dump of a layout; it is captured where the folder does not have it."""
    out = folder / f"{name}{'' if clip else '_unclipped'}"
    if not out.exists():
        recipe = _write_recipe(folder, name, clip, _tied(folder))
        _run(["align", "capture", str(recipe), "--out", str(out), "--steps", f"0-{STEPS - 1}"])
    return out


def judge(reference: Dump, target: Dump) -> Outcome:
    """Judge a pair as `align bisect` does."""
    return across(reference, target)


# ------------------------------------------------------------------ faults


def plant(target: Dump, kind: str, rng: random.Random) -> tuple[Dump, tuple[int, int, str]] | None:
    """Return a dump up to a step with one wrong tensor, and the step, rank and key of its call; None: no place.

    Args:
        kind: ``made``, ``sent back`` or ``reduced``: what an operator of that phase made; ``given``: what an operator
            was given; ``state``: what an update was given.
    """
    step = rng.choice(target.steps)
    sites = [
        (rank, key, place)
        for rank in target.at(step)
        for key, call in rank.calls.items()
        for place, record in call.tensors()
        if call.kind == "api" and _fits(kind, call, place) and _counts(record)
    ]
    if not sites:
        return None
    rank, key, place = rng.choice(sites)
    call = rank.calls[key]
    values = np.array(dict(call.tensors())[place].load())
    row = rng.randrange(len(values))
    values[row] = values[row] * np.float32(1.5) + np.float32(np.abs(values).max() * 0.01)
    calls = {**rank.calls, key: _with(call, place, values)}
    ranks = {**until(target, step).ranks, (step, rank.rank): replace(rank, calls=calls)}
    return Dump(target.root, ranks), (step, rank.rank, key)


def _fits(kind: str, call: Call, place: str) -> bool:
    stage, made = call.stage, place.startswith("output")
    return {
        "made": stage is Phase.FORWARD and made,
        "sent back": stage is Phase.BACKWARD and made,
        "reduced": stage is Phase.REDUCTION and made,
        "given": stage in (Phase.FORWARD, Phase.BACKWARD) and not made,
        "state": stage is Phase.OPTIMIZER
        and place in ("input.weight", "input.exp_avg", "input.grad"),
    }[kind]


KINDS = ("made", "sent back", "reduced", "given", "state")


def _counts(record: TensorRecord) -> bool:
    """Return whether a tensor has values that matter: not zeros or a mask."""
    if not is_float(record.dtype) or len(record.shape) < 1 or record.read is None:
        return False
    values = record.load()
    several = values.size > 8 and len(np.unique(values.reshape(-1)[:64])) > 2
    return bool(several and np.isfinite(values).all())


def _with(call: Call, place: str, values: Any) -> Call:
    return call.changed(
        lambda name, value: (
            replace(value, path=None, read=lambda: values)
            if name == place and isinstance(value, TensorRecord)
            else value
        ),
        results=True,
    )


# ------------------------------------------------------------------ pairs


def until(dump: Dump, step: int) -> Dump:
    """Return a dump up to a step."""
    return Dump(dump.root, {k: v for k, v in dump.ranks.items() if k[0] <= step})


def of_pair(folder: Path, a: str, b: str, clip: bool, faults: int) -> list[dict[str, Any]]:
    """Return what was found of a pair, and of each fault in its target."""
    reference, target = (summary.read(capture(folder, name, clip)) for name in (a, b))
    about = {"reference": a, "target": b, "clip": clip}
    flips = sum(chose_otherwise(reference.at(n), target.at(n)) for n in target.steps)
    found = [about | {"flips": flips} | _timed(reference, target)]
    rng = random.Random(f"{a} {b} {clip}")
    for i in range(faults):
        kinds = (KINDS[i % len(KINDS)], "made")  # one rank alone reduces nothing
        planted = next(p for kind in kinds if (p := plant(target, kind, rng)) is not None)
        wrong, (step, rank, key) = planted
        one = _timed(until(reference, step), wrong)
        exact = one["step"] == step and one["operator"] == key and rank in one["ranks"]
        fault = {"fault": kinds[0], "planted": [step, rank, key], "exact": exact}
        found.append(about | one | fault)
    return found


def of_process(folder: Path, a: str, b: str, fault: str, weight: str) -> dict[str, Any]:
    """Return what was found of a fault that the target's processes computed.

    The right call is the reduction of the weight's gradient, or its update where the reduction is missing; of an
    expert bias the choice in the next step.
    """
    out = folder / f"{b}_{fault}_{weight}"
    if not out.exists():
        recipe = _write_recipe(folder, b, True, _tied(folder))
        words = [PLANT, recipe, "--fault", fault, "--weight", weight, "--out", out, "--steps", 2]
        done = subprocess.run(
            [sys.executable, *map(str, words)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{b} {fault} {weight}: {done.stderr}")
    target = summary.read(out)
    one = _timed(until(summary.read(capture(folder, a, True)), max(target.steps)), target)
    where, key = (one["step"], one["operator"]), one["operator"] or ""
    exact = where[0] == 0 and f".{weight}." in key
    if fault == "bias":  # choices are numbered in the order of layers
        exact = where == (1, f"Primitive.TopK.{int(weight.split('.')[1]) - 1}.forward")
    about = {"reference": a, "target": b, "clip": True, "fault": fault, "planted": weight}
    return about | one | {"exact": exact, "process": True}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was found of each pair, and of each fault."""
    folder, layouts = args.folder.absolute(), args.layouts.split(",")
    rng = random.Random(args.seed)
    able = [(a, b, clip) for clip in (True, False) for a, b in combinations(layouts, 2)]
    pairs = [
        (b, a, clip) if rng.random() < 0.5 else (a, b, clip)
        for a, b, clip in rng.sample(able, min(args.pairs, len(able)))
    ]
    for name, clip in sorted({(name, clip) for a, b, clip in pairs for name in (a, b)}):
        capture(folder, name, clip)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(of_pair, folder, *pair, args.faults) for pair in pairs]
        for done in as_completed(waiting):
            yield from done.result()
    for fault in REAL if args.real else ():
        yield of_process(folder, *fault)


def _timed(reference: Dump, target: Dump) -> dict[str, Any]:
    begin = time.perf_counter()
    outcome = judge(reference, target)
    seconds = round(time.perf_counter() - begin, 1)
    first = outcome.findings[0] if outcome.findings else None
    about = first.as_json() if first else {"step": None, "operator": None, "layer": None}
    return {
        "verdict": outcome.verdict,
        "seconds": seconds,
        **{name: about[name] for name in ("step", "operator", "layer")},
        "ranks": outcome.ranks,
        "said": (first.verdict.reason if first else outcome.reason)[:160],
        "judged": dict(outcome.judged),
    }


def summed(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the result in a sentence."""
    right = [f for f in found if "fault" not in f]
    said = [f"{len(right)} right pairs: {sum(f['verdict'] == 'pass' for f in right)} pass, "
            f"{sum(f['verdict'] == 'diverged' for f in right)} diverged"]  # fmt: skip
    for what, process in (("in dumps", False), ("in processes", True)):
        wrong = [f for f in found if "fault" in f and f.get("process", False) == process]
        missed = sum(f["verdict"] != "diverged" for f in wrong)
        exact = sum(f["exact"] for f in wrong)
        said.append(f"{len(wrong)} faults {what}: {missed} missed, {exact} at the right call")
    seconds = [f["seconds"] for f in right] or [0.0]
    said.append(f"a pair takes {median(seconds):.0f} s in the median, {max(seconds):.0f} at most")
    return "; ".join(said)


def write(path: Path, found: Sequence[Mapping[str, Any]], jobs: int) -> None:
    """Write the result as JSON, a line for each pair and fault."""
    machine = f"{processor()}, {os.cpu_count()} CPUs"
    head = json.dumps({"machine": machine, "jobs": jobs, "said": summed(found)}, indent=1)
    lines = ",\n".join(f"  {json.dumps(one)}" for one in found)
    path.write_text(f'{head[:-2]},\n "found": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, with commas")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--faults", type=int, default=0, help="in each pair, one step each")
    parser.add_argument("--real", action="store_true", help="ten faults in processes, too")
    parser.add_argument("--jobs", type=int, default=1, help="pairs that are judged at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for one in run(args):
        found.append(one)
        print(json.dumps(one), flush=True)
    print(summed(found))
    if args.json:
        write(args.json, found, args.jobs)
    alarms = any("fault" not in f and f["verdict"] == "diverged" for f in found)
    missed = any("fault" in f and f["verdict"] != "diverged" for f in found)
    return 1 if alarms or missed else 0


if __name__ == "__main__":
    sys.exit(_main())

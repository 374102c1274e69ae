"""Quality and speed of the planner of expert placement: `python -m benchmarks.placement`."""

import argparse
import json
import math
import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import answer
from benchmarks.placement import eplb
from benchmarks.placement.loads import batches, drawn, recorded, sequences, shifting, uneven, zipf
from benchmarks.placement.optimum import fewest_moves, solve
from telechat_moe.moe.assign import device_loads, lower_bound
from telechat_moe.moe.placement import SlotMap
from telechat_moe.moe.planner import MoveRule, choose, copied, plan

GROUPS = 8
"""Groups of experts, each on one node, in the models with 64 experts and more; a node has eight devices."""

FREE = MoveRule(seconds_per_pair=1.0, steps=1, expert_bytes=0.0, bandwidth=math.inf)
"""Only balance counts."""


def balance(total: int, sample: int, seconds: float, budget: float) -> dict[str, Any]:
    """Place `total` loads; compare with EPLB, and with the optimum where the lower bound does not prove one per cent.

    Args:
        sample: Loads that the solver gets, at most, of those that the bound leaves open.
        seconds: Time of the solver for each.
        budget: Seconds after which it gets no other.
    """
    rows: list[dict[str, Any]] = []
    unsure: list[tuple[dict[str, Any], NDArray[np.float64], int]] = []
    for family, devices, load_LE in batches(total):
        home_LE = SlotMap.identity(*load_LE.shape, devices).owners
        owner_LE = choose(load_LE, home_LE, devices, FREE)
        ours_L = device_loads(load_LE, owner_LE, devices).max(axis=1)
        bound_L = np.ceil(lower_bound(load_LE, devices) - 1e-9)  # loads are whole numbers
        for load_E, ours, bound in zip(load_LE, ours_L, bound_L, strict=True):
            loads = load_E.tolist()
            theirs = eplb.busiest(loads, eplb.pack(loads, devices), devices)
            row = {"family": family, "ours": float(ours), "eplb": theirs, "bound": float(bound)}
            row["size"] = f"{len(loads)} / {devices}"
            if len(loads) % (8 * GROUPS) == 0 and devices in (16, 32, 64):
                held, place = eplb.hierarchical(loads, len(loads), GROUPS, devices // 8, devices)
                row["by groups"] = eplb.busiest([loads[e] for e in held], place, devices)
            rows.append(row)
            if ours > 1.01 * bound:
                unsure.append((row, load_E, devices))
    began = time.perf_counter()
    for i in np.random.default_rng(1).permutation(len(unsure))[:sample]:
        if time.perf_counter() - began > budget:
            break
        row, load_E, devices = unsure[i]
        row["optimum"] = solve(load_E, devices, row["ours"], seconds)
        row["weak"] = float(max(math.ceil(load_E.sum() / devices), load_E.max()))
    names = (*dict.fromkeys(r["family"] for r in rows), "all")
    return {n: _balance_of([r for r in rows if n in (r["family"], "all")]) for n in names}


def _balance_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one family."""
    over = np.array([r["ours"] / r["bound"] for r in rows]) - 1
    eplb_over = np.array([r["eplb"] / r["bound"] for r in rows]) - 1
    asked = [r for r in rows if "optimum" in r]
    proven = [r["ours"] / r["optimum"].load - 1 for r in asked if r["optimum"].proven]
    ended = [r for r in asked if not r["optimum"].proven]
    return {
        "loads": len(rows),
        "worse than EPLB": sum(r["ours"] > r["eplb"] * (1 + 1e-9) for r in rows),
        "better": sum(r["ours"] < r["eplb"] * (1 - 1e-9) for r in rows),
        "with groups": sum("by groups" in r for r in rows),
        "worse than EPLB by groups": sum(r["ours"] > r.get("by groups", math.inf) for r in rows),
        "over bound": float(over.mean()),
        "EPLB over bound": float(eplb_over.mean()),
        "within 1 % by bound": float((over <= 0.01).mean()),
        "asked": len(asked),
        "proven": len(proven),
        "over optimum, max": max(proven, default=None),
        "over 1 %": sum(p > 0.01 for p in proven),
        "solver ended": len(ended),
        "then over its bound, max": max((r["ours"] / r["optimum"].load - 1 for r in ended), default=None),
        "over mean or hottest, max": max((r["ours"] / r["weak"] - 1 for r in ended), default=None),
    }  # fmt: skip


def replicas() -> dict[str, Any]:
    """Give each device one spare slot for a copy of a hot expert; compare with EPLB's replication and packing."""
    random, found = np.random.default_rng(2), {}
    for experts, devices in ((64, 16), (256, 32), (256, 64)):
        load_LE = drawn(random, zipf(random, 61, experts))
        ours_L = copied(load_LE, devices, 1)[2]
        theirs = []
        for loads in load_LE.tolist():
            each = eplb.spread(loads, eplb.replicate(loads, experts + devices))
            theirs.append(eplb.busiest(each, eplb.pack(each, devices), devices))
        mean_L = load_LE.sum(axis=1) / devices
        found[f"{experts} / {devices}"] = {
            "without": float((lower_bound(load_LE, devices) / mean_L).mean()),
            "ours": float((ours_L / mean_L).mean()),
            "eplb": float((np.array(theirs) / mean_L).mean()),
            "worse_than_eplb": int((ours_L > np.array(theirs) * (1 + 1e-9)).sum()),
        }
    return found


def moved(decisions: int) -> dict[str, Any]:
    """Plan so many times in a row over changing loads; count the experts that move at EPLB's balance, and at ours.

    For eight experts `fewest` counts those that move at least, by anyone who knows all loads beforehand.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, devices, load_TLE in sequences(decisions):
        start_LE = SlotMap.identity(*load_TLE.shape[1:], devices).owners.astype(np.int64)
        now = {"eplb": start_LE, "at_eplb_balance": start_LE, "at_best_balance": start_LE}
        goals: list[NDArray[np.float64]] = []
        for load_LE in load_TLE:
            eplb_LE = np.array([eplb.pack(loads, devices) for loads in load_LE.tolist()])
            goal_L = device_loads(load_LE, eplb_LE, devices).max(axis=1)
            goals.append(goal_L)
            then = {
                "eplb": eplb_LE,
                "at_eplb_balance": choose(load_LE, now["at_eplb_balance"], devices, FREE, goal_L),
                "at_best_balance": choose(load_LE, now["at_best_balance"], devices, FREE),
            }
            for who, owner_LE in then.items():
                counts[name][who] += int((owner_LE != now[who]).sum())
                assert (
                    device_loads(load_LE, owner_LE, devices).max(axis=1) <= goal_L * (1 + 1e-9)
                ).all()
            now = then
        if load_TLE.shape[2] == 8:
            goal_TL = np.array(goals)
            for layer, start_E in enumerate(start_LE):
                given = load_TLE[:, layer], start_E, goal_TL[:, layer], devices
                counts[name]["fewest"] += fewest_moves(*given)
    counts["all"] = {who: sum(c[who] for c in counts.values()) for who in now}
    shares = {"share": "at_eplb_balance", "share_at_best": "at_best_balance", "least_share": "fewest"}  # fmt: skip
    return {
        name: {who: c[who] for who in now}
        | {share: c[who] / c["eplb"] if who in c else None for share, who in shares.items()}
        for name, c in counts.items()
    }


def forecasts(window: int = 4, ahead: int = 4) -> dict[str, Any]:
    """Place the experts of recorded runs by several forecasts; return busiest over mean in the records ahead."""
    weight_N = 0.9 ** np.arange(window)[::-1]
    line_N = np.arange(window) - (window - 1) / 2
    found: dict[str, Any] = {}
    for name, run in recorded().items():
        devices = run.shape[2] // (4 if run.shape[2] == 8 else 8)
        home_LE = SlotMap.identity(*run.shape[1:], devices).owners
        sums: dict[str, list[float]] = defaultdict(list)
        for now in range(window, len(run) - ahead):
            last_NLE, next_LE = run[now - window : now], run[now : now + ahead].sum(axis=0)
            slope_LE = np.tensordot(line_N, last_NLE, 1) / (line_N**2).sum()
            mean_LE = last_NLE.mean(axis=0)
            expected = {
                "last": last_NLE[-1],
                "mean": mean_LE,
                "exponential": np.tensordot(weight_N, last_NLE, 1),
                "line": np.maximum(mean_LE + slope_LE * (window + ahead) / 2, 1e-6),
            }
            owners = {k: choose(load_LE, home_LE, devices, FREE) for k, load_LE in expected.items()}
            for k, owner_LE in {"none": home_LE, **owners}.items():
                load_LD = device_loads(next_LE, owner_LE, devices)
                sums[k].append(float((load_LD.max(axis=1) / load_LD.mean(axis=1)).mean()))
        found[f"{name}, {devices} devices"] = {k: float(np.mean(v)) for k, v in sums.items()}
    return found


def speed(repeats: int = 9) -> dict[str, Any]:
    """Plan 61 layers of 256 experts on 64 devices, from the recipe's order; return milliseconds, elapsed and of the processor."""
    random, found = np.random.default_rng(4), {}
    before = SlotMap.identity(61, 256, 64)
    made = {"zipf": zipf, "shifting": shifting, "random": uneven}
    for name, make in {"warm-up": zipf, **made}.items():
        elapsed: list[float] = []
        processor: list[float] = []
        for _ in range(repeats):
            load_NLE = drawn(random, make(random, 61, 256))[None]
            began, used = time.perf_counter(), time.process_time()
            plan(load_NLE, before, FREE)
            elapsed.append((time.perf_counter() - began) * 1e3)
            processor.append((time.process_time() - used) * 1e3)
        found[name] = {
            "median, elapsed ms": float(np.median(elapsed)),
            "median, processor ms": float(np.median(processor)),
            "slowest, processor ms": max(processor),
        }
    return {name: found[name] for name in made}


def _show(result: dict[str, Any]) -> None:
    """Print each part as a table."""
    for part, rows in result.items():
        if not isinstance(rows, dict):
            print(f"{part}: {rows}")
            continue
        print(f"\n{part}")
        heads = list(next(iter(rows.values())))
        print("| | " + " | ".join(heads) + " |\n|" + "---|" * (len(heads) + 1))
        for name, row in rows.items():
            cells = [
                "-" if (v := row[h]) is None else f"{v:.4g}" if isinstance(v, float) else str(v)
                for h in heads
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")


def _run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    result["speed"] = speed()
    result["forecasts"] = forecasts()
    result["moved"] = moved(args.decisions)
    result["replicas"] = replicas()
    result["balance"] = balance(args.loads, args.sample, args.seconds, args.budget)
    result["seconds"] = round(time.perf_counter() - began, 1)
    _show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--decisions", type=int, default=20, help="plans in a row (default 20)")
    parser.add_argument("--loads", type=int, default=10_000, help="loads to place (default 10000)")
    parser.add_argument(
        "--sample",
        type=int,
        default=500,
        help="of those that the bound leaves open, solved exactly (default 500)",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of the solver for each (default 10)"
    )
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds of the solver for all (default 480)"
    )
    parser.add_argument("--json", help="file to write")
    return answer(parser, _run, argv)


if __name__ == "__main__":
    raise SystemExit(main())

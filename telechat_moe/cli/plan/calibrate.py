"""`telechat-moe plan calibrate`: a device description by measurements: of this machine, or of the user's runs and collectives."""

import argparse
import math
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
A SOURCE is a CSV table with the columns of `plan score --help`; a log of MindFormers, MindSpeed or Megatron-LM, or a run of
ours (metrics.jsonl or its folder), with the RECIPE that it ran; or what hccl_test or nccl-tests printed, with the command
in a line above the table. All steps are of one software stack: another stack is another description.
Without --from it measures this machine's CPU in less than a minute, which needs mindspore; docs/plan_step.md says what.
"""


def run(args: argparse.Namespace) -> int:
    """Calibrate by the sources or by this machine; return the exit code."""
    if bool(args.sources) != bool(args.device):
        raise UsageError("--device NAME and --from SOURCE go together, expected both or neither")
    if args.sources:
        return _by_sources(args)
    if args.name or args.overrides:
        raise UsageError("RECIPE and --set are of a run, expected with --device and --from")
    return _this_machine(args)


def _by_sources(args: argparse.Namespace) -> int:
    """Narrow the device's posterior, write, print what changed."""
    from telechat_moe.tools.plan.cost import calibration
    from telechat_moe.tools.plan.cost.device import load_device

    device, out = load_device(args.device), Path(args.out or "calibrated.yaml")
    prior = calibration.prior_of(args.device)
    rows = calibration.read_sources(args.sources, args.device, args.name, args.overrides)
    before = rows.predicted(device) - rows.logarithms
    posterior = calibration.update(prior, device, rows)
    beside = calibration.write(posterior, args.device, out, args.sources)
    after = rows.predicted(load_device(out)) - rows.logarithms
    data: dict[str, Any] = {
        "out": str(out),
        "posterior": str(beside),
        "constants": [
            {
                "constant": name,
                "before": _interval(prior, name),
                "after": _interval(posterior, name),
            }
            for name in posterior.names
        ],
        "rows": [
            {
                "row": name,
                "measured_s": math.exp(x),
                "before": math.expm1(p),
                "after": math.expm1(q),
            }
            for name, x, p, q in zip(rows.names, rows.logarithms, before, after, strict=True)
        ],
    }
    if not write_json(args.json, data):
        _show_changes(data)
    return 0


def _interval(posterior: Any, name: str) -> dict[str, float]:
    return dict(zip(("median", "low", "high"), posterior.interval(name), strict=True))


def _show_changes(data: dict[str, Any]) -> None:
    cells = [
        [x["constant"]]
        + [
            f"{x[when]['median']:.3g} ({x[when]['low']:.3g} to {x[when]['high']:.3g})"
            for when in ("before", "after")
        ]
        for x in data["constants"]
    ]
    show_table(["constant, 90 % interval", "before ", "after "], cells)
    print()
    cells = [
        [x["row"], f"{x['measured_s']:.4g} s"]
        + [f"{x[when] * 100:+.1f} %" for when in ("before", "after")]
        for x in data["rows"]
    ]
    show_table(["row", "measured ", "error before ", "after "], cells)
    count = len(cells)
    means = [sum(abs(x[when]) for x in data["rows"]) / count for when in ("before", "after")]
    print(f"\nmean error of {count} rows: {means[0]:.1%} before, {means[1]:.1%} after")
    [factor] = [x["after"] for x in data["constants"] if x["constant"] == "stack_factor"]
    limits = f"{factor['low']:.3f} to {factor['high']:.3f}"
    print(
        f"this software takes {factor['median']:.3f} ({limits}) times as long as by these constants"
    )
    print(f"wrote {data['out']} and {data['posterior']}")


def _this_machine(args: argparse.Namespace) -> int:
    """Measure, write, print."""
    from telechat_moe.tools.plan.cost import this_machine as here

    with bars() as move:

        def progress(_: str, completed: int, total: int) -> None:
            move("measuring", completed, total)

        recipe = args.recipe or here.RECIPE
        calibration: Any = here.calibrate(recipe, operators=args.operators, progress=progress)
    out = args.out or "this-machine.yaml"
    write_text("--out ", out, lambda: here.as_yaml(calibration))
    measured, keys = calibration.products, ("step", "measured_s", "fitted_s")
    products = [{"m": m, "n": n, "k": k, "flops_per_s": rate} for (m, n, k), rate in measured]
    steps = [dict(zip(keys, step, strict=True)) for step in calibration.steps]
    if write_json(args.json, {"out": out, "products": products, "steps": steps}):
        return 0
    rows = [[f"{m} x {n} x {k}", f"{rate / 1e9:.1f} GFLOP/s"] for (m, n, k), rate in measured]
    show_table(["product (m x n x k)", "rate "], rows)
    print()
    differences = [
        [name, f"{measured:.3f} s", f"{fitted:.3f} s", f"{(fitted / measured - 1) * 100:+.1f} %"]
        for name, measured, fitted in calibration.steps
    ]
    show_table(["step", "measured ", "fitted ", "difference "], differences)
    print(f"\nwrote {out}")
    return 0


VERB = Verb(
    name="calibrate",
    help="write a device description by your measurements, or of this machine",
    description="Narrow what is known of a device by measured steps and collectives, and write its description for the other "
    "sub-verbs; without --from, measure this machine.",
    notes=NOTES,
    examples="telechat-moe plan calibrate --device ascend-910b --from steps.csv hccl_test.log --out ours.yaml\n"
    "telechat-moe plan calibrate --out this-machine.yaml",
    exits={1: "the measurement failed"},
    json_keys="out, posterior, constants (constant, before, after), rows (row, measured_s, before, after); "
    "of this machine: out, products (m, n, k, flops_per_s), steps (step, measured_s, fitted_s).",
    overrides="override a value of RECIPE",
    arguments=[
        arg("name RECIPE", "recipe that a log or a run among the sources ran", nargs="?"),
        arg("--device D", "description whose constants are known a priori, a name or a file"),
        arg(
            "--from SOURCE",
            "tables of steps, logs, runs, output of hccl_test and nccl-tests",
            [],
            nargs="+",
            action="extend",
            dest="sources",
        ),
        arg(
            "--out FILE",
            "default calibrated.yaml (FILE.posterior.json beside it); this-machine.yaml",
        ),
        arg("--recipe RECIPE", "recipe whose matrix products are measured (default pretrain_19m)"),
        arg(
            "--operators",
            "of the steps: fused as `train` runs them in one process, plain as `run-sharded` does (default fused)",
            "fused",
            choices=["fused", "plain"],
        ),
    ],
    run=run,
)

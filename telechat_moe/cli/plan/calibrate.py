"""`telechat-moe plan calibrate`: a device description of this machine."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; return the exit code."""
    from telechat_moe.tools.plan.cost import this_machine as here

    with bars() as move:

        def progress(_: str, completed: int, total: int) -> None:
            move("measuring", completed, total)

        recipe = args.recipe or here.RECIPE
        calibration: Any = here.calibrate(recipe, operators=args.operators, progress=progress)
    write_text("--out ", args.out, lambda: here.as_yaml(calibration))
    measured, keys = calibration.products, ("step", "measured_s", "fitted_s")
    products = [{"m": m, "n": n, "k": k, "flops_per_s": rate} for (m, n, k), rate in measured]
    steps = [dict(zip(keys, step, strict=True)) for step in calibration.steps]
    if write_json(args.json, {"out": args.out, "products": products, "steps": steps}):
        return 0
    rows = [[f"{m} x {n} x {k}", f"{rate / 1e9:.1f} GFLOP/s"] for (m, n, k), rate in measured]
    show_table(["product (m x n x k)", "rate "], rows)
    print()
    differences = [
        [name, f"{measured:.3f} s", f"{fitted:.3f} s", f"{(fitted / measured - 1) * 100:+.1f} %"]
        for name, measured, fitted in calibration.steps
    ]
    show_table(["step", "measured ", "fitted ", "difference "], differences)
    print(f"\nwrote {args.out}")
    return 0


VERB = Verb(
    name="calibrate",
    help="measure this machine and write its device description",
    description="Write a device description of this machine for the other sub-verbs.",
    notes="Takes less than a minute on an idle machine and needs mindspore; docs/plan_step.md says what is measured.",
    examples="telechat-moe plan calibrate --out this-machine.yaml\n"
    "telechat-moe plan simulate telechat3_moe/pretrain_19m.yaml --device this-machine.yaml",
    exits={1: "the measurement failed"},
    json_keys="out, products (m, n, k, flops_per_s), steps (step, measured_s, fitted_s).",
    arguments=[
        arg("--out FILE", "default this-machine.yaml", "this-machine.yaml"),
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

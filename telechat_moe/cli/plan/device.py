"""`telechat-moe plan device`: what is known of a device, and from what."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb

FIGURES = ("memory_bytes", "memory_bandwidth", "node_devices", "intra_bandwidth", "inter_bandwidth")


def run(args: argparse.Namespace) -> int:
    """Print the description and the posterior of the constants; return the exit code."""
    from telechat_moe.tools.plan.cost.device import load_device
    from telechat_moe.tools.plan.cost.posterior import load_posterior

    device, posterior = load_device(args.name), load_posterior(args.name)
    figures: dict[str, float] = {name: getattr(device, name) for name in FIGURES}
    lines = _constants(device, posterior)
    rows: dict[str, int] = posterior.features if posterior else {}
    data = {
        "device": device.name,
        "peak_flops": device.peak_flops,
        "figures": figures,
        "sources": device.sources,
    }
    if write_json(args.json, {**data, "constants": lines, "rows": rows}):
        return 0
    peaks = {f"peak_flops, {kind}": value for kind, value in device.peak_flops.items()}
    for name, value in {**peaks, **figures}.items():
        source = device.sources.get(name.split(",")[0])
        print(f"{name}: {value:.4g}" + (f" ({source})" if source else ""))
    print()
    if posterior:
        _show_posterior(lines, rows)
    else:
        show_table(
            ["constant", "shipped "], [[x["constant"], f"{x['shipped']:.4g}"] for x in lines]
        )
        print("\nno posterior: the constants of this description have no intervals")
    return 0


def _constants(device: Any, posterior: Any) -> list[dict[str, Any]]:
    """Return each constant with its shipped value and, where there is a posterior, what it says."""
    from dataclasses import asdict

    shipped: dict[str, float] = asdict(device.constants.slowed(1 / device.stack_factor))
    shipped["stack_factor"] = device.stack_factor
    if not posterior:
        return [{"constant": name, "shipped": value} for name, value in shipped.items()]
    lines: list[dict[str, Any]] = []
    for name in posterior.names:
        middle, low, high = posterior.interval(name)
        prior = posterior.priors[name]
        lines.append(
            {
                "constant": name, "shipped": shipped[name], "median": middle, "low": low, "high": high,
                "from_rows": posterior.known_from_rows(name), "prior": prior.value, "prior_spread": prior.spread,
                "source": prior.source,
            }
        )  # fmt: skip
    return lines


def _show_posterior(lines: list[dict[str, Any]], rows: dict[str, int]) -> None:
    heads = ["constant", "shipped ", "median ", "90 % interval ", "from rows ", "prior"]
    cells = [
        [
            x["constant"],
            f"{x['shipped']:.3g}",
            f"{x['median']:.3g}",
            f"{x['low']:.3g} to {x['high']:.3g}",
            f"{x['from_rows']:.0%}",
            f"{x['prior']:.3g} ({x['source'][:60]})",
        ]
        for x in lines
    ]
    show_table(heads, cells)
    have = ", ".join(f"{name} {count}" for name, count in rows.items() if name != "rows" and count)
    lack = ", ".join(name for name, count in rows.items() if not count)
    print(f"\n{rows['rows']} measured steps stand behind them: {have}")
    if lack:
        print(f"none has: {lack}")


VERB = Verb(
    name="device",
    help="print what is known of a device's constants, and from what",
    description="Print a device's description, and for each constant of the cost model the shipped value, its posterior and what "
    "determines it: the share of the prior's variance that measured steps removed.",
    examples="telechat-moe plan device ascend-910b",
    exits={3: "no such device"},
    json_keys="device, peak_flops, figures, sources, constants, rows",
    arguments=[arg("NAME", "description, a name or a file")],
    run=run,
)

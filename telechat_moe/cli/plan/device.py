"""`telechat-moe plan device`: what is known of a device, and from what."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb


def run(args: argparse.Namespace) -> int:
    """Print the description and the posterior of the constants; return the exit code."""
    from dataclasses import asdict

    from telechat_moe.tools.plan.cost.device import load_device
    from telechat_moe.tools.plan.cost.posterior import load_posterior

    device, posterior = load_device(args.name), load_posterior(args.name)
    used: dict[str, float] = asdict(device.constants)
    lines: list[dict[str, Any]] = []
    for name in posterior.names if posterior else used:
        line: dict[str, Any] = {"constant": name, "shipped": used[name]}
        if posterior:
            middle, low, high = posterior.interval(name)
            prior = posterior.priors[name]
            line |= {
                "median": middle,
                "low": low,
                "high": high,
                "from_rows": posterior.known_from_rows(name),
            }
            line |= {"prior": prior.value, "prior_spread": prior.spread, "source": prior.source}
        lines.append(line)
    figures: dict[str, Any] = {
        name: getattr(device, name)
        for name in ("peak_flops", "memory_bytes", "memory_bandwidth", "node_devices", "intra_bandwidth", "inter_bandwidth")
    }  # fmt: skip
    features = posterior.features if posterior else {}
    data = {
        "device": device.name,
        "figures": figures,
        "sources": device.sources,
        "constants": lines,
        "rows": features,
    }
    if write_json(args.json, data):
        return 0
    for name, value in figures.items():
        peaks: Any = value.items() if isinstance(value, dict) else [("", value)]
        shown = ", ".join(f"{kind} {number:.4g}".strip() for kind, number in peaks)
        print(f"{name}: {shown}" + (f" ({device.sources[name]})" if name in device.sources else ""))
    print()
    if not posterior:
        show_table(
            ["constant", "shipped "], [[x["constant"], f"{x['shipped']:.4g}"] for x in lines]
        )
        print("\nno posterior: the constants of this description have no intervals")
        return 0
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
    have = ", ".join(
        f"{name} {count}" for name, count in features.items() if name != "rows" and count
    )
    lack = ", ".join(name for name, count in features.items() if not count)
    print(f"\n{features['rows']} measured steps stand behind them: {have}")
    if lack:
        print(f"none has: {lack}")
    return 0


VERB = Verb(
    name="device",
    help="print what is known of a device's constants, and from what",
    description="Print a device's description, and for each constant of the cost model the shipped value, its posterior and what "
    "determines it: the share of the prior's variance that measured steps removed.",
    examples="telechat-moe plan device ascend-910b",
    exits={3: "no such device"},
    arguments=[arg("NAME", "description, a name or a file")],
    run=run,
)

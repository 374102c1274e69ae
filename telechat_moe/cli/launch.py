"""`telechat-moe launch`: start a recipe with msrun on this machine or several, watch it, go on after a death."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe.cli.arguments import add_start, add_trainer, arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

if TYPE_CHECKING:
    from telechat_moe.launch.commands import LaunchNode
    from telechat_moe.launch.job import LaunchPlan
    from telechat_moe.recipe import Recipe

NOTES = """\
A hostfile has a line for each host, such as `worker-1 slots=8 addr=10.0.0.1`. output_dir must be one folder that all hosts see;
package and Python must be at the same paths on all of them.

A process that dies or hangs is named with its host, its step and the last lines of its log, and everything is stopped. With
--restart N the run goes on from the last good checkpoint until N restarts in a row brought no new one. Ctrl-C stops after the
step and saves. docs/operations.md has the details.
"""


def run(args: argparse.Namespace) -> int:
    """Launch; return the exit code."""
    from telechat_moe.cli.judge import require
    from telechat_moe.launch import commands, hosts
    from telechat_moe.launch import job as launch
    from telechat_moe.recipe.uses import trainer_of, use_with
    from telechat_moe.tools.plan.schedules.ranks import rank_orders

    if args.restart < 0:
        raise UsageError(f"--restart {args.restart}: expected 0 or more")
    known_hosts = hosts.read_hosts(Path(args.nodes)) if args.nodes else None
    recipe = require(
        args.recipe,
        args.overrides,
        use=use_with(args.through),
        resume=args.resume,
        overwrite=args.overwrite,
        allow_outside=args.allow_outside,
        local=known_hosts is None or known_hosts[0].is_here(),
        alone=known_hosts is None,
    )
    chosen = launch.this_machine(recipe.devices)
    if known_hosts is not None:
        chosen = hosts.choose(known_hosts, recipe.devices, Path(args.nodes))
    plan = launch.LaunchPlan(
        nodes=commands.make_nodes(chosen, args.master_port),
        through=trainer_of(recipe, args.through),
        bind=args.bind is not None,
        restarts=args.restart,
        shell=args.remote_shell or commands.SSH,
        logs=Path(args.logs) if args.logs else None,
        allow_outside=args.allow_outside,
    )
    if args.only_print:
        _print_commands(recipe, plan, args.resume, args.overwrite)
        return 0
    for node in plan.nodes:
        for line in _binding(plan, node):
            print(line, file=sys.stderr)
    orders = rank_orders(recipe) if plan.through == "own" else None
    start = {"resume": args.resume, "overwrite": args.overwrite}
    summary = launch.train(recipe, plan=plan, orders=orders, **start)
    stdout_is_taken = write_json(args.json, summary)
    if not summary["finished"]:
        return 130
    if not stdout_is_taken:
        print(f"done: {recipe.output_dir}")
    return 0


def _print_commands(recipe: "Recipe", plan: "LaunchPlan", resume: bool, overwrite: bool) -> None:
    """Check the recipe, write it with its overrides, and print a line for a shell on each host."""
    from telechat_moe.files import keep_others_out
    from telechat_moe.launch import job as launch

    keep_others_out()
    launch.check(recipe, plan, resume=resume, overwrite=overwrite)
    resolved = launch.write_resolved(recipe, Path(recipe.output_dir) / ".job")
    logs = plan.logs or Path(recipe.output_dir) / launch.LOGS
    program = plan.program(resolved, resume=resume, overwrite=overwrite)
    for node in plan.nodes:
        print(f"# on {node.host}: ranks {node.ranks.start} to {node.ranks.stop - 1}")
        for line in _binding(plan, node):
            print(f"# {line}")
        print(node.shell_line(logs.absolute(), program))


def _binding(plan: "LaunchPlan", node: "LaunchNode") -> list[str]:
    """Return what the processes of a host will be bound to, a line each; nothing if they will not be."""
    if not plan.bind:
        return []
    from telechat_moe.launch import binding

    if not node.is_here:
        return ["each process chooses its cores there, by the topology of that host"]
    return binding.plan(node.local, node.ranks.start)


VERB = Verb(
    name="launch",
    help="train a recipe with msrun on one or several machines",
    description="Start the processes of a recipe with msrun, monitor them, and restart after a process dies.",
    notes=NOTES,
    examples="telechat-moe launch my_recipe.yaml --restart 3\n"
    "telechat-moe launch my_recipe.yaml --nodes hosts --bind auto --print",
    exits={
        0: "trained",
        1: "stopped (not finite, disk full, a process died)",
        2: "usage (a port in use, ...)",
        3: "bad recipe, hostfile, data or checkpoint",
    },
    after_interruption="--resume continues from its last checkpoint, if it has saved one",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        add_start,
        add_trainer,
        arg("--nodes HOSTFILE", "machines (default: this one)"),
        arg("--print", "print the commands, start nothing", dest="only_print"),
        arg(
            "--bind",
            "bind each process to cores of its own, on the NUMA node of its NPU, and report what changes that; "
            "with --print, show the plan",
            nargs="?",
            const="auto",
            choices=("auto",),
        ),
        arg(
            "--restart N",
            "restart after a process dies, at most N times in a row without a new checkpoint (default 0)",
            0,
        ),
        arg(
            "--master-port P",
            "port of the scheduler (default: a free one if the first host is this machine, else 8118)",
            type=int,
        ),
        arg("--logs DIR", "folder for logs (default: output_dir/log)"),
        arg(
            "--remote-shell COMMAND",
            "command that runs a shell line on a host; {host} in it is replaced by the host, else the "
            "host is appended (default: ssh)",
        ),
    ],
    run=run,
)

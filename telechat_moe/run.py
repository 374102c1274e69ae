"""What ``msrun`` runs: one process of the training of a recipe.

::

    msrun --worker_num=2 --local_worker_num=2 --join=True python -m telechat_moe.run RECIPE
    python -m telechat_moe.run RECIPE                                   (a recipe for one device, without msrun)

The recipe is laid out for as many devices as there are processes. On Ascend each process compiles the graph of its rank; on CPU
process 0 compiles those of all, and the others wait for it, but for whole copies (``parallel_mode: 0``).
``--through mindformers``: MindFormers' trainer trains.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe import interruption
from telechat_moe.cli.arguments import add_overrides, add_start, add_trainer
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.files import check_private, keep_others_out
from telechat_moe.interruption import die_with_parent
from telechat_moe.launch.binding import Binding, conflicts, use_cores
from telechat_moe.launch.commands import environment
from telechat_moe.launch.rank import is_scheduler, meet, run_supervised
from telechat_moe.processes import CONTROL, SCHEDULER, Control, RankFailedError
from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.recipe.uses import trainer_of, use_with
from telechat_moe.recipe.written import check_written_paths
from telechat_moe.sharding.recipe import device_context, runs_natively
from telechat_moe.train.ranks import RankCoordinator

if TYPE_CHECKING:
    from telechat_moe.train.loop import Summary

COMPILE_S = 24 * 3600.0  # process 0 compiles the graphs of all ranks

EPILOG = """\
exit codes: 0 trained (or stopped between two steps, under msrun), 1 stopped (not finite, disk full), 2 usage, 3 bad recipe,
data or checkpoint, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    # No option may be the beginning of two of msrun's, which would refuse it even after the program.
    parser = argparse.ArgumentParser(
        prog="python -m telechat_moe.run",
        description="Train a recipe as one of the processes that msrun starts, or as the only one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="shipped recipe name or YAML file")
    add_overrides(parser)
    add_start(parser)
    add_trainer(parser)
    parser.add_argument(
        "--local-processes",
        type=int,
        metavar="N",
        help="processes on this machine, which share its cores (default: all that there are)",
    )
    parser.add_argument(
        "--bind-cores", action="store_true", help="bind each process to its own cores"
    )
    # Given by `telechat-moe launch`: it has made the control folder and the graphs.
    parser.add_argument("--nonce", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    args = parser().parse_args(argv)
    keep_others_out()
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings; read when it is imported
    try:
        return _run(args)
    except TelechatMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    role = os.environ.get("MS_ROLE")
    processes = int(os.environ.get("MS_WORKER_NUM", "1")) if role else 1
    recipe = load(args.recipe, args.overrides, use=use_with(args.through))
    through = trainer_of(recipe, args.through)
    local = args.local_processes or processes
    if local < 1:
        raise UsageError(f"--local-processes {local}: expected 1 or more")
    if args.bind_cores and through == "mindformers" and (problems := conflicts(recipe)):
        raise RecipeError(problems)
    binding = None
    if args.local_processes or args.bind_cores or recipe.context.device_target == "CPU":
        index = int(os.environ.get("DEVICE_ID", "0")) % local
        binding = use_cores(local, index, args.bind_cores and not is_scheduler())
    check_processes(recipe, processes, under_msrun=role is not None)
    if not args.allow_outside:
        check_written_paths(recipe)
    control = Control((Path(recipe.output_dir) / ".job").absolute() / CONTROL)
    if role:
        die_with_parent()
    if args.nonce and is_scheduler():  # with it the control folder
        control.begin(SCHEDULER)
    if through == "mindformers":
        return _through_mindformers(args, recipe, control, processes if role else 0, binding)
    if not role:
        return 0 if _train(recipe, args, RankCoordinator()).finished else 130
    if is_scheduler():
        meet(recipe.context.device_target)
        return 0
    return _as_worker(recipe, args, control, processes, binding)


def check_processes(recipe: Recipe, processes: int, *, under_msrun: bool) -> None:
    """Refuse a number of processes that is not the recipe's number of devices.

    Raises:
        BadInputError: Says what to change.
    """
    if recipe.devices == processes:
        return
    started = f"msrun started {processes}" if under_msrun else "this is one, without msrun"
    n = recipe.devices
    raise BadInputError(
        f"{recipe.source}: laid out for {n} device(s) ({recipe.degrees_text}), {started}; start "
        + (f"msrun --worker_num={n} --local_worker_num={n}" if n > 1 else "it without msrun")
        + ", let `telechat-moe launch` do it, or set the degrees so that their product is the number of processes"
    )


def _as_worker(
    recipe: Recipe,
    args: argparse.Namespace,
    control: Control,
    processes: int,
    binding: Binding | None,
) -> int:
    if args.nonce:  # with it the control folder; the launcher watches us from the first moment
        control.check_nonce(args.nonce)
        rank = int(os.environ["RANK_ID"])

        def work() -> None:
            meet(recipe.context.device_target, device_context(recipe))
            _train_rank(recipe, args, control, rank)

        return run_supervised(control, rank, work, binding=binding)
    meet(recipe.context.device_target, device_context(recipe))
    from mindspore.communication import get_rank

    from telechat_moe.launch.job import only_launch

    rank = int(get_rank())
    with ExitStack() as stack:
        try:
            if rank == 0:
                stack.enter_context(only_launch(Path(recipe.output_dir)))
            _agree(control, rank)
        except TelechatMoeError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
            os._exit(error.exit_code)  # MindSpore would wait for the others first
        train = partial(_train_rank, recipe, args, control, rank)
        return run_supervised(control, rank, train, binding=binding)


def _agree(control: Control, rank: int) -> None:
    """Make a new control folder on rank 0; wait for it on the others.

    What an earlier run left there must not be taken for this one's, so rank 0 draws a nonce and tells it to the others
    through MindSpore.
    """
    import numpy as np
    from mindspore import Tensor

    from telechat_moe.sharding.cells.collective import SumOverProcesses

    digits = [secrets.randbelow(1 << 20) if rank == 0 else 0 for _ in range(5)]
    total = SumOverProcesses()(Tensor(np.array(digits, np.float32))).asnumpy()  # exact: below 2^24
    nonce = "".join(f"{int(x):05x}" for x in total)
    if rank == 0:
        Control.fresh(control.folder.parent, nonce)
        return
    deadline = time.monotonic() + 300.0
    while control.read("nonce") != nonce:
        if time.monotonic() > deadline:
            control.check_nonce(nonce)
        time.sleep(0.05)


def _train_rank(recipe: Recipe, args: argparse.Namespace, control: Control, rank: int) -> None:
    """Train as one rank; the graphs are compiled where that was not done before."""
    ranks = RankCoordinator(control, rank, recipe.devices)
    if recipe.devices == 1:
        _train(recipe, args, ranks)
        return
    from telechat_moe.interop import hf
    from telechat_moe.train import preflight

    natively = runs_natively(recipe)
    if not args.nonce and rank == 0:  # else the launcher looked and compiled
        preflight.require(recipe, resume=args.resume, overwrite=args.overwrite, weights=hf.weights)
        if not natively:
            compile_in_subprocess(args.recipe, args.overrides)
    control.barrier("compiled", rank, recipe.devices, COMPILE_S)
    job = control.folder.parent
    if not natively:
        check_private(job / "ranks.json")
    _train(recipe, args, ranks, job)


def _train(
    recipe: Recipe, args: argparse.Namespace, ranks: RankCoordinator, job: Path | None = None
) -> "Summary":
    from telechat_moe.interop import hf
    from telechat_moe.train.trainer import Trainer

    return Trainer(
        recipe,
        resume=args.resume,
        overwrite=args.overwrite,
        plain=True,
        ranks=ranks,
        job=job,
        weights=hf.weights,
    ).run()


def compile_in_subprocess(recipe: str, overrides: Sequence[str]) -> None:
    """Write the job of a recipe in another process: MindSpore has met the other ranks in this one.

    Raises:
        RankFailedError: The process failed; carries its message.
    """
    sets = [x for pair in overrides for x in ("--set", pair)]
    command = [sys.executable, "-m", "telechat_moe.cli.job", recipe, *sets]
    process = subprocess.run(
        command, env=environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    sys.stderr.write(process.stderr)
    if process.returncode:
        errors = [x for x in process.stderr.splitlines() if x.startswith("error: ")]
        message = errors[-1].removeprefix("error: ") if errors else process.stderr[-1000:]
        raise RankFailedError(f"the graphs could not be compiled: {message}", process.returncode)


def _through_mindformers(
    args: argparse.Namespace,
    recipe: Recipe,
    control: Control,
    processes: int,
    binding: Binding | None,
) -> int:
    if args.overwrite:
        raise UsageError(
            "--overwrite goes with --through own; MindFormers' Trainer writes over what is there"
        )
    try:
        from telechat_moe.interop import mindformers_train
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--through mindformers needs the package {error.name}; pip install 'telechat-moe[mindformers]'"
        ) from error

    def do() -> None:
        resume = args.resume or bool(recipe.resume_training)
        mindformers_train.train(args.recipe, args.overrides, resume)

    if not args.nonce or is_scheduler() or not processes:
        do()
        return 0
    rank = int(os.environ["RANK_ID"])
    control.check_nonce(args.nonce)
    control.set_position(rank, "in MindFormers")
    return run_supervised(control, rank, do, can_stop=False, binding=binding)


if __name__ == "__main__":
    sys.exit(main() if "MS_ROLE" in os.environ else interruption.run(main))

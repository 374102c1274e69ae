"""Compile the graphs of a recipe, and do nothing else: ``python -m telechat_moe.cli.job RECIPE [--set KEY=VALUE]``.

Run by a process of a run that was started without them.
"""

import argparse
import sys
from pathlib import Path

from telechat_moe.errors import TelechatMoeError


def main() -> int:
    """Compile the graphs of a recipe; return the exit code."""
    from telechat_moe.launch.job import write_job
    from telechat_moe.recipe import load
    from telechat_moe.tools.plan.schedules.ranks import rank_orders

    parser = argparse.ArgumentParser(prog="python -m telechat_moe.cli.job")
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    try:
        recipe = load(args.recipe, args.overrides, use="train")
        write_job(recipe, Path(recipe.output_dir) / ".job", rank_orders(recipe))
    except TelechatMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

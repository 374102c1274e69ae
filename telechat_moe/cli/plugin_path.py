"""`telechat-moe plugin-path`: the folder that MindFormers loads our model from."""

import argparse
from typing import Any

EPILOG = """\
example:
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True run_mindformer.py \\
      --config my_recipe.yaml --register_path "$(telechat-moe plugin-path)"

run_mindformer.py comes with MindFormers' repository, not with its wheel. Without it:
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True \\
      -m telechat_moe.run my_recipe.yaml --through mindformers

exit codes: 0 ok
"""


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plugin-path",
        help="print the folder for run_mindformer.py --register_path",
        description="Print the folder that MindFormers' run_mindformer.py takes as --register_path.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the folder."""
    from telechat_moe.interop.mindformers_config import PLUGIN

    del args
    print(PLUGIN)
    return 0

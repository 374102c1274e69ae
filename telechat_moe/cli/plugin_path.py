"""`telechat-moe plugin-path`: the folder that MindFormers loads our model from."""

import argparse

from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.versions import warn_of_mindformers

NOTES = """\
run_mindformer.py comes with MindFormers' repository, not with its wheel. Without it:
  msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True \\
      -m telechat_moe.run my_recipe.yaml --through mindformers
"""


def run(args: argparse.Namespace) -> int:
    """Print the folder."""
    from telechat_moe.interop.mindformers_config import PLUGIN

    warn_of_mindformers()
    if not write_json(args.json, {"path": str(PLUGIN)}):
        print(PLUGIN)
    return 0


VERB = Verb(
    name="plugin-path",
    help="print the folder for run_mindformer.py --register_path",
    description="Print the folder that MindFormers' run_mindformer.py takes as --register_path.",
    notes=NOTES,
    examples="msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --join=True run_mindformer.py \\\n"
    '    --config my_recipe.yaml --register_path "$(telechat-moe plugin-path)"',
    json_keys="path.",
    run=run,
)

"""`telechat-moe align map RECIPE`: which tensors of ours are which of Hugging Face's, for `align bisect --map`."""

import argparse
import json

from telechat_moe.cli.output import write_json, write_text
from telechat_moe.cli.verb import Verb

NOTES = """\
FILE is JSON: a list of {"name", "reference" (Hugging Face's run), "target" (ours), "transposed", "sorted"}.
Reference: a capture of transformers' DeepseekV3ForCausalLM with --modules; target: a capture of RECIPE in one
process.
"""
EXAMPLES = """\
telechat-moe align map mine.yaml hf_map.json
telechat-moe align bisect hf ours --map hf_map.json
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to write")


def run(args: argparse.Namespace) -> int:
    """Write the map; return the exit code."""
    from telechat_moe.recipe import load
    from telechat_moe.tools.align.judge.hf_map import hf_map

    recipe = load(args.recipe, args.overrides, use="weights")
    entries = hf_map(recipe.model_config)
    write_text("", args.file, lambda: json.dumps(entries, indent=1) + "\n")
    if not write_json(args.json, {"file": args.file, "tensors": len(entries)}):
        print(f"{args.file}: {len(entries)} tensors")
    return 0


VERB = Verb(
    name="map",
    help="write which tensors of ours are which of Hugging Face's",
    description="Write which tensors of a run of RECIPE are which of a run of Hugging Face's model.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={3: "bad recipe"},
    json_keys="file, tensors (their number).",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=_arguments,
    run=run,
)

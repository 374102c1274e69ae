"""`telechat-moe align map`: which tensors of a run are which of a run of another framework, for `align bisect --map`."""

import argparse
from pathlib import Path

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import write_json, write_text
from telechat_moe.cli.verb import Verb

NOTES = """\
Weights are paired by their names in transformers, Megatron-Core, MindFormers and this package, others by their values
in the first step that both dumps have: nearly equal rows in any order, so that transposed, stacked and fused weights
(q/k/v, gate and up, experts) are found. The map has their gradients, states, what enters and leaves the calls that use
them, the outputs of modules with known names, and the loss.

FILE is JSON: a list of {"name", "reference", "target"} with names "KEY PLACE" (KEY may have *), "weight NAME PLACE",
"use NAME operand" or "use NAME result", maybe several in a list; and "transposed", "target_transposed", "sorted",
"width", "rows", "joined" (`tools/align/maps/links.py`). It may be edited.
"""


def run(args: argparse.Namespace) -> int:
    """Write the map; return the exit code."""
    from telechat_moe.tools.align.dump import summary
    from telechat_moe.tools.align.maps.tensor_map import as_json, tensor_map

    links = tensor_map(summary.read(Path(args.reference)), summary.read(Path(args.target)))
    write_text("", args.file, lambda: as_json(links))
    if not write_json(args.json, {"file": args.file, "tensors": len(links)}):
        print(f"{args.file}: {len(links)} tensors")
    return 0


VERB = Verb(
    name="map",
    help="write which tensors of two runs of different frameworks are the same",
    description="Write which tensors of REFERENCE are which of TARGET, a run that was written for another framework.",
    notes=NOTES,
    examples="telechat-moe align map hf ours map.json\n"
    "telechat-moe align bisect hf ours --map map.json",
    exits={3: "bad input, or no weight of one run is one of the other's"},
    json_keys="file, tensors (their number).",
    arguments=[
        arg("REFERENCE", "dump of the run that is trusted"),
        arg("TARGET", "dump of the run to judge"),
        arg("FILE", "file to write"),
    ],
    run=run,
)

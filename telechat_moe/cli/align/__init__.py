"""`telechat-moe align <sub-verb>`: numerical verification across platforms and layouts.

Each sub-verb is a module here with a `VERB`; heavy imports stand inside its run function.
"""

from telechat_moe.cli.align import bisect, capture, loss, phases, show
from telechat_moe.cli.verb import Verb

MODULES = (capture, show, bisect, loss, phases)

VERB = Verb(
    name="align",
    help="name the operator that diverged between two platforms or layouts",
    description="Compare runs operator by operator, on any platform and layout. Dumps alone are `bisect`.",
    examples="telechat-moe align inspect dump\n"
    "telechat-moe align golden_dump dump --html align.html",
    exits={0: "pass", 1: "diverged", 4: "inconclusive"},
    default="bisect",
    removed={
        "convert": "`align inspect DUMP --out OUT` writes a dump as a table or a folder of msprobe",
        "map": "`align REFERENCE TARGET` makes the map itself; --map-out FILE writes it",
        "merge": "`align REFERENCE TARGET` joins the shards itself; --layouts FILE names layouts that a dump lacks",
    },
    subverbs=[module.VERB for module in MODULES],
)

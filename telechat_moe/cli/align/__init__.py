"""`telechat-moe align <sub-verb>`: numerical verification across platforms and layouts.

Each sub-verb is a module here with a `VERB`; heavy imports stand inside its run function.
"""

from telechat_moe.cli.align import bisect, capture, convert, loss, map, merge, phases, show
from telechat_moe.cli.verb import Verb

MODULES = (capture, show, map, merge, bisect, loss, convert, phases)

VERB = Verb(
    name="align",
    help="name the operator that diverged between two platforms or layouts",
    description="Compare runs operator by operator, on any platform and layout. Dumps alone are `bisect`.",
    examples="telechat-moe align inspect dump\n"
    "telechat-moe align golden_dump dump --html align.html",
    exits={0: "pass", 1: "diverged", 4: "inconclusive"},
    default="bisect",
    subverbs=[module.VERB for module in MODULES],
)

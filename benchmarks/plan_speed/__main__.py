"""Speed of the planner's two inner loops: `python -m benchmarks.plan_speed evaluation|placement`."""

import sys

from benchmarks.plan_speed import evaluation, placement

COMMANDS = {"evaluation": evaluation.main, "placement": placement.main}

if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in COMMANDS]:
        raise SystemExit(f"usage: python -m benchmarks.plan_speed {{{','.join(COMMANDS)}}} ...")
    COMMANDS[sys.argv.pop(1)]()

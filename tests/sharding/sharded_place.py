"""Build and place models without compiling them: ``python sharded_place.py OUT``; writes what was refused.

A program of its own, because a simulated device leaves marks on a process.
"""

import pickle
import sys
from pathlib import Path
from unittest import mock

import sharded_run as run

from telechat_moe.errors import BadInputError
from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.processes import in_children
from telechat_moe.sharding.layouts import TABLE
from telechat_moe.sharding.recipe import mesh_of, parallel_context

TARGETS = ("CPU", "Ascend")
# Forgotten on purpose: a row of the table, and one of its primitives.
FORGOTTEN = [("Block", "add_ffn"), ("Experts", "cast_up"), ("Router", "gate"), ("RMSNorm", "scale")]


def refusal(name, target, forgotten=None):
    """Return why the last rank of a layout is refused; empty if it is not."""
    import mindspore as ms

    from telechat_moe.train.rank_graph import build_step

    recipe = run.recipe(run.LAYOUTS[name], 4)
    devices = mesh_of(recipe).devices
    rank = devices - 1
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        device_num=devices,
        global_rank=rank,
        **parallel_context(recipe),
    )
    SimulatedDevice(rank, devices, library())
    rows = {}
    if forgotten is not None:
        row, primitive = forgotten
        rows = {row: {n: rule for n, rule in TABLE[row].items() if n != primitive}}
    with mock.patch.dict(TABLE, rows):
        try:
            build_step(recipe, rank, target=target)
        except BadInputError as error:
            return str(error)
    return ""


def main(out):
    """Place every layout for both targets, and one with something forgotten."""
    library()
    works = {(name, target): (name, target) for name in run.LAYOUTS for target in TARGETS}
    works |= {forgotten: ("dp2-ep2", "CPU", forgotten) for forgotten in FORGOTTEN}
    done = in_children([(lambda x=x: refusal(*x), str(x)) for x in works.values()], at_once=2)
    Path(out).write_bytes(pickle.dumps(dict(zip(works, done, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1])

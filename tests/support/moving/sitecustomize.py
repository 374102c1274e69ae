"""Python imports this at its start where `running.Moving` says so: experts move at random, and a rank stands still in a move.

The planner's answer depends on the loads alone, so that a run that was killed moves as one that was not.
"""

import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.moe import planner
from telechat_moe.moe.placement import SlotMap
from telechat_moe.train.expert_moves import MovingExperts

FILE = Path(os.environ["TELECHAT_MOE_MOVING"])
move = MovingExperts.move
moves = 0


def at_random(loads_NLE: Any, current: SlotMap, rule: Any) -> planner.Proposal:
    """Move all experts of some layers, in some steps."""
    random = np.random.default_rng(zlib.crc32(loads_NLE[-1].tobytes()))
    slots = current.slots.copy()
    for layer in range(len(slots)):
        if random.random() < 0.6:
            slots[layer] = random.permutation(slots.shape[1])
    zero = np.zeros(len(slots))
    return planner.Proposal(SlotMap(slots, current.devices), zero, zero, zero, zero)


def stand(self: MovingExperts, new: SlotMap) -> None:
    """Let rank 1 stand still in a move, where one of its tensors has its new rows."""
    global moves
    moves += 1
    put, tensors = self.program.put, 0

    def put_and_stand(name: str, shard: Any) -> None:
        nonlocal tensors
        put(name, shard)
        tensors += 1
        here = FILE.with_suffix(".here")
        if tensors == 1 and self.ranks.rank == 1 and str(moves) == FILE.read_text():
            here.touch()
            while here.exists():
                time.sleep(0.005)

    self.program.put = put_and_stand
    try:
        move(self, new)
    finally:
        self.program.put = put


planner.plan = at_random
MovingExperts.move = stand

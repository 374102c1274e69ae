"""Write the records of a simulated cluster as the timings of a run."""

import json
from pathlib import Path

import numpy as np

from telechat_moe import timings
from telechat_moe.tools.diagnose.records import Records


def write(records: Records, run: Path) -> None:
    """Write the timings of all ranks below the folder of a run."""
    names = ["step", *records.columns]
    (run / timings.FOLDER).mkdir(parents=True)
    for row, rank in enumerate(records.ranks.tolist()):
        header = {
            "version": timings.VERSION,
            "rank": rank,
            "ranks": len(records.ranks),
            "stage": int(records.stage[row]),
            "host": records.hosts[int(records.host[row])],
            "columns": names,
            "groups": {axis: int(numbers[row]) for axis, numbers in records.groups.items()},
        }
        rows = np.stack([records.steps, *(x[row] for x in records.columns.values())], 1)
        data = json.dumps(header).encode() + b"\n" + rows.astype(timings.TYPE).tobytes()
        timings.file_of(run, rank).write_bytes(data)

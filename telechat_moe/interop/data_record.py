"""Which data :class:`telechat_moe.interop.mindformers_loader.TelechatDataLoader` served, beside MindFormers' checkpoints.

MindFormers saves how many steps are done. A file lists, for each start of a run, after which step it was, with which data and
from which sample; so a later start finds its place at any step, and other data are recognised.
"""

import json
from pathlib import Path
from typing import Any

from telechat_moe import files
from telechat_moe.data.epochs import Epochs
from telechat_moe.errors import BadInputError
from telechat_moe.reading import MALFORMED, parse_json

FILE = "telechat_data.json"


def write(root: Path, earlier: list[Any], step: int, batch: int, data: dict[str, Any]) -> None:
    """Write a start after those before it: after which step, in steps of how many samples, and the state of the loader."""
    root.mkdir(parents=True, exist_ok=True)
    starts = [*earlier, {"step": step, "global_batch": batch, "data": data}]
    files.write_atomic(root / FILE, json.dumps(starts, indent=1) + "\n")


def starts_before(root: Path, step: int) -> list[Any]:
    """Return the starts from which the checkpoint of a step comes, the last of which served its data; none: no record.

    Raises:
        BadInputError: The record is broken.
    """
    path = root / FILE
    try:
        starts = list[Any](parse_json(path.read_bytes())) if path.exists() else []
        # The first may be of the step itself: where the run came from is not known.
        return [x for i, x in enumerate(starts) if x["step"] < step + (i == 0)]
    except (OSError, *MALFORMED) as error:
        raise BadInputError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); remove it, and the data go on at steps times batch"
        ) from None


def state_after(start: Any, step: int) -> dict[str, Any]:
    """Return the state of the data that a start began with, after a step."""
    state, batch = dict(start["data"]), start["global_batch"]
    epochs, samples = Epochs(state["samples_per_epoch"], batch), (step - start["step"]) * batch
    place = state["next_sample"] = epochs.after(state["next_sample"], samples)
    if "mixture" in state:
        state["mixture"] = [segment for segment in state["mixture"] if segment[0] < place]
    return state

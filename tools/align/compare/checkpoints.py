"""Tensors of checkpoints, merged from their shards as they are read."""

from typing import TYPE_CHECKING

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array
from telechat_moe.tensor_files import DTYPES, TensorEntry
from telechat_moe.tools.align.dump.logical import Logical, Shard, logical_regions
from telechat_moe.tools.align.dump.records import TensorRecord

if TYPE_CHECKING:
    from telechat_moe.checkpoint.stored import StoredTensor


def merged(tensor: "StoredTensor") -> Logical:
    """Return a tensor of a checkpoint, merged as it is read; bfloat16 as its bits.

    Raises:
        LayoutError: Its shards do not tile it.
    """
    shards = [Shard(i, _values(entry, tensor.dtype)) for i, (entry, _) in enumerate(tensor.shards)]
    regions = {i: region for i, (_, region) in enumerate(tensor.shards)}
    return logical_regions(shards, regions, tensor.shape)


def _values(entry: TensorEntry, kind: str) -> TensorRecord:
    """Return a shard, which is mapped when it is read."""
    dtype = np.dtype("<u2") if kind == "bfloat16" else DTYPES[entry.dtype]

    def load() -> Array:
        if not entry.nbytes:
            return np.zeros(entry.shape, dtype)
        try:
            return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{entry.file}: cannot be read ({error})") from None

    return TensorRecord(kind, entry.shape, read=load)

"""Flash attention of a process that has the last queries of a sequence: what the whole has there, in float64."""

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from mindspore import Tensor, nn

from telechat_moe.ops.attention import attention_reference
from telechat_moe.sharding.cells.flash import FirstKeys, FlashSlice


class Body(nn.Cell):
    """The body of a cell, which runs on slices elsewhere."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, *inputs):
        return self.cell.body(*inputs)


def test_the_last_queries_of_documents():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    first, start = 4, np.array([0, 0, 0, 3, 3, 3, 6, 6])
    query, key = np.arange(8)[:, None], np.arange(8)[None]
    visible = (key <= query) & (key >= start[:, None])
    mask = Tensor((~visible)[None, None, first:].astype(np.uint8))
    seen = Body(FirstKeys(first))(mask)
    np.testing.assert_array_equal(seen.asnumpy(), [start[first:]])
    q, k, v = (
        np.random.default_rng(i).standard_normal((1, 2, 8, n)) for i, n in enumerate((6, 6, 4))
    )
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    found = Body(FlashSlice(0.4, first))(Tensor(q[:, :, first:]), Tensor(k), Tensor(v), seen)
    expected = attention_reference(q, k, v, visible[None, None], 0.4)[:, :, first:]
    np.testing.assert_allclose(found.asnumpy(), expected, atol=1e-6)

"""Operators of an exported graph that make the host wait."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from host_syncs_of import host_syncs_of

EXPORT = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn, ops
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
class Inner(nn.Cell):
    def __init__(self):
        super().__init__()
        self.places, self.show, self.to_host, self.mul = ops.NonZero(), ops.Print(), ops.MoveTo(), ops.Mul()
        self.mul.set_device("CPU")
    def construct(self, x):
        self.show("x", x)
        return self.mul(self.places(x), 2), self.to_host(x, "CPU", True), self.to_host(x + 1, "CPU", False)
class Branch(nn.Cell):
    def construct(self, x):
        if x.sum() > 0:
            x = x * 2
        return x
class Plain(nn.Cell):
    def construct(self, x):
        return x * 2 + 1
class Net(nn.Cell):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def construct(self, x):
        return self.inner(x)
x = Tensor(np.ones((2, 3), np.float32))
for name, inner in (("waits", Inner()), ("branch", Branch()), ("plain", Plain())):
    ms.export(Net(inner), x, file_name=f"{sys.argv[1]}/{name}", file_format="MINDIR")
"""


def test_operators_that_reach_the_host(tmp_path: Path) -> None:
    script = tmp_path / "export.py"  # MindSpore reads the source of a cell
    script.write_text(EXPORT)
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    found = host_syncs_of((tmp_path / "waits.mindir").read_bytes())
    assert {(one.kind, one.module, one.times, one.waits) for one in found} == {
        ("NonZero", "inner", 1, True),
        ("MoveTo", "inner", 1, True),
        ("MoveTo", "inner", 1, False),
        ("Print", "inner", 1, False),
        ("Mul", "inner", 1, True),
        ("dynamic shapes", "all", 2, False),
    }
    (branch,) = host_syncs_of((tmp_path / "branch.mindir").read_bytes())
    assert (branch.kind, branch.times, branch.waits) == ("Switch", 1, True)
    assert not host_syncs_of((tmp_path / "plain.mindir").read_bytes())

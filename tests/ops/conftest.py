import os

import pytest

os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(scope="session", autouse=True)
def graph_mode():
    """MindSpore on CPU in graph mode, once for all tests of the folder."""
    ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")

import os

import pytest

os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(autouse=True)
def graph_mode(request):
    """MindSpore on CPU in graph mode for the tests that need it; the others run without it."""
    if request.node.get_closest_marker("mindspore"):
        ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")

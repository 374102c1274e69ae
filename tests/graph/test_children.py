"""Compiling from a process that has computed with MindSpore, whose threads a fork would lose."""

import os

import children_work as work
import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.processes import CompileError, has_computed, in_children

pytestmark = pytest.mark.mindspore


@pytest.fixture(autouse=True)
def _computed():
    import mindspore as ms

    one = ms.Tensor(np.ones((2, 2), np.float32))
    ms.ops.MatMul()(one, one).asnumpy()
    assert has_computed()


def test_works_in_another_process():
    calls = []
    results = work.answer(41, done=lambda: calls.append(os.getpid()))
    assert [value for _, value in results] == [41, 42]
    parents = {parent for parent, _ in results}
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert calls == [os.getpid()] * 2


def test_errors_come_back():
    with pytest.raises(BadInputError, match=r"^no such layout$"):
        work.refuse()


def test_a_killed_process_is_named():
    with pytest.raises(CompileError, match=r"process of die died \(SIGKILL\)"):
        work.die()


def test_an_error_in_a_cell_names_its_line():
    with pytest.raises(CompileError, match=r"children_work\.py:\d+: .*self\.factor / 2"):
        work.compile_none()


def test_a_fork_is_refused():
    with pytest.raises(RuntimeError, match="has computed"):
        in_children([(lambda: 1, "one")])

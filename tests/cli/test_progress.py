"""Progress where nobody looks at a terminal: lines in a log, few of them."""

import pytest

from telechat_moe.cli import progress

Capture = pytest.CaptureFixture[str]


class Clock:
    """Time that passes when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_long_things_are_told_one_by_one(clock: Clock, capsys: Capture):
    with progress.counted("compiling", 2) as one_more:
        assert capsys.readouterr().err == "compiling: 0 of 2 (0 s)\n"  # before the first minutes
        for number in (1, 2):
            clock.now += 40
            one_more()
            assert capsys.readouterr().err == f"compiling: {number} of 2 ({40 * number} s)\n"


def test_many_things_are_told_now_and_then(clock: Clock, capsys: Capture):
    """A line every half minute, and none for what is done before."""
    for _ in progress.tracked(range(100), "merging"):
        clock.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"merging: {n} of 100 ({n} s)" for n in (30, 60, 90)]
    for _ in progress.tracked(range(20), "merging"):
        clock.now += 1
    assert capsys.readouterr().err == ""


def test_two_counts_and_bytes(clock: Clock, capsys: Capture):
    with progress.bars(in_bytes=True) as move:
        for number in range(4):
            clock.now += 10
            move("a", number << 20, 3 << 20)
            move("b", number << 20, None)
    assert capsys.readouterr().err == "a: 2.00 MiB of 3.00 MiB (30 s)\nb: 2.00 MiB (30 s)\n"

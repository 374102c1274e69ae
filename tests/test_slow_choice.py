"""Which long tests CI runs: what changed, one by the commit, layouts in turn, within an hour."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from import_graph import PRODUCT, ROOT, reached, sources
from slow_choice import (
    BEFORE,
    END,
    HOUR,
    LIMIT,
    PAUSE,
    Change,
    History,
    changed_groups,
    choose,
    run_groups,
    run_in_time,
)
from slow_groups import IN_CI, LAYOUTS, ROOMS, TURNS, group_of, groups_for

DAY = 24 * HOUR


def history(commit: str = "5", times: tuple[float, ...] = (0.0,), **rest) -> History:
    return History(commit, times, **{"changes": (), "shallow": False, **rest})


def members() -> dict[str, list[Path]]:
    """The test files of CI's groups that have long tests."""
    files: dict[str, list[Path]] = {name: [] for name in IN_CI}
    for path in sources("tests", "benchmarks"):
        file = str(path.relative_to(ROOT))
        if path.name.startswith("test_") and "mark.slow" in path.read_text(encoding="utf-8"):
            files.setdefault(group_of(file) or "", []).append(path)
            for name, group in IN_CI.items():  # some take single tests of a file
                if any(below.startswith(f"{file}::") for below in group.paths):
                    files[name].append(path)
    return files


def test_a_change_of_any_file_calls_for_a_group_that_reaches_it_if_one_does():
    reach = {group: reached(*files) for group, files in members().items()}
    assert all(reach[group] for group in IN_CI)
    for path in sources(*PRODUCT):
        file = str(path.relative_to(ROOT))
        groups = groups_for(file)
        assert groups, f"{file}: in no room of slow_groups.ROOMS"
        reaching = {group for group, files in reach.items() if path in files}
        assert not reaching or reaching & set(groups), f"{file}: {groups}, reached by {reaching}"


def test_rooms_exist_and_call_for_groups_of_ci():
    for room, groups in ROOMS.items():
        assert list(ROOT.glob(f"{room}*")), room
        assert groups
        assert set(groups) <= set(IN_CI), room


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("telechat_moe/train/guard.py", "train"),
        ("telechat_moe/checkpoint/reshard.py", "checkpoint"),
        ("telechat_moe/interop/mindformers_train.py", "mindformers"),
        ("telechat_moe/interop/hf.py", "upstream"),
        ("telechat_moe/files.py", "train"),
        ("ops/csrc/attention.cc", "ops"),
        ("ops/dvm/program.py", "ops"),
        ("tools/plan/native/planner.cc", "plan"),
        ("tests/launch/test_launch.py", "launch"),
        ("benchmarks/align_faults/real.py", "align_faults"),
        ("docs/launch.md", "pages"),
        ("docs/tour.md", "tour"),
    ],
)
def test_a_room_calls_for_its_own_group_first(file: str, first: str):
    assert groups_for(file)[0] == first


@pytest.mark.parametrize("file", ["tests/ops/dvm/test_fuzz.py", "LICENSE", ".gitignore"])
def test_what_no_group_of_ci_tests_calls_for_none(file: str):
    assert groups_for(file) == ()


def test_more_lines_and_later_ones_come_first():
    few = Change(DAY, "tools/plan/cost/terms.py", 10)
    many = Change(DAY, "telechat_moe/launch/commands.py", 30)
    early = Change(DAY - 13 * HOUR, "telechat_moe/launch/commands.py", 30)
    before = Change(-1.0, "ops/rope.py", 5000)
    assert changed_groups([few, many], DAY)[:2] == ["launch", "resume"]
    assert changed_groups([few, early], DAY)[0] == "plan"
    assert changed_groups([few, many], DAY) == changed_groups([few, many, before], DAY)


def test_every_commit_has_its_changes_and_a_group_by_its_hash():
    change = Change(0.0, "tools/plan/cost/terms.py", 10)
    rotating = set()
    for n in range(200):
        groups = choose(history(f"{n:x}", changes=(change,)))
        assert groups[:2] == ["layouts-0", "plan"]
        rotating |= set(groups) - set(LAYOUTS) - {"plan"}
        assert len(groups) == len(set(groups))
    assert rotating == set(IN_CI) - {"plan"}


def test_without_history_layouts_are_drawn_by_the_hash():
    first = {choose(history(f"{n:x}", shallow=True))[0] for n in range(100)}
    assert first == set(LAYOUTS)


def landings(seed: int) -> tuple[list[float], list[int]]:
    """Commits of twenty landings, each followed by CI, and where each landing ends; some developers pause, too."""
    chance, now, times, ends = random.Random(seed), 0.0, [], []
    for _ in range(20):
        pause = chance.randrange(9) if chance.random() < 0.5 else None
        for number in range(8):
            now += PAUSE * 2 if number == pause else chance.uniform(0, PAUSE)
            times.append(now)
        ends.append(len(times))
        now += PAUSE * chance.uniform(1.01, 9)
    return times, ends


@pytest.mark.parametrize("seed", range(20))
def test_twenty_landings_see_every_layout(seed: int):
    """Where no more than one pause between two landings is none of CI's, two groups of layouts each are enough."""
    times, ends = landings(seed)
    seen = set()
    for end in ends[:TURNS]:
        groups = choose(history(times=tuple(reversed(times[:end]))))
        seen |= set([g for g in groups if g in LAYOUTS][:2])
    assert seen == set(LAYOUTS)


class Clock:
    """A machine on which everything takes so many times what is expected."""

    def __init__(self, pace: float):
        self.pace, self.now, self.ran = pace, 1000.0, []

    def run(self, group: str, seconds: float) -> bool:
        self.ran.append(group)
        needed = 60 * (IN_CI | LAYOUTS)[group].minutes * self.pace
        self.now += min(needed, seconds)
        return needed <= seconds

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("commit", range(21))
def test_all_ends_within_the_hour(pace: float, commit: int):
    changes = tuple(Change(0.0, f"{room}/x.py", 9) for room in ROOMS)
    groups = choose(history(f"{commit:x}", changes=changes))
    clock = Clock(pace)
    left = run_groups(groups, BEFORE * pace, clock.run, clock)
    assert BEFORE * pace + clock.now - 1000 <= LIMIT < HOUR
    assert sorted(clock.ran + left) == sorted(groups)
    if pace <= 1:
        assert clock.ran[:3] == groups[:3], "layouts, what changed and the group by the hash"


def test_a_group_that_took_longer_leaves_less_for_others():
    clock = Clock(2.5)
    left = run_groups(["keys", "plan", "ops"], BEFORE, clock.run, clock)
    assert clock.ran == ["keys", "plan"]
    assert left == ["ops"]


def test_a_group_that_takes_far_too_long_is_ended_within_the_hour():
    clock = Clock(7.0)
    left = run_groups(["mindspore210", "keys"], BEFORE, clock.run, clock)
    assert BEFORE + clock.now - 1000 == END < HOUR
    assert (clock.ran, left) == (["mindspore210"], ["mindspore210", "keys"])


def test_a_command_is_ended_with_what_it_started(tmp_path: Path):
    assert run_in_time(["true"], 60)
    with pytest.raises(subprocess.CalledProcessError):
        run_in_time(["false"], 60)
    script = f"(sleep 2; touch {tmp_path}/late) & sleep 60"
    assert not run_in_time(["bash", "-c", script], 0.5)
    time.sleep(2)
    assert not (tmp_path / "late").exists()


def test_the_history_is_read(tmp_path: Path):
    start = 1_700_000_000

    def git(*words: str, at: int = start) -> None:
        when = f"{at} +0000"
        names = {
            f"GIT_{who}_{what}": "x"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        subprocess.run(
            ["git", *words], cwd=tmp_path, env={**os.environ, **names, **dates}, check=True
        )

    git("init", "-q")
    for number, text in enumerate(("a\n", "a\nb\n", "c\n")):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-qm", "x", at=start + number * 3600)
    read = History.read(tmp_path)
    assert read.turn == 2
    assert [(c.time - start, c.file, c.lines) for c in read.changes] == [
        (7200, "file", 3),
        (3600, "file", 1),
        (0, "file", 1),
    ]
    git("clone", "-q", "--depth", "1", tmp_path.as_uri(), str(tmp_path / "shallow"))
    shallow = History.read(tmp_path / "shallow")
    assert shallow.shallow
    assert (shallow.commit, shallow.changes) == (read.commit, [])

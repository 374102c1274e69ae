"""Options and summaries of all tests.

Random tests draw the same examples in every run; ``pytest --hypothesis-profile=default`` draws others.
"""

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings
from slow_groups import GROUPS, group_of

pytest_plugins = ["run_fixtures"]
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-group", metavar="NAME", help="run the long tests of a group only")


def pytest_configure(config: pytest.Config) -> None:
    group = config.getoption("--slow-group")
    if group is not None and group not in GROUPS:
        raise pytest.UsageError(f"--slow-group {group!r}: one of {', '.join(GROUPS)} expected")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    group = config.getoption("--slow-group")
    marks = {item: mark for item in items if (mark := item.get_closest_marker("slow"))}
    slow = list(marks)
    groups = {i: mark.kwargs.get("group") or group_of(i.nodeid) for i, mark in marks.items()}
    if homeless := [item.nodeid for item in slow if groups[item] is None]:
        raise pytest.UsageError(f"{homeless[0]}: in no group of tests/support/slow_groups.py")
    if group is not None:
        config.hook.pytest_deselected(items=[i for i in items if groups.get(i) != group])
        items[:] = [item for item in slow if groups[item] == group]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if find_spec("torch"):
        return
    skipped = terminalreporter.stats.get("skipped", [])
    torch = [r for r in skipped if "torch" in str(r.longrepr)]
    if torch:
        files = sorted({r.nodeid.split("::")[0] for r in torch})
        terminalreporter.section("comparisons with torch")
        terminalreporter.line(f"not run, because torch is not installed: {', '.join(files)}")
        terminalreporter.line("`make test-torch` installs torch 2.13.0 and runs them.")

"""Mistakes are made where they should be, and nowhere else, and tests are chosen by what they call."""

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mutants import __main__ as command
from benchmarks.mutants.copies import ROOT, Copy, Outcome
from benchmarks.mutants.operators import Mutant, mutants, parses

FILES = sorted((ROOT / "telechat_moe").glob("*/*.py"))


def changes(source: str) -> set[tuple[str, str]]:
    return {(m.kind, m.apply(source)) for m in mutants("x.py", source)}


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("a < b\n", "comparison", "(a <= b)\n"),
        ("x = a not in b\n", "comparison", "x = (a in b)\n"),
        ("x = a - 1\n", "arithmetic", "x = (a + 1)\n"),
        ("x = a - 1\n", "constant", "x = a - 2\n"),
        ("x = a and b\n", "boolean", "x = (a or b)\n"),
        ("if not a:\n    b = 2\n", "boolean", "if (a):\n    b = 2\n"),
        ("if a.b:\n    c = d\n", "condition", "if (not a.b):\n    c = d\n"),
        ("def f(x):\n    return x\n", "return", "def f(x):\n    return None\n"),
        ("def f(x):\n    x.g()\n", "deleted statement", "def f(x):\n    pass\n"),
        ("x += y\n", "deleted statement", "pass\n"),
        ("x = a[:n]\n", "off by one", "x = a[:(n + 1)]\n"),
        ("x = range(n)\n", "off by one", "x = range((n + 1))\n"),
        ("x = f(a, b, c)\n", "swapped arguments", "x = (f(b, a, c))\n"),
        ("while True:\n    break\n", "loop", "while True:\n    continue\n"),
        ("é = é < b # ü\n", "comparison", "é = (é <= b) # ü\n"),
        ("x = (a <\n     b)\n", "comparison", "x = ((a <= b))\n"),
    ],
)
def test_a_mistake(source: str, kind: str, expected: str):
    assert (kind, expected) in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A text."""\n',
        "def f(x: int | None = None) -> list[int]: ...\n",
        "raise ValueError(f'{a + 1}', 2)\n",
        "x = f'{a + 1}'\n",
        "from a import b\n",
        "x = f(a, a)\n",
        "x = 'a' + b\n",
        "def f():\n    return None\n",
    ],
)
def test_what_is_left_alone(source: str):
    assert mutants("x.py", source) == []


@settings(max_examples=20)
@given(st.data())
def test_mutants_of_our_sources(data: st.DataObject):
    path = data.draw(st.sampled_from(FILES))
    source = path.read_text(encoding="utf-8")
    if not (every := mutants("x.py", source)):
        return
    mutant = data.draw(st.sampled_from(every))
    text = mutant.apply(source)
    if parses(text):
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    inside = [f for f in functions if f.lineno <= mutant.line <= (f.end_lineno or 0)]
    starts = {min([f.lineno, *(d.lineno for d in f.decorator_list)]) for f in inside} | {0}
    assert mutant.function in starts


def made(function: int = 3) -> Mutant:
    return Mutant("a.py", 4, function, "constant", "x = 1\n", "x = 2\n")


def recorded(name: str, seconds: float, *functions: int, file: str = "a.py") -> command.Recorded:
    return command.Recorded(name, seconds, frozenset((file, f) for f in functions))


def test_the_quickest_tests_that_call_the_function_are_chosen():
    tests = [
        recorded("slow", 50.0, 3),
        recorded("quick", 1.0, 3, 9),
        recorded("other", 0.1, 9),
        recorded("elsewhere", 0.1, 3, file="b.py"),
        recorded("middle", 8.0, 3),
    ]

    def names(function: int, budget: float) -> list[str]:
        return [t.test for t in command.tests_for(made(function), tests, budget)]

    assert names(3, 60) == ["quick", "middle", "slow"]
    assert names(3, 10) == ["quick", "middle"]
    assert names(3, 0.5) == ["quick"]
    assert names(0, 60) == ["other", "quick", "middle", "slow"]
    assert names(77, 5) == ["other", "quick"], "runs at import"


def test_a_mutant_is_equivalent_where_a_person_says_why():
    row = {"file": "a.py", "before": "x = 1", "after": "x = 2", "reason": "never read"}
    assert command.equivalent(made(), [row]) == "never read"
    assert command.equivalent(made(), [{**row, "after": "x = 3"}]) == ""


def test_a_copy_is_changed_and_the_working_tree_is_not(tmp_path: Path):
    """The package of the copy is what its tests import, also what an install takes from the root."""
    copy = Copy(tmp_path / "copy")
    status = subprocess.run(["git", "status", "-s"], cwd=ROOT, capture_output=True, check=True)
    test = tmp_path / "copy" / "tests" / "test_copied.py"
    test.write_text(
        "import telechat_moe.units, telechat_moe.tools.plan.cost as cost, telechat_moe.recipes as recipes\n"
        "def test_places():\n"
        "    for module in (telechat_moe.units, cost, recipes):\n"
        f"        assert module.__file__.startswith({str(tmp_path)!r})\n"
        "    assert cost.__doc__\n",
        encoding="utf-8",
    )
    path = tmp_path / "copy" / "telechat_moe" / "units.py"
    source = path.read_text(encoding="utf-8")

    def outcome(statement: str, timeout: float) -> str:
        lines = source.splitlines(keepends=True)
        mutant = Mutant(
            "telechat_moe/units.py", len(lines), 0, "constant", lines[-1], lines[-1] + statement
        )
        return copy.judge(mutant, ["tests/test_copied.py"], timeout).verdict

    assert outcome("", 60) == "survived"
    assert outcome("raise RuntimeError\n", 60) == "killed"
    assert outcome("import time; time.sleep(99)\n", 4) == "hung"
    assert copy.judge(made(), [], 60) == Outcome("no tests")
    assert path.read_text(encoding="utf-8") == source
    again = subprocess.run(["git", "status", "-s"], cwd=ROOT, capture_output=True, check=True)
    assert status.stdout == again.stdout


def test_a_room_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    assert command.main(["telechat_moe/nothing"]) == 2
    assert "telechat_moe/nothing: no folder or file" in capsys.readouterr().err

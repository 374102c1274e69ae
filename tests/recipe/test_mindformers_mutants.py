"""Mutants of the recipes that come with MindFormers: `check` answers in sentences, for every use, without a traceback.

`make test` judges 100 for each of the three uses; `pytest -m slow tests/recipe` judges 10,000.
"""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

import pytest
from mindformers_recipes import graph_recipes
from recipe_mutants import Base, Mutator

from telechat_moe.cli import main

pytestmark = [
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
USES = ("train", "dryrun", "mindformers")
KEYS = (
    "seed",
    "model",
    "model_config",
    "parallel",
    "callbacks",
    "train_dataset",
    "data_loader",
    "type",
    "lr_schedule",
)
VALUES = (
    *("99999999999999999999999999999", "-1", "1e400", ".nan", "null", "[]", "{}", "''", "[[[1]]]", "{a: {b: [1]}}"),
    *("ключ", "'\\U0001F600'", "\"\\0\"", "*bs", "&bs 3", "!!set {a}", "!!float 1", "!x y", "2024-01-01", "0x1F", "~"),
    *("'None'", "[1, 'a', null]", "True", "10" * 200, "'" + "x" * 3000 + "'"),
)  # fmt: skip


def texts() -> dict[str, str]:
    found = {Path(name).name: path.read_text("utf-8") for name, path in graph_recipes().items()}
    assert len(found) == 24
    return found


class Strange(Mutator):
    """Mutants that also have strange values, nested and repeated keys."""

    def __init__(self, seed: int, given: dict[str, str]) -> None:
        super().__init__(seed, given)
        self.kinds += ["strange", "nest", "again", "strange", "nest"]

    def _simple(self, text: str, key: tuple[int, int]) -> bool:
        return "\n" in text[key[1] :]  # `duplicate` need not be refused here

    def strange(self, b: Base) -> tuple[str, bool]:
        start, end, _ = self.rng.choice(b.scalars)
        return self.replace(b.text, start, end, self.rng.choice(VALUES)), False

    def nest(self, b: Base) -> tuple[str, bool]:
        """Put a flow section or list in the place of a value."""
        start, end, _ = self.rng.choice(b.scalars)
        inner = b.text[start:end]
        for _ in range(self.rng.choice((1, 2, 60))):
            inner = self.rng.choice((f"[{inner}]", f"{{{self.rng.choice(KEYS)}: {inner}}}"))
        return self.replace(b.text, start, end, inner), False

    def again(self, b: Base) -> tuple[str, bool]:
        """Write a known key at the top with any value."""
        return f"{self.rng.choice(KEYS)}: {self.rng.choice(VALUES)}\n{b.text}", False


PLACED = re.compile(r"[^:]*(:\d+)?: .+[;:] .+", re.DOTALL)


def judge(seed: int, count: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mutator, codes = Strange(seed, texts()), set[int]()
    file = folder / "mutant.yaml"
    for number in range(count):
        kind, text, _ = mutator.mutant()
        file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        use = USES[number % 3]
        code = main(["check", str(file), "--for", use])  # an exception fails the test
        printed = capsys.readouterr()
        codes.add(code)
        assert code in (0, 1), (kind, printed)
        assert not printed.err, (kind, printed.err)
        lines = printed.out.splitlines()
        assert "Traceback" not in printed.out, kind
        if code:
            assert re.match(r"problems: [1-9]\d*, in 1 of 1 recipes", lines[-1]), (kind, lines)
            assert all(PLACED.fullmatch(line) for line in lines[:-1]), (kind, use, printed.out)
        else:
            assert re.search(": ok( for |$)", lines[0]), (kind, lines)
    assert codes == {0, 1}


@pytest.mark.slow
def test_300_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(1, 300, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", random.Random(16).sample(range(1000), 5))
def test_10000_mutants(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(seed, 2000, tmp_path, capsys)

"""`telechat-moe ckpt average` against NumPy in float64, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.weights import own_weights
from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights

SETS = ["model.model_config.hidden_size=32", "model.model_config.vocab_size=64"]
CONFIG = load("telechat3_moe/pretrain_tiny.yaml", SETS, use="weights").model_config


def model(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {w.name: rng.standard_normal(w.shape).astype(np.float32) for w in weights(CONFIG)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints with a moving average."""
    root = tmp_path_factory.mktemp("average") / "checkpoints"
    for step in (1, 2, 3):
        ema = {f"ema.{name}": x for name, x in model(10 + step).items()}
        checkpoint.save(root, step, {"model": model(step), "ema": ema}, {"version": 1})
    return root


def step(run: Path, number: int) -> str:
    return str(run / f"step-{number:08d}")


@pytest.mark.parametrize("shares", [(), (1.0, 2.0, 5.0)])
def test_weighted_mean(run: Path, tmp_path: Path, shares: tuple[float, ...]) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    more = ["--weights", *map(str, shares)] if shares else []
    paths = [step(run, i) for i in (1, 2, 3)]
    assert main(["ckpt", "average", *paths, "--out", str(out), *more, "--json", str(report)]) == 0
    loaded = {w.name: w for w in own_weights(out, CONFIG)}  # what load_checkpoint reads
    for name in model(1):
        parts = np.stack([model(i)[name] for i in (1, 2, 3)]).astype(np.float64)
        expected = np.average(parts, axis=0, weights=shares or None)
        ours = np.concatenate([*loaded[name].chunks()]).view(np.float32).reshape(expected.shape)
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-9)
    said = json.loads(report.read_text())
    assert [s["share"] for s in said["sources"]] == list(
        np.array(shares or (1, 1, 1)) / sum(shares or (1, 1, 1))
    )
    assert json.loads((out / "average.json").read_text())["sources"] == said["sources"]
    assert main(["convert", "--verify", str(out)]) == 0


def test_a_moving_average_becomes_weights(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.safetensors"
    assert main(["ckpt", "average", step(run, 2), "--ema", "--out", str(out)]) == 0
    found = load_file(out)
    assert all((found[name] == x).all() for name, x in model(12).items())
    assert found.keys() == model(12).keys()


def test_weights_of_other_types(tmp_path: Path) -> None:
    halves = {name: x.astype(np.float16) for name, x in model(1).items()}
    save_file(halves, tmp_path / "a.safetensors")
    save_file(model(2), tmp_path / "b.safetensors")
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    assert main(["ckpt", "average", *paths, "--out", str(tmp_path / "c.safetensors")]) == 0
    for name, x in load_file(tmp_path / "c.safetensors").items():
        expected = (halves[name].astype(np.float64) + model(2)[name]) / 2
        np.testing.assert_array_equal(x, expected.astype(np.float32))


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = checkpoint.save(
        tmp_path / "other", 1, {"model": model(1) | {"more": np.ones(2, "f4")}}, {}
    )
    damaged = checkpoint.save(tmp_path / "damaged", 1, {"model": model(1)}, {})
    file = next(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    (tmp_path / "there").mkdir()
    one, out = step(run, 1), str(tmp_path / "out")
    cases = [
        (2, "expected 2 positive numbers", [one, step(run, 2), "--out", out, "--weights", "1"]),
        (2, "expected 1 positive numbers", [one, "--out", out, "--weights", "-1"]),
        (2, "expected 1 positive numbers", [one, "--out", out, "--weights", "nan"]),
        (3, "is of another model than", [one, str(other), "--out", out]),
        (3, "more is unknown", [one, str(other), "--out", out]),
        (3, "damaged", [one, str(damaged), "--out", out]),
        (3, "holds no moving average; set telechat_moe.ema", [str(other), "--ema", "--out", out]),
        (3, "is no checkpoint, so it holds no moving", [str(file), "--ema", "--out", out]),
        (2, "there exists; remove it", [one, "--out", str(tmp_path / "there")]),
        (3, "no such file", [str(tmp_path / "nothing"), "--out", out]),
    ]
    for code, said, words in cases:
        assert main(["ckpt", "average", *words]) == code, words
        assert said in capsys.readouterr().err, words
        assert not Path(out).exists()

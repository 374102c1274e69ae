"""MindFormers' own TeleChat3-MoE class and ours: losses, gradients, loads and bias from the same weights.

MindFormers' classes run in a process of their own (upstream_values.py), unchanged but for the primitives without a
CPU kernel (upstream_backends.py).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
LOSS, GRADIENT = 5e-6, 1e-5  # measured: 5e-7, 4e-6
SCRIPT = Path(__file__).with_name("upstream_values.py")


def run(folder, case):
    """Return what the script found of a case."""
    process = subprocess.run([sys.executable, SCRIPT, folder, case], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads([line for line in process.stdout.splitlines() if line.startswith("{")][-1])


def assert_same(found, names=("lm", "mtp", "aux")):
    """Check losses; all of them must be there, so that equal zeros prove nothing."""
    for name, ours, theirs in zip(
        ("lm", "mtp", "aux"), found["ours"], found["upstream"], strict=True
    ):
        assert ours > 0.01
        if name in names:
            assert abs(ours - theirs) <= LOSS * ours, (name, ours, theirs)


def assert_same_gradients(found):
    assert found["gradients"]
    worst = max(found["gradients"].items(), key=lambda item: item[1])
    assert worst[1] <= GRADIENT, worst


def assert_same_loads(found):
    """Upstream counts shares; its bias moves by the sign of what an expert lacks to the mean."""
    ours, theirs = (np.array(found["loads"][side]) for side in ("ours", "upstream"))
    np.testing.assert_allclose(theirs * found["chosen"], ours, atol=1e-4)
    assert (ours > 0).sum() > 2
    moved = np.array(found["bias"]["upstream"]) - np.array(found["bias"]["before"])
    lacks = np.sign(ours.mean(-1, keepdims=True) - ours)
    np.testing.assert_allclose(moved, found["rate"] * lacks, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "as the 105B recipe",
        "two sequences",
        "parts of sequences",
        "third micro-batch of a step",
        "other layouts",
        "no compressed query, no latent norms",
        "groups of experts",
        "compressed mask",
    ],
)
def test_same(tmp_path, case):
    found = run(tmp_path, case)
    assert_same(found)
    assert_same_gradients(found)
    assert_same_loads(found)
    assert "FlashAttentionScore" in found["backends"]


@pytest.mark.slow
def test_balance_loss_of_several_sequences_differs(tmp_path):
    """Upstream's ``seq_aux_loss`` is over all sequences of a device; ours over each."""
    found = run(tmp_path, "two sequences, loss over each")
    assert_same(found, names=("lm", "mtp"))
    assert abs(found["ours"][2] / found["upstream"][2] - 1) > 0.01


@pytest.mark.slow
def test_last_token_of_mtp_differs(tmp_path):
    """Upstream's MTP layer reads token 0 at the end of a sequence, ours the label; only the balance loss sees it."""
    found = run(tmp_path, "last label known")
    assert_same(found, names=("lm", "mtp"))
    assert abs(found["ours"][2] / found["upstream"][2] - 1) > 1e-3


@pytest.mark.slow
def test_padding_differs(tmp_path):
    """Without a compressed mask, upstream hides every token that is ``pad_token_id``, 0 unless said otherwise."""
    found = run(tmp_path, "a token that is the padding")
    assert abs(found["ours"][0] / found["upstream"][0] - 1) > 1e-4


@pytest.mark.slow
def test_scores_are_scaled_without_the_setting(tmp_path):
    """``rotary_scaling_factor`` left out: upstream multiplies attention scores by 1.59 although it is no YaRN."""
    found = run(tmp_path, "scores scaled")
    assert abs(found["ours"][0] / found["upstream"][0] - 1) > 1e-3

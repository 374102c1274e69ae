"""A dump of MindFormers' own TeleChat3-MoE class against one of ours: `align` pairs and judges all that both have."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
SCRIPT = Path(__file__).with_name("upstream_dump.py")
ATTENTION = r".*layers\.0\.self_attention.*"

# Settings that one side alone has, and where a reader would look: a module of MindFormers.
OTHER = {
    "scores scaled": ({"rotary_scaling_factor": None}, ATTENTION),
    "no scale of routed experts": ({"routed_scaling_factor": 1.0}, r".*layers\.1\.mlp(\.router)?"),
    "another eps": ({"rms_norm_eps": 1e-2}, r".*layers\.0\.input_layernorm.*"),
    "another base of positions": ({"rope_theta": 500.0}, ATTENTION),
}


def run(*command, cwd):
    process = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd
    )
    return process.returncode, process.stdout + process.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upstream")
    for which in ("ours", "upstream"):
        code, said = run(SCRIPT, folder, which, which, cwd=folder)
        assert code == 0, said[-3000:]
    return folder


def answer(folder, reference, target):
    align = ("-m", "telechat_moe.cli", "align", reference, target, "--json", "answer.json")
    code, said = run(*align, cwd=folder)
    assert code in (0, 1, 4), said[-3000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("upstream", "ours"), ("ours", "upstream")])
def test_they_agree(pair, folder):
    """Tokens are sequence-first there, experts stacked by rows and padded, gate and up in turn, MTP layers apart."""
    report = answer(folder, *pair)
    assert report["verdict"] == "pass", report["first"]
    assert not report["not_judged"]
    assert report["coverage"]["shared tensors"]["judged_calls"] > 400


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER)
def test_other_settings_are_found_where_they_act(name, folder):
    settings, where = OTHER[name]
    out = re.sub(r"\W", "_", name)
    code, said = run(SCRIPT, folder, "upstream", out, json.dumps(settings), cwd=folder)
    assert code == 0, said[-3000:]
    report = answer(folder, out, "ours")
    assert report["verdict"] == "diverged"
    assert re.fullmatch(where, report["first"]["modules"]["reference"]), report["first"]

"""The pilot's measures against counts by hand, its verdicts, its text and its page."""

import numpy as np
import pytest

from benchmarks.balance_pilot.report import against, summary, verdicts

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from benchmarks.balance_pilot import train as pilot
from benchmarks.balance_pilot.page import page, smoothed
from benchmarks.balance_pilot.text import DOMAINS, Text


def run_of(held_out: float, specialisation: float = 0.1) -> dict[str, object]:
    return {
        "losses": [held_out] * 32,
        "loss": held_out,
        "held_out": held_out,
        "overload": 1.5,
        "drop_rate": 0.0,
        "specialisation": specialisation,
    }


def test_verdicts_need_every_seed() -> None:
    runs = {
        "sequence": [run_of(2.0), run_of(3.0), run_of(4.0)],
        "EP 8": [run_of(1.9), run_of(2.8), run_of(3.9)],
        "DP": [run_of(1.95), run_of(2.7), run_of(3.8)],
    }
    said = {v["claim"]: v for v in verdicts(runs)}
    first = said["the loss over sequences costs more than that over EP groups"]
    assert first["verdict"] == "reproduced"
    assert first["difference"] == pytest.approx(0.4 / 3)
    second = said["the loss over EP groups costs more than that over the DP group"]
    assert (second["verdict"], second["seeds"]) == ("not shown", "2 of 3")
    assert against(runs, "EP 8", "sequence", "held_out")[2] == 0
    two = {name: measured[:2] for name, measured in runs.items()}
    assert {v["verdict"] for v in verdicts(two)} == {"not judged"}
    backwards = {"sequence": runs["EP 8"], "EP 8": runs["sequence"]}
    assert verdicts(backwards)[0]["verdict"] == "contradicted"
    assert summary(runs)["sequence"]["held_out"] == (3.0, 1.0)


def test_specialisation_is_the_share_that_would_move() -> None:
    alike = np.ones((2, 3, 6))
    assert pilot.apart(alike) == 0
    own = np.kron(np.eye(3), np.ones((1, 2)))[None]  # each domain has two experts of its own
    assert pilot.apart(own) == pytest.approx(2 / 3)
    half = np.array([[[3.0, 1, 0, 0], [0, 0, 1, 3], [1, 1, 1, 1]]])
    shares = [[0.75, 0.25, 0, 0], [0, 0, 0.25, 0.75], [0.25] * 4]
    mean = np.mean(shares, 0)
    by_hand = np.mean([np.maximum(np.array(s) - mean, 0).sum() for s in shares])
    assert pilot.apart(half) == pytest.approx(by_hand)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(pilot.VOCABULARY, pilot.LENGTH)


def test_text_is_the_same_each_time_and_held_out_text_is_not_trained_on(text: Text) -> None:
    first, second = (next(text.batches(3, 8)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (8, pilot.LENGTH + 1)
    assert first.max() < pilot.VOCABULARY
    assert not np.array_equal(first, next(text.batches(4, 8)))
    for trained, held_out in zip(text.trained, text.held_out, strict=True):
        assert len(trained) > 8 * len(held_out) > 10 * pilot.LENGTH
    for domain in range(len(DOMAINS)):
        assert text.pure(4, domain).shape == (4, pilot.LENGTH + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence", "EP 8, capacity 1.0"])
def test_a_run_learns_and_counts_what_it_drops(text: Text, name: str) -> None:
    variant = pilot.VARIANTS[name]
    found = pilot.train(variant, 0, text, 30)
    assert found["losses"][-1] < found["losses"][0] - 1
    assert (found["drop_rate"] > 0) == bool(variant.capacity)
    assert 0 < found["specialisation"] < 2 / 3
    again = pilot.train(variant, 0, text, 3)
    assert again["losses"] == found["losses"][:3]


def test_groups_of_a_variant_are_those_of_its_devices() -> None:
    groups = {name: pilot.build(v)[0].layers[1].moe.router.balance for name, v in (
        ("sequence", pilot.SCOPES["sequence"]), ("EP 8", pilot.SCOPES["EP 8"]), ("DP", pilot.SCOPES["DP"]),
    )}  # fmt: skip
    assert (groups["sequence"].kind, groups["sequence"].groups) == ("seq_aux_loss", None)
    assert groups["EP 8"].groups == 4
    assert groups["DP"].groups == 1
    dropping, _ = pilot.build(pilot.DROPS["EP 16, capacity 1.5"])
    assert dropping.layers[1].moe.dispatch.capacity_tokens == 16 * pilot.LENGTH


def test_page_shows_every_variant() -> None:
    runs = {
        name: [run_of(2.0 + i / 10 + s, 0.2) for s in range(3)]
        for i, name in enumerate(pilot.VARIANTS)
    }
    text = page(runs, "On a machine.")
    for name in pilot.VARIANTS:
        assert f">{name}<" in text
    assert text.count("<svg") == 2
    assert smoothed(runs["sequence"]) == pytest.approx([3.0, 3.0])

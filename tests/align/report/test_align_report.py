"""The pages of a bisection and of the three phases: they stand alone and say what the reports say."""

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from planted import result, run

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.report import bisect_page as page
from telechat_moe.tools.align.report import neighbourhood as around
from telechat_moe.tools.loss import page as loss_page
from telechat_moe.tools.loss import read as loss_read
from telechat_moe.tools.loss import verdict as loss
from telechat_moe.tools.phases.page import page as phases_page

pytestmark = pytest.mark.torch


class Page(HTMLParser):
    """Words and tags of a page, and whether all tags that must be are closed."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.loads, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.loads += [
            v for k, v in attrs if k in ("src", "href", "data") and not str(v).startswith("#")
        ]
        if tag in ("section", "svg", "g", "table", "div", "a", "details"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def count(self, tag, kind=None):
        return sum(
            t == tag and (kind is None or kind in a.get("class", "").split()) for t, a in self.tags
        )


def spoiled(y):
    y = y.clone()
    y[3:5, 2:7] *= 1.5
    return y


@pytest.fixture(scope="module")
def found():
    golden, bad = run(), run(("linear", 9, result(spoiled)))
    outcome = bisect(golden, bad)
    first = outcome.findings[0]
    graph = around.around(bad, first.step, first.rank, first.verdict.key)
    return json.loads(json.dumps(page.plain(outcome, "golden", "bad", graph))), bad, outcome


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    rng = np.random.default_rng(0)
    curves = []
    for name in ("base1", "base2", "run"):
        path = folder / f"{name}.csv"
        rows = [f"{i},{2 + rng.normal(0, 0.01):.6f}" for i in range(1200)]
        path.write_text("step,loss\n" + "\n".join(rows))
        curves.append(loss_read.read(str(path)))
    return loss.judge(curves[:-1], curves[-1])


def phases(**reports):
    """Return a report of two phases, the second with reports of other verbs."""
    first = {"title": "operators alone", "verdict": "inconclusive", "sentence": "by <none>"}
    second = {"title": "one step", "verdict": "diverged", "sentence": "wrong", "reports": reports}
    found = [first | {"not_judged": {"<why>": 1}}, second | {"not_judged": {}}]
    return {"verdict": "diverged", "recipe": "<x>", "sentence": "one step: wrong", "phases": found}


def test_the_graph_is_the_data_flow(found):
    data, bad, _ = found
    first = data["first"]["operator"]
    graph = data["graph"]
    nodes = {n["key"]: n["distance"] for n in graph["nodes"]}
    assert nodes[first] == 0
    calls = bad.ranks[0, 0].calls
    for edge in graph["edges"]:  # brute force: some output of the one is an input of the other
        made = [t.load() for p, t in calls[edge["from"]].tensors() if p.startswith("output")]
        taken = dict(calls[edge["to"]].tensors())[edge["tensor"]].load()
        assert any(x.size == taken.size and np.array_equal(x.ravel(), taken.ravel()) for x in made)
        assert nodes[edge["from"]] < nodes[edge["to"]] or 0 in (
            nodes[edge["from"]],
            nodes[edge["to"]],
        )
    assert {"Functional.silu.2.forward"} <= {e["to"] for e in graph["edges"] if e["from"] == first}
    assert min(nodes.values()) == -2
    assert max(nodes.values()) == 2


def test_the_picture_shows_where_it_is_wrong(found):
    fields = np.array(found[0]["picture"]["fields"], float)
    wrong = np.argwhere(fields > 1)
    assert wrong.min(0).tolist() == [3, 2]
    assert wrong.max(0).tolist() == [4, 6]
    assert fields.shape == tuple(found[0]["picture"]["shape"])


def test_the_page_stands_alone_and_says_it_all(found, judged):
    shown = Page(phases_page(phases(bisect=found[0], loss=judged.plain())))
    assert shown.loads == []
    assert shown.open == []
    assert "Alignment: diverged" in shown.text
    assert "Functional.linear.9.forward is the first wrong call" in shown.text
    assert shown.count("g", "first") == 1
    assert shown.count("svg") >= 4  # graph, residual, two of the loss
    assert "What was judged" in shown.text
    assert "not judged: <why>" in shown.text


def test_the_pages_of_the_verbs_are_the_same_drawings(found, judged):
    shown = phases_page(phases(bisect=found[0], loss=judged.plain()))
    for body, alone in ((page.body(found[0]), page.page(found[0])),
                        (loss_page.body(judged), loss_page.page(judged))):  # fmt: skip
        assert body in alone
        assert body in shown


def test_a_curve_that_is_gone_is_named(judged, tmp_path):
    data = judged.plain()
    gone = data | {"inputs": [i | {"path": str(tmp_path / "gone.csv")} for i in data["inputs"]]}
    with pytest.raises(BadInputError, match=r"gone\.csv"):
        phases_page(phases(loss=gone))


def test_junit_has_a_case_for_each_step_and_rank_and_each_check(found, judged):
    cases = ElementTree.fromstring(page.junit(found[2], "bad"))
    assert (cases.get("tests"), cases.get("failures")) == ("1", "1")
    cases = ElementTree.fromstring(loss_page.junit(judged))
    assert (cases.get("tests"), cases.get("failures")) == ("8", "0")


def test_names_cannot_break_the_page(found):
    data = json.loads(json.dumps(found[0]).replace("golden", "<script>alert(1)</script>"))
    shown = phases_page(phases(**{"<img src=x>": data}))
    assert "<script" not in shown
    assert "<img" not in shown

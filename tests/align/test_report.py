"""The page over several reports: it stands alone, says what the reports say, and refuses what is none."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from planted import result, run

from telechat_moe.tools.align.dump.msprobe_write import write
from telechat_moe.tools.align.judge.bisect import bisect
from telechat_moe.tools.align.loss import page as loss_page
from telechat_moe.tools.align.loss import read as loss_read
from telechat_moe.tools.align.loss import verdict as loss
from telechat_moe.tools.align.report import bisect_page as page
from telechat_moe.tools.align.report import combined as report
from telechat_moe.tools.align.report import neighbourhood as around

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
    return json.loads(json.dumps(page.plain(outcome, "golden", "bad", graph))), bad


@pytest.fixture(scope="module")
def files(found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    (folder / "bisect.json").write_text(json.dumps(found[0]))
    rng = np.random.default_rng(0)
    curves = []
    for name in ("base1", "base2", "run"):
        path = folder / f"{name}.csv"
        rows = [f"{i},{2 + rng.normal(0, 0.01):.6f}" for i in range(1200)]
        path.write_text("step,loss\n" + "\n".join(rows))
        curves.append(loss_read.read(str(path)))
    judged = loss.judge(curves[:-1], curves[-1])
    (folder / "loss.json").write_text(json.dumps(judged.plain()))
    return folder


def test_the_graph_is_the_data_flow(found):
    data, bad = found
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


def test_the_page_stands_alone_and_says_it_all(files):
    documents = [report.read(files / name) for name in ("loss.json", "bisect.json")]
    assert report.verdict(documents) == "diverged"
    shown = Page(report.page(documents))
    assert shown.loads == []
    assert shown.open == []
    assert shown.text.startswith("Alignment: diverged") or "Alignment: diverged" in shown.text
    assert "Functional.linear.9.forward is the first wrong call" in shown.text
    assert shown.count("a", "card") == 2
    assert shown.count("g", "first") == 1
    assert shown.count("section") == 2
    assert shown.count("svg") >= 4  # graph, residual, two of the loss
    assert "0 were not judged" in shown.text or "What was judged" in shown.text
    cases = ElementTree.fromstring(report.junit(documents))
    assert (cases.get("tests"), cases.get("failures")) == ("2", "1")


def test_curves_that_changed_are_not_drawn(files, tmp_path):
    data = json.loads((files / "loss.json").read_text())
    gone = data | {"inputs": [i | {"path": str(tmp_path / "gone.csv")} for i in data["inputs"]]}
    assert "The curves cannot be drawn" in report.body(report.document("x", gone))
    other = data | {"sentence": "pass: another"}
    assert "have changed since" in report.body(report.document("x", other))
    assert "<svg" in report.body(report.document("x", data))


def test_the_pages_of_the_verbs_are_the_same_drawings(found, files):
    body = page.body(found[0])
    assert body in report.page([report.document("x", found[0])])
    curves = [loss_read.read(str(files / f"{n}.csv")) for n in ("base1", "base2", "run")]
    drawn = loss_page.body(loss.judge(curves[:-1], curves[-1]))
    assert drawn in report.page([report.read(files / "loss.json")])


def verb(*arguments):
    command = [sys.executable, "-m", "telechat_moe.cli", "align", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_verb_that_gives_a_verdict_is_read(files, found, tmp_path):
    write(run(), tmp_path / "golden")
    write(found[1], tmp_path / "bad")
    golden, bad = tmp_path / "golden", tmp_path / "bad"
    made = {
        "alone": verb("bisect", bad, "--json", tmp_path / "alone.json"),
        "bisect": verb("bisect", golden, bad, "--json", tmp_path / "bisect.json"),
        "merge": verb("merge", bad, tmp_path / "merged", "--json", tmp_path / "merge.json"),
    }
    assert [d.returncode for d in made.values()] == [1, 1, 0], [d.stderr for d in made.values()]
    names = [tmp_path / f"{name}.json" for name in made]
    done = verb(
        "report",
        *names,
        files / "loss.json",
        "--html",
        tmp_path / "r.html",
        "--junit",
        tmp_path / "r.xml",
    )
    assert done.returncode == 1, done.stderr
    shown = Page((tmp_path / "r.html").read_text())
    assert (shown.loads, shown.open, shown.count("section")) == ([], [], 4)
    for name in ("bisect", "merge", "loss"):
        assert f"{name}: " in shown.text
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("tests") == "4"
    assert verb("report", tmp_path / "merge.json").returncode == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no report of"),
        ('{"verdict": "pass"}', "no report of"),
        ('{"verdict": "fine", "first": null, "findings": [], "judged": {}}', "no report of"),
        (
            '{"verdict": "diverged", "first": {"operator": 1}, "findings": [], "judged": {}}',
            "broken report",
        ),
    ],
)
def test_what_is_no_report_is_refused(content, said, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(report.BadInputError, match=said):
        report.page([report.read(tmp_path / "x.json")])


def test_names_cannot_break_the_page(found):
    data = json.loads(json.dumps(found[0]).replace("golden", "<script>alert(1)</script>"))
    assert "<script" not in report.page([report.document("<img src=x>", data)])


def test_nothing_judged_is_no_pass():
    assert report.verdict([]) == "inconclusive"

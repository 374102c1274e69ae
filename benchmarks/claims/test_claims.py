"""Every figure of the pages has a claim, every claim's words are in its page, and the comparison can fail."""

import re
import shlex
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.claims import __main__ as runner
from benchmarks.claims import history, read
from benchmarks.claims.__main__ import PAGE, page
from benchmarks.claims.compare import compare, judge
from benchmarks.claims.read import Claim, Quote
from telechat_moe.cli import build_parser

CLAIMS = read.read_claims()
MAKEFILE = (read.ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_quote_is_in_its_page():
    assert read.problems(CLAIMS) == []


@pytest.mark.parametrize("name", read.pages())
def test_every_figure_of_a_page_has_a_claim(name):
    assert read.uncovered(name, CLAIMS, read.definitions().get(name)) == []


def test_every_row_of_the_readmes_results_has_a_claim():
    rows = read.table("README.md", "| what | result | machine").splitlines()[2:]
    texts = [quote.text for claim in CLAIMS for quote in claim.quotes if quote.page == "README.md"]
    assert len(rows) >= 6
    assert [row for row in rows if not any(text in row for text in texts)] == []


def test_the_page_of_cards_is_written_from_the_file():
    assert PAGE.read_text(encoding="utf-8") == page(CLAIMS), (
        "run python -m benchmarks.claims --page"
    )
    assert [
        c.id for c in CLAIMS if c.status in ("verified", "compiled only") and not c.command
    ] == []


def programs(command: str) -> list[list[str]]:
    """Return the programs of a command line with their arguments; what a loop puts in is ``1``."""
    lines = []
    for part in re.split(r"&&|\|\||;|\(|\)", re.sub(r"\$(\{.*?\}|\w+)", "1", command)):
        words = shlex.split(part.partition(" > ")[0])
        while words and (words[0] in ("do", "then") or re.match(r"[A-Z_]+=", words[0])):
            words = words[1:]
        if words and words[0] not in ("for", "done", "cd", "cp", "echo", "true", "test"):
            lines.append(words)
    return lines


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.command], ids=lambda c: c.id)
def test_a_command_can_be_pasted(claim):
    assert not re.search(r"\.\.\.|\b(RECIPE|FOLDER|FILE|PATH|DIR|SPACE|ID|N)\b", claim.command)
    lines = programs(claim.command)
    assert lines
    for program, *arguments in lines:
        if program == "telechat-moe":
            build_parser().parse_args(arguments)
        elif program == "make":
            assert f" {arguments[0]} " in re.findall(r"(?m)^\.PHONY:(.*)$", MAKEFILE)[0]
        elif arguments[0] == "-m":
            assert program == "python"
            assert find_spec(arguments[1]) is not None
        else:
            assert program in ("python", "sh")
            assert (read.ROOT / arguments[0]).is_file()
        for word in arguments:
            if word.startswith(("tests/", "benchmarks/", "docs/")):
                assert (read.ROOT / word).exists(), word


@pytest.mark.parametrize(
    "page", sorted(read.ROOT.glob("benchmarks/*/README.md")), ids=lambda p: p.parent.name
)
def test_commands_of_a_readme_are_understood(page: Path):
    for block in re.findall(r"(?ms)^```sh\n(.*?)^```", page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            for program, *arguments in programs(line.partition("  #")[0]):
                if program == "telechat-moe":
                    build_parser().parse_args(arguments)
                elif [program, *arguments[:1]] == ["python", "-m"]:
                    assert find_spec(arguments[1]) is not None, line


def test_an_edited_page_breaks_its_claim():
    quote = Quote("README.md", "search 35,629 layouts", ("35,629",), ("x",))
    changed = Claim("x", "x", "unverified", "x", (quote,))
    assert read.problems([changed]) == ["x: README.md does not say 'search 35,629 layouts'"]
    text = read.table("README.md", "| what | result | machine")
    edited = read.seal(text.replace("5.9 %", "5.8 %"))
    sealed = Quote("README.md", table="| what | result | machine", seal=edited, times="AMD")
    wrong = read.problems([Claim("x", "x", "unverified", "x", (sealed,))])
    assert "changed; measure it again" in wrong[0]


@pytest.mark.parametrize("status", read.MEASURED)
def test_words_alone_verify_nothing(status):
    words = Quote("README.md", "whose error is 5.9 % on average")
    claim = Claim("x", "x", status, "x", (words,), machine="AMD", commit="1", date="1")
    assert ["needs `read`, or `times`" in text for text in read.problems([claim])] == [True]
    timed = replace(claim, quotes=(replace(words, times="AMD"),))
    assert read.problems([timed]) == []
    elsewhere = replace(claim, quotes=(replace(words, times="a laptop"),))
    assert "expected one of AMD" in read.problems([elsewhere])[0]


def test_words_that_are_called_a_time_have_a_unit_of_speed():
    unit = re.compile(
        r"\d (?:s|ms|us|seconds|times|%|points|GiB)\b|\d %|a CPU second|per CPU second"
    )
    words = {q.text for c in CLAIMS for q in c.quotes if q.times and q.text}
    assert [text for text in words if not unit.search(text)] == []


def test_every_commit_is_in_the_history():
    if not history.is_whole():
        pytest.skip("not judged: this clone has no history (git fetch --unshallow)")
    texts = {c.id: f"{c.commit} {c.note}" for c in CLAIMS}
    texts |= {
        p: " ".join(re.findall(r"commit [0-9a-f]{7}\b", read.page_text(p))) for p in read.pages()
    }
    hashes = {
        (name, word)
        for name, text in texts.items()
        for word in re.findall(r"\b[0-9a-f]{7,40}\b", text)
        if re.search(r"[a-f]", word) or name in {c.id for c in CLAIMS if word in c.commit}
    }
    assert len(hashes) > 30
    assert sorted(entry for entry in hashes if not history.in_history(entry[1])) == []


def test_a_command_depends_on_folders_that_there_are():
    for claim in CLAIMS:
        if claim.command:
            folders = history.covers(claim)
            assert folders, claim.id
            assert [f for f in folders if not (read.ROOT / f).exists()] == [], claim.id


def test_a_claim_is_stale_if_its_folders_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        process = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return process.stdout.strip()

    for name in ("tools/plan/cost.py", "ops/rope.py", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a 1 b\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(history, "ROOT", tmp_path)
    monkeypatch.setattr(read, "ROOT", tmp_path)
    quote = Quote("README.md", "a 1 b", ("1",), ("x",))
    command = "telechat-moe plan layout x"
    claim = Claim(
        "x", "x", "verified", command, (quote,), commit=git("rev-parse", "--short", "HEAD")
    )
    history._changed.cache_clear()
    assert (history.stale(claim), history.reworded(claim)) == ([], False)
    (tmp_path / "ops" / "rope.py").write_text("2")
    history._changed.cache_clear()
    assert history.stale(claim) == []  # the planner does not run operators
    (tmp_path / "tools" / "plan" / "cost.py").write_text("2")
    history._changed.cache_clear()
    assert history.stale(claim) == ["tools/plan"]
    assert history.stale(replace(claim, commit="1234567")) == ["its commit is unknown"]
    assert history.reworded(replace(claim, quotes=(replace(quote, text="a 2 b"),)))
    history._changed.cache_clear()


CPUINFO = "vendor_id\t: {}\ncpu family\t: {}\nmodel name\t: A\nflags\t\t: fpu {}\n"


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "name"),
    [
        ("AuthenticAMD", "26", "avx2 avx512f", "AMD"),
        ("AuthenticAMD", "25", "avx2 avx512f", "AMD (Zen 4)"),
        ("AuthenticAMD", "25", "avx2", "another"),
        ("GenuineIntel", "6", "avx512f amx_tile", "Intel"),
        ("GenuineIntel", "6", "avx512f", "another"),
    ],
)
def test_a_machine_is_known_by_its_processor(vendor, family, flags, name, monkeypatch):
    assert history.machine(CPUINFO.format(vendor, family, flags) * 2) == name
    monkeypatch.setattr(history, "this_machine", lambda: name)
    bound = Claim("x", "x", "verified", "x", machine="AMD")
    assert history.holds_here(bound) == (name == "AMD")
    assert history.holds_here(replace(bound, machine="any"))
    assert history.machine("") == "another"


@pytest.mark.parametrize(
    ("changed", "compared", "left"),
    [
        (False, {"any", "AMD"}, "hold on one machine: Intel"),
        (True, {"any"}, "machine: AMD (AMD), Intel"),
    ],
)
def test_numbers_of_another_machine_are_not_compared(changed, compared, left, monkeypatch, capsys):
    monkeypatch.setattr(history, "this_machine", lambda: "AMD")
    monkeypatch.setattr(runner, "stale", lambda claim: claim.id != "fresh" and ["tools/plan"])
    machines = {"any": "any", "AMD": "AMD", "Intel": "Intel", "fresh": "any"}
    claims = [Claim(i, i, "verified", "x", quick=9, machine=m) for i, m in machines.items()]
    fresh = set() if changed else {"fresh"}
    assert {c.id for c in runner.select(claims, changed)} == compared | fresh
    assert left in capsys.readouterr().out


def test_what_does_not_fit_into_the_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ran: list[str] = []
    monkeypatch.setattr(runner, "run", lambda claim: ran.append(claim.id) or claim.id != "bad")
    chosen = [
        Claim(i, i, "verified", "x", quick=s) for i, s in (("long", 99), ("bad", 9), ("good", 9))
    ]
    assert runner.run_all(chosen, 60) == ["bad"]
    assert ran == ["bad", "good"]
    told = capsys.readouterr().out
    assert "1 minutes: long" in told
    assert "2 commands run; not held: bad" in told
    assert runner.run_all(chosen, 0) == []
    assert "0 commands run; nothing is judged" in capsys.readouterr().out


def test_no_quick_command_ends_at_a_time_limit():
    assert [c.id for c in CLAIMS if c.quick and "--limit" in c.command] == []
    assert "benchmarks.claims --changed" in (read.ROOT / ".ci" / "run").read_text(encoding="utf-8")


BOUNDS = [(c.id, q) for c in CLAIMS for q in c.quotes if q.source]


@pytest.mark.parametrize(("name", "quote"), BOUNDS, ids=[f"{i}-{q.page}" for i, q in BOUNDS])
def test_a_bound_of_a_page_is_that_of_its_test(name, quote):
    rows = compare(quote, "")
    assert rows
    assert [row for row in rows if not row[2]] == []


def test_a_figure_beside_a_quoted_one_is_not_covered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read, "units", lambda page: ["It takes 3.5 s and 2.5 GiB."])
    quote = Quote("README.md", "It takes 3.5 s", ("3.5",), ("x",))
    claim = Claim("x", "x", "verified", "x", (quote,))
    assert read.uncovered("README.md", [claim], None) == ["It takes 3.5 s and 2.5 GiB."]
    full = replace(claim, quotes=(replace(quote, text="3.5 s and 2.5 GiB"),))
    assert read.uncovered("README.md", [full], None) == []


TABLE = "| case | step, s | memory |\n|---|---|---|\n| **a 1** | 1.50 | 2.5 GiB, 30 % |\n| b | 1,500 | 3 GiB, 4 % |\n"
OUTPUT = "b 1500.2 3 4\na 1 1.502 2.5 30\n"


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        (OUTPUT, []),
        (OUTPUT.replace("30", "31"), ["30"]),
        (OUTPUT.replace("1500.2", "1501"), ["1,500"]),
        (OUTPUT.replace("a 1", "c 1"), ["| **a 1** | 1.50 | 2.5 GiB, 30 % |"]),
        ("", ["| **a 1** | 1.50 | 2.5 GiB, 30 % |", "| b | 1,500 | 3 GiB, 4 % |"]),
    ],
)
def test_a_table_is_compared_cell_by_cell(output, wrong, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.claims.compare.table", lambda page, header: TABLE)
    quote = Quote("README.md", read=(r"(?m)^{0} ([\d.]+) ([\d.]+) (\d+)$",), table="| case")
    rows = compare(quote, output)
    assert [printed for printed, _, good in rows if not good] == wrong
    assert len(rows) == 6 - 2 * sum(row.startswith("|") for row in wrong)
    fewer = replace(quote, read=(r"(?m)^{0} ([\d.]+) ([\d.]+)",))  # a number is left out
    assert not any(good for *_, good in compare(fewer, output))


@pytest.mark.parametrize(
    ("printed", "measured", "within", "good"),
    [
        ("5.9", 5.94, "printed", True),
        ("5.9", 5.96, "printed", False),
        ("35,628", 35628, "printed", True),
        ("35,628", 35629, "printed", False),
        ("2.1e-6", 1.9e-6, "at most", True),
        ("2.1e-6", 2.2e-6, "at most", False),
        ("2.1e-6", 2.14e-6, "printed", True),
        ("100", 104, "5 %", True),
        ("100", 106, "5 %", False),
    ],
)
def test_a_measured_number_is_judged_by_its_tolerance(printed, measured, within, good):
    assert judge(printed, measured, within) is good


def test_what_a_command_does_not_print_is_no_pass():
    quote = Quote("README.md", "gap 0", ("0",), ("gap: (\\d+)",))
    assert compare(quote, "gap: 0\ngap: 3") == [("0", 3.0, False)]  # the largest
    assert compare(quote, "nothing") == [("0", None, False)]


ACCURACY = (
    ("performance", r"logits (\S+) of", "tests/model/test_model_hf.py", r"LOGITS, .* = (\S+),"),
    ("performance", r"loss (\S+), every", "tests/model/test_model_hf.py", r"GRADIENT = \S+, (\S+),"),
    ("performance", r"gradient (\S+) \(", "tests/model/test_model_hf.py", r"GRADIENT = \S+, \S+, (\S+)"),
    ("performance", r"AdamW steps (\S+)\. ", "tests/model/test_training_hf.py", r"TRAINED = (\S+)"),
    ("tour", r"layouts are within (\S+) \(", "benchmarks/cluster/__main__.py", r"LATE = \S+, (\S+),"),
    ("tour", r"losses are within (\S+)\. ", "benchmarks/cluster/__main__.py", r"LATE = \S+, \S+, (\S+)"),
    ("align_tested", r"are at most (\S+) of it", "tests/align/judge/test_propagate.py", r"max\(ratios\) < (\S+)"),
)  # fmt: skip


@pytest.mark.parametrize(("page", "claimed", "file", "bound"), ACCURACY)
def test_bounds_of_the_accuracy_tests_are_at_most_ten_times_the_claims(page, claimed, file, bound):
    printed = re.search(claimed, read.page_text(f"docs/{page}.md"))
    tested = re.search(bound, (read.ROOT / file).read_text(encoding="utf-8"))
    assert printed
    assert tested
    assert float(printed[1]) < float(tested[1]) <= 10.001 * float(printed[1])

"""What a claim's last run is worth today: its commits, what changed since, and the machine it holds on."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from benchmarks.claims.read import ROOT, Claim, table, table_in

PLAN = ("tools/plan", "recipes", "telechat_moe/recipe")
GRAPH = (*PLAN, "telechat_moe/graph", "telechat_moe/model", "telechat_moe/sharding", "ops")
TRAIN = (*GRAPH[1:], "telechat_moe/data", "telechat_moe/train", "telechat_moe/launch")
COMMANDS: dict[str, tuple[str, ...]] = {
    r"telechat-moe plan\b": PLAN,
    r"telechat-moe (?:ls|show)\b": ("recipes", "telechat_moe/recipe"),
    r"benchmarks\.upstream\b": ("recipes", "telechat_moe/recipe", "telechat_moe/interop"),
    r"telechat-moe dryrun\b|make cluster\b": (*GRAPH, "telechat_moe/moe"),
    r"telechat-moe (?:train|launch)\b|make cluster\b": TRAIN,
    r"telechat-moe sweep\b": (*TRAIN, *PLAN, "tools/sweep"),
    r"telechat-moe align\b|benchmarks\.(?:align_\w+|peers)\b|tests/(?:align|loss)\b": (
        "tools/align",
        "tools/loss",
        "tools/phases",
    ),
    r"benchmarks\.(?:plan_\w+|overlap|data_balance)\b|tests/plan\b": PLAN,
    r"benchmarks\.(?:plan_memory|swap|exchange_overlap|cluster)\b": GRAPH,
    r"benchmarks\.(?:train_step|balance_pilot|data_loader|checkpoint|data_balance\.processes)\b": TRAIN,
    r"benchmarks\.(?:ops|attention_documents|host_syncs)\b|tests/ops\b": ("ops",),
    r"benchmarks\.placement\b": ("telechat_moe/moe",),
    r"tests/(?:model|interop|launch)\b": (*TRAIN, "telechat_moe/interop"),
}
"""What of the product a command runs; its own folder of benchmarks or tests comes from its words."""


def covers(claim: Claim) -> tuple[str, ...]:
    """Return the folders and files that a claim's command depends on."""
    folders = {
        f for pattern, fs in COMMANDS.items() if re.search(pattern, claim.command) for f in fs
    }
    folders |= {f"benchmarks/{name}" for name in re.findall(r"-m benchmarks\.(\w+)", claim.command)}
    folders |= set(re.findall(r"\b(?:tests|benchmarks)/[\w/]+(?:\.\w+)?", claim.command))
    return tuple(sorted(folders - {"benchmarks/claims"} or folders))


def commits(claim: Claim) -> list[str]:
    """Return the commits that a claim was measured at, the newest first."""
    return re.findall(r"\b[0-9a-f]{7,40}\b", claim.commit)


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def in_history(commit: str) -> bool:
    """Return whether a commit is this one or before it."""
    return git("merge-base", "--is-ancestor", f"{commit}^{{commit}}", "HEAD").returncode == 0


def is_whole() -> bool:
    """Return whether this is a clone with its history; without it no commit is judged."""
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


@cache
def _changed(commit: str) -> tuple[str, ...]:
    return tuple(git("diff", "--name-only", "--no-renames", commit).stdout.split("\n"))


def stale(claim: Claim) -> list[str]:
    """Return what changed of ``covers`` since a claim's commit; ``its commit is unknown`` if git has none."""
    if not claim.commit:
        return []
    newest = next(iter(commits(claim)), "")
    if not in_history(newest):
        return ["its commit is unknown"]
    files = _changed(newest)
    return [
        f for f in covers(claim) if any(file == f or file.startswith(f"{f}/") for file in files)
    ]


@cache
def _page(commit: str, page: str) -> str:
    return git("show", f"{commit}:{page}").stdout


def reworded(claim: Claim) -> bool:
    """Return whether a page says something else than at a claim's commit."""
    newest = next(iter(commits(claim)), "HEAD")
    pages = [(_page(newest, quote.page), quote) for quote in claim.quotes]
    return any(
        table_in(text, quote.table) != table(quote.page, quote.table)
        if quote.table
        else quote.text not in " ".join(text.split())
        for text, quote in pages
    )


def machine(cpuinfo: str) -> str:
    """Return the name in claims.yaml of the machine with this /proc/cpuinfo, ``another`` if no result of it is there."""
    fields = dict(re.findall(r"(?m)^(vendor_id|cpu family|flags)\s*: (.*)$", cpuinfo))
    flags = fields.get("flags", "").split()
    if "amx_tile" in flags:
        return "Intel"
    if fields.get("vendor_id") == "AuthenticAMD" and "avx512f" in flags:
        return {"25": "AMD (Zen 4)", "26": "AMD"}.get(fields["cpu family"], "another")
    return "another"


@cache
def this_machine() -> str:
    """Return this machine's name in claims.yaml."""
    file = Path("/proc/cpuinfo")
    return machine(file.read_text(encoding="utf-8") if file.exists() else "")


def holds_here(claim: Claim) -> bool:
    """Return whether a claim's numbers are those of this machine, or of any."""
    return claim.machine in ("any", this_machine())

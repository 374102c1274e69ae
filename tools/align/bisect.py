"""Find the first divergent call of a run and say what is wrong about it."""

from dataclasses import replace

from telechat_moe.files import Progress
from telechat_moe.tools.align.dump.records import Dump
from telechat_moe.tools.align.explain.kinds import explained
from telechat_moe.tools.align.judge.comparison import ReferenceCache, compare, with_steps
from telechat_moe.tools.align.judge.outcome import Outcome
from telechat_moe.tools.align.judge.standard import Standard


def bisect(
    reference: Dump,
    target: Dump,
    cache: ReferenceCache | None = None,
    itself: bool = False,
    progress: Progress | None = None,
    standard: Standard | None = None,
) -> Outcome:
    """Compare a run with a reference of the same layout and explain its findings; arguments as of :func:`compare`."""
    outcome = compare(reference, target, cache, itself, progress, standard)
    findings = [explained(finding) for finding in outcome.findings]
    findings = [replace(f, evidence=with_steps(f.evidence)) for f in findings]
    return replace(outcome, findings=findings)

"""Write verdicts as JUnit XML, which CI systems show."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr


class JunitCase(NamedTuple):
    """One judged item."""

    group: str  # group of the case (JUnit's `classname`)
    name: str  # name of what was judged
    failure: str | None = None  # why it failed; None: it did not fail
    skipped: str | None = None  # why it was not judged; None: it was judged
    text: str = ""  # details of a failure

    def xml(self) -> str:
        """Return the case as XML."""
        inner = ""
        if self.failure is not None:
            inner = f"<failure message={quoteattr(self.failure)}>{escape(self.text)}</failure>"
        elif self.skipped is not None:
            inner = f"<skipped message={quoteattr(self.skipped)}/>"
        return f"  <testcase classname={quoteattr(self.group)} name={quoteattr(self.name)}>{inner}</testcase>\n"


def suite(name: str, cases: Sequence[JunitCase]) -> str:
    """Return a suite of cases as JUnit XML."""
    body = "".join(case.xml() for case in cases)
    failures, skipped = body.count("<failure "), body.count("<skipped ")
    counts = f'tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}"'
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f"{head}<testsuite name={quoteattr(name)} {counts}>\n{body}</testsuite>\n"

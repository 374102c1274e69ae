"""Compare the tensors that a map names by a published standard: for runs of other layouts or frameworks.

Each entry of the map is one tensor, merged from all ranks of each run (``points.py``), one by one. Tensors that the map
does not name are not compared. A choice of experts that differs ends the comparison of its step: two frameworks'
routers cannot be pinned to each other, so whole tensors after it are not comparable.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from telechat_moe.tools.align.compare.compare import LACKING, chunks, measured, outcome_of
from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.compare.rows import Outcome, Row
from telechat_moe.tools.align.dump.records import Array, Dump
from telechat_moe.tools.align.judge.points import Point, update_places, weight_of
from telechat_moe.tools.align.maps.links import Link, check_map, linked
from telechat_moe.tools.align.numerics import is_float

_FOLLOWS = "an earlier decision differs between the runs; `align bisect --map` judges operators by their own inputs"


def compare_linked(
    reference: Dump,
    target: Dump,
    profile: Profile,
    links: Sequence[Link],
    steps: Sequence[int] | None = None,
    common: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Compare the tensors of a map (``links.read_map``) by a standard that needs no third run.

    The other arguments are those of :func:`compare.compare`; progress counts entries of the map.
    """
    check_map(links, reference, target)
    both = [s for s in target.steps if s in reference.steps and (steps is None or s in steps)]
    compared = _Map(profile, common)
    rows: list[Row] = []
    for number, step in enumerate(both):
        pairs = linked(reference.at(step), target.at(step), links)
        for i, (link, pair) in enumerate(zip(links, pairs, strict=True)):
            if progress is not None:
                progress(number * len(links) + i, len(both) * len(links))
            rows.append(compared.row(step, link, pair[1], pair[2]))
        compared.flipped = False
    found = outcome_of(rows, compared.flips, profile, compared.nbytes, True)
    if not both:
        return replace(found, reason="the dumps have no step in common")
    note = f"{len(links)} tensors a step, those of the map; no other is compared"
    return replace(found, notes=[*found.notes, note])


def weight_links(dump: Dump) -> list[Link]:
    """Return the map for two runs of one model: gradients, weights and states of each update, by name."""
    found: dict[str, Link] = {}
    for rank in dump.ranks.values():
        for call in rank.calls.values():
            weight = weight_of(call)
            if weight is None:
                continue
            for (what, when), place in update_places(call).items():
                name = f"{weight}: {what}{when}"
                names = (f"weight {weight} {place}",)
                found[name] = Link(name, names, names)
    return list(found.values())


class _Map:
    """Judges the entries of a step, in order."""

    def __init__(self, profile: Profile, common: bool) -> None:
        self.profile, self.common = profile, common
        self.flips: dict[str, list[str]] = {"legal": [], "illegal": [], "not judged": []}
        self.flipped = False
        self.nbytes = 0

    def row(self, step: int, link: Link, one: Point, other: Point) -> Row:
        """Return the row of one entry."""
        shape = () if other.values is None else other.values.shape
        row = Row(step, other.rank, link.name, "", "", other.dtype, shape, "pass", "values")
        for side, point in (("target", other), ("reference", one)):
            if point.differs:
                said = f"copies differ in the {side}: {point.problem}"
                return replace(row, status="diverged", basis="merge", reason=said)
            if point.values is None:
                said = f"not known in the {side}: {point.problem}"
                return replace(row, status=LACKING[self.common], basis="", reason=said)
        assert one.values is not None
        assert other.values is not None
        return self._judged(row, link, one, other, one.values, other.values)

    def _judged(
        self, row: Row, link: Link, one: Point, other: Point, golden: Array, target: Array
    ) -> Row:
        if golden.size != target.size:
            said = f"shape {list(target.shape)}, reference {list(golden.shape)}"
            return replace(row, status="diverged", basis="", reason=said)
        integers = [not is_float(d) for d in (one.dtype, other.dtype)]
        if integers[0] != integers[1]:
            said = f"type {other.dtype}, reference {one.dtype}"
            return replace(row, status="not comparable", basis="", reason=said)
        golden = golden.reshape(target.shape)
        if link.in_any_order and integers[0]:
            return self._choice(row, golden, target)
        measure = self.profile.measure(other.dtype, one.dtype)
        if measure is None:
            said = f"{self.profile.name} has no line for {other.dtype} against {one.dtype}"
            return replace(row, status="not judged", basis="", reason=said)
        self.nbytes += golden.nbytes + target.nbytes
        for chunk in chunks([target, golden]):
            measure.add(chunk)
        found = measured(row, measure, target, None)
        if found.status == "diverged" and self.flipped:
            return replace(found, status="not comparable", checks=[], reason=_FOLLOWS)
        return found

    def _choice(self, row: Row, golden: Array, target: Array) -> Row:
        width = target.shape[-1] if target.ndim else 1
        same = (golden == target).reshape(-1, width).all(-1)
        row = replace(row, basis="decision", elements=target.size)
        if same.all():
            return row
        said = f"{row.key} of step {row.step}: {int((~same).sum())} of {same.size} rows chose otherwise"
        self.flips["not judged"].append(said)
        if self.flipped:
            return replace(row, status="not comparable", basis="", reason=_FOLLOWS)
        self.flipped = True
        reason = "chosen otherwise; whether scores that nearly tie allow it, a map cannot say: `align bisect --map`"
        return replace(row, status="not comparable", basis="", reason=reason)

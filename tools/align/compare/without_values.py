"""Judge tensors whose values a dump lacks by fingerprints, checksums and statistics."""

import math
from collections.abc import Sequence
from dataclasses import replace

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.compare.measures import Check
from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.compare.rows import Row
from telechat_moe.tools.align.dump import fingerprint
from telechat_moe.tools.align.dump.fingerprint import Fingerprint
from telechat_moe.tools.align.dump.records import Stats, TensorRecord
from telechat_moe.tools.align.judge.distance import checksum, stats_of
from telechat_moe.tools.align.numerics import FLOATS, is_float

_ESTIMATE = 2.0  # an estimated distance is too large only beyond this multiple of the allowed one


def without_values(row: Row, golden: TensorRecord, target: TensorRecord, profile: Profile) -> Row:
    """Judge a tensor whose values one of the dumps lacks."""
    if not math.prod(row.shape):
        return replace(row, note="no elements")
    same = golden.dtype == target.dtype
    row = replace(row, elements=math.prod(row.shape))
    prints = _fingerprint(golden), _fingerprint(target)
    if prints[0] is not None and prints[1] is not None:
        return _by_fingerprint(row, prints[0], prints[1], profile, same)
    crcs = checksum(golden, target), checksum(target, golden)
    if same and None not in crcs:
        if crcs[0] == crcs[1] and not profile.nan_differs:
            return replace(row, basis="checksum", note="equal CRC-32")
        exact = profile.name == "bitwise" or not is_float(row.dtype)
        if crcs[0] != crcs[1] and exact:
            return replace(row, status="diverged", basis="checksum", reason="other checksum")
    stats = stats_of(golden), stats_of(target)
    if stats[0] is not None and stats[1] is not None:
        return _by_statistics(row, stats[0], stats[1], profile)
    said = "the dumps record no common statistic of this tensor that identifies its values"
    return replace(row, status="not judged", basis="", reason=said)


def _fingerprint(record: TensorRecord) -> Fingerprint | None:
    if record.fingerprint is not None:
        return Fingerprint.from_bytes(record.fingerprint)
    return None if record.read is None else fingerprint.of(record.load())


def _by_fingerprint(
    row: Row,
    golden: Fingerprint,
    target: Fingerprint,
    profile: Profile,
    same: bool,
) -> Row:
    row = replace(row, basis="fingerprint")
    if golden.total != target.total:
        raise BadInputError(f"{row.key} {row.place}: fingerprints of tensors of other sizes")
    equal = fingerprint.equal(target, golden) if same else None
    if equal and not (profile.nan_differs and golden.special):
        return replace(row, note="equal bits")
    if equal is False and (profile.name == "bitwise" or not is_float(row.dtype)):
        return replace(row, status="diverged", reason="other bits")
    distance = fingerprint.distance(target, golden)
    allowed = profile.envelope(profile.line(row.dtype), golden.norm)
    unknown = replace(row, status="not judged", basis="")
    if math.isnan(distance):
        return replace(unknown, reason="fingerprints with infinities or NaN")
    if allowed is not None and golden.norm:
        limit = allowed[0] + allowed[1] * math.sqrt(golden.total) / golden.norm
        if distance > _ESTIMATE * limit:
            check = Check("relative L2 (estimate)", distance, _ESTIMATE * limit, False)
            return replace(row, status="diverged", checks=[check])
    said = f"fingerprints differ by less than shows that {profile.name} fails, or it sets no limit to them"
    return replace(unknown, reason=said, note=f"relative L2 about {distance:.2g}")


def _by_statistics(row: Row, golden: Stats, target: Stats, profile: Profile) -> Row:
    """Judge by extremes and norm: differences larger than a passing tensor's elements allow show that it fails."""
    row = replace(row, basis="statistics")
    unknown = replace(row, status="not judged", basis="")
    pairs = [(n, getattr(target, n), getattr(golden, n)) for n in ("max", "min", "norm")]
    known = [(n, t, g) for n, t, g in pairs if t is not None and g is not None]
    for name, t, g in known:
        if math.isnan(t) != math.isnan(g) and name != "norm":
            said = f"{name} {t:g}, reference {g:g}"
            return replace(row, status="diverged", reason=said)
    ends = [abs(g) for n, _, g in known if n != "norm"]
    largest = max((e for e in ends if math.isfinite(e)), default=0.0)
    allowed = profile.envelope(profile.line(row.dtype), largest)
    allowed = allowed if is_float(row.dtype) else (0.0, 0.0)
    checks = [] if allowed is None else _necessary(row, known, max(ends, default=0.0), allowed)
    if any(not c.ok for c in checks):
        return replace(row, status="diverged", checks=checks)
    said = "statistics show no divergence, and cannot show that there is none"
    return replace(unknown, reason=said)


def _necessary(
    row: Row,
    known: Sequence[tuple[str, float, float]],
    largest: float,
    allowed: tuple[float, float],
) -> list[Check]:
    rtol, atol = allowed
    found: list[Check] = []
    for name, t, g in known:
        if not (math.isfinite(t) and math.isfinite(g)):
            continue
        limit = atol + rtol * largest
        if name == "norm":
            if not is_float(row.dtype):
                continue
            # Norms are rounded themselves, at worst in the tensor's type.
            own = 4 * FLOATS[row.dtype].unit + 1e-4 if row.dtype in FLOATS else 1e-4
            limit = atol * math.sqrt(row.elements) + (rtol + own) * abs(g)
        found.append(Check(f"difference of {name}", abs(t - g), limit, abs(t - g) <= limit))
    return found

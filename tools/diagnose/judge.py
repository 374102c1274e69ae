"""Name the causes of lost time.

A rank that waits is a victim. So only the seconds count in which a rank waits for nobody (`records.LOCAL`): the ranks to blame are
those that are later there than their peers, part by part. What was recorded beside the times (clock, rows, faults...) explains
an excess; what is left over is the kind that these exclude. Collectives are judged by their shortest member: the last rank to
arrive waits for nobody, so its time is that of the link.
"""

from dataclasses import dataclass

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.causes import KINDS, Cause, possible
from telechat_moe.tools.diagnose.excess import LEAST, LateRow, center, late_rows
from telechat_moe.tools.diagnose.links import late_links, late_pairs
from telechat_moe.tools.diagnose.records import LOCAL, LOST, Records

RUN_WIDE = {"save": 0.02, "data": 0.03, "gc": 0.02, "delay": 0.05, "paused": 0.02}
"""Share of the step from which on a part that all ranks have alike is a cause."""
REMOTE = 0.15
"""Share of a rank's memory on another NUMA node, above its peers', that counts as a wrong binding."""
UNEXPLAINED = 0.3
"""Share of what is explained that may be left over: explanations are that inexact."""
SURE = 5.0
"""Standard errors of a slope that count as an effect."""
SAMPLE = 256
"""Ranks from which the effect of rows and work on computation is estimated."""
MOST = 64
"""Ranks of a part that are explained one by one."""


@dataclass(frozen=True)
class RowCause:
    """A cause by row numbers, before it is priced."""

    kinds: tuple[str, ...]
    late: LateRow
    part: str
    seconds: float


class Judge:
    """Judge the times of a run."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.step_s, self.calm_s = records.step_seconds(), records.calm_seconds()
        self.mean_s = records.mean_seconds()
        self.recorded = frozenset(records.columns) | (
            {"comm"} if records.axes or records.pairs else set()
        )
        self._slopes: dict[int, dict[str, float]] = {}

    def causes(self) -> list[Cause]:
        """Return all causes, the one that costs most first."""
        late = self._late_parts()
        excesses = [
            excess for part in LOCAL if part in late for excess in self._explain(part, late)
        ]
        lost = {part: late.get(part, {}).values() for part in LOST}
        for part, rows in lost.items():
            excesses += [RowCause((self._of_lost(part),), row, part, row.seconds) for row in rows]
        stopped = {row.row: row.seconds for part in ("delay", "paused") for row in lost[part]}
        causes = [
            *self._by_host(excesses),
            *self._run_wide(),
            *late_links(self.records, self.step_s, self.calm_s),
            *late_pairs(self.records, self.step_s, self.calm_s, stopped),
        ]
        return sorted(causes, key=lambda c: (-c.lost, -c.share, c.ranks))

    # ------------------------------------------------------------------------------------- ranks

    def _late_parts(self) -> dict[str, dict[int, LateRow]]:
        late_by_part: dict[str, dict[int, LateRow]] = {}
        for part in (*LOCAL, *LOST):
            if part in self.records.columns:
                x, _ = center(self.records.columns[part], self.records.stage)
                rows = late_rows(x, self.records.stage, self.calm_s, lost=part in LOST)
                late_by_part[part] = {late_row.row: late_row for late_row in rows}
        return late_by_part

    def _excess(self, name: str, row: int, part: slice) -> Array | None:
        """Return a column of a rank minus the median of the other ranks of its stage; None: not recorded."""
        if name not in self.records.columns:
            return None
        x = self.records.columns[name][:, part]
        others = np.flatnonzero(self.records.stage == self.records.stage[row])
        others = others[others != row]
        return (x[row] - np.median(x[others], axis=0)).astype(np.float64)

    def _explain(self, part: str, late: dict[str, dict[int, LateRow]]) -> list[RowCause]:
        """Return what explains the excess of each late rank of a part."""
        excesses: list[RowCause] = []
        min_excess = LEAST * self.calm_s
        for row, late_row in list(late[part].items())[:MOST]:
            kinds = self._explained(part, row, late_row, late)
            for kind, seconds in kinds.items():
                if seconds >= min_excess and KINDS[kind].part not in LOST:
                    excesses.append(RowCause((kind,), late_row, part, seconds))
            explained = sum(kinds.values())
            left = late_row.seconds - explained
            if left >= max(min_excess, UNEXPLAINED * explained):
                kind = self._left_over(part, row, late_row)
                excesses.append(RowCause(kind, late_row, part, left))
        return excesses

    def _explained(
        self, part: str, row: int, late_row: LateRow, late: dict[str, dict[int, LateRow]]
    ) -> dict[str, float]:
        """Return the seconds of an excess that records explain, by kind."""
        span = slice(late_row.begin, late_row.end)
        seconds_by_kind: dict[str, float] = {}
        if part == "compute":
            seconds_by_kind |= self._compute(row, span)
        if part in ("host", "data"):
            if self.records.inside and part == "host":
                for name in LOST:
                    if row in late.get(name, {}):
                        lost = self._excess(name, row, span)
                        kind = self._of_lost(name)
                        seconds_by_kind[kind] = 0.0 if lost is None else float(lost.mean())
            excess, faults = self._excess(part, row, span), self._excess("faults", row, span)
            if excess is not None and faults is not None:
                seconds_by_kind["page_cache"] = _effect(excess, faults) * float(faults.mean())
        return {kind: seconds for kind, seconds in seconds_by_kind.items() if seconds > 0}

    def _compute(self, row: int, span: slice) -> dict[str, float]:
        """Return the seconds of a rank's computation that its clock, its rows and its work explain."""
        seconds: dict[str, float] = {}
        columns = self.records.columns
        clock = self._excess("clock", row, span)
        if clock is not None:
            clocks = columns["clock"][row, span]
            usual = clocks - clock
            compute = columns["compute"][row, span]
            seconds["frequency_drop"] = float((compute * (1 - clocks / usual)).mean())
        for name, kind in (("rows", "expert_imbalance"), ("work", "sequence_imbalance")):
            excess = self._excess(name, row, span)
            if excess is not None:
                slopes = self._slope(int(self.records.stage[row]))
                seconds[kind] = slopes.get(name, 0.0) * float(excess.mean())
        return seconds

    def _slope(self, stage: int) -> dict[str, float]:
        """Return the seconds of computation for a row and a unit of work on a stage, from how they vary on each rank."""
        if stage not in self._slopes:
            columns = self.records.columns
            rows = np.flatnonzero(self.records.stage == stage)[:SAMPLE]
            names = [name for name in ("rows", "work") if name in columns]
            y = _varying(columns["compute"][rows])
            xs = [_varying(columns[name][rows]) for name in names]
            self._slopes[stage] = dict(zip(names, _slopes(y, xs), strict=True))
        return self._slopes[stage]

    def _left_over(self, part: str, row: int, late_row: LateRow) -> tuple[str, ...]:
        """Return the kinds that an excess may be for which there is no explanation."""
        if part == "save":
            return ("checkpoint",)
        if part == "host":
            remote = self._excess("remote", row, slice(late_row.begin, late_row.end))
            if remote is not None and remote.mean() > REMOTE:
                return ("numa",)
        kind = {"data": "slow_reader", "host": "slow_host", "compute": "slow_rank"}[part]
        return possible(kind, self.recorded, late_row.lasting)

    @staticmethod
    def _of_lost(part: str) -> str:
        return next(name for name, kind in KINDS.items() if kind.needs == part)

    # ------------------------------------------------------------------------------------- scopes

    def _by_host(self, excesses: list[RowCause]) -> list[Cause]:
        """Join what all ranks of a host have alike to one cause of the host."""
        causes: list[Cause] = []
        alike: dict[tuple[int, str, tuple[str, ...]], list[RowCause]] = {}
        for excess in excesses:
            key = (int(self.records.host[excess.late.row]), excess.part, excess.kinds)
            alike.setdefault(key, []).append(excess)
        for (host, _, _), members in alike.items():
            count = int((self.records.host == host).sum())
            if count > 1 and len(members) > 0.6 * count and len(self.records.hosts) > 1:
                causes.append(self._cause(members, "host"))
            else:
                causes += [self._cause([excess], "rank") for excess in members]
        return causes

    def _cause(self, members: list[RowCause], scope: str) -> Cause:
        first, rows = members[0], [m.late.row for m in members]
        span = slice(min(m.late.begin for m in members), max(m.late.end for m in members))
        seconds = float(np.mean([m.seconds for m in members]))
        return Cause.at(
            self.records,
            rows,
            span,
            self.step_s,
            kinds=first.kinds,
            scope=scope,
            part=first.part,
            seconds=seconds,
            sigmas=max(m.late.sigmas for m in members),
            lost=self._lost(rows, first.part, span, seconds),
        )

    def _lost(self, rows: list[int], part: str, span: slice, seconds: float) -> float:
        """Return the share of the run's time that would not have passed without an excess of some ranks.

        Each step lasts as long as its latest rank; without the excess these ranks would come earlier, and another is the
        latest.
        """
        local = self.records.own[:, span]
        latest = local.max(0)
        less = local[rows].copy()
        for i, row in enumerate(rows):
            excess = self._excess(part, row, span)
            if excess is not None:
                above = np.maximum(excess, 0)
                less[i] -= above * min(1.0, seconds / max(float(above.mean()), 1e-12))
        others = (
            np.delete(local, rows, axis=0).max(0)
            if len(rows) < len(local)
            else np.zeros_like(latest)
        )
        saved = latest - np.maximum(others, less.max(0))
        return float(saved.sum()) / (self.mean_s * len(self.records.steps))

    def _run_wide(self) -> list[Cause]:
        """Return what all ranks wait for alike."""
        causes: list[Cause] = []
        records = self.records
        for part, min_share in RUN_WIDE.items():
            if part not in records.columns:
                continue
            means = records.columns[part].mean(1, dtype=np.float64)
            seconds = float(np.quantile(means, 0.25, method="lower"))
            if seconds >= min_share * self.calm_s:
                kind = "slow_reader" if part == "data" else self._of_lost(part)
                causes.append(
                    Cause.at(
                        records,
                        (),
                        slice(None),
                        self.step_s,
                        kinds=(kind,),
                        scope="run",
                        part=part,
                        seconds=seconds,
                        sigmas=0.0,
                        lost=seconds / self.mean_s,
                    )
                )
        return causes


def _varying(x: np.ndarray) -> Array:
    """Return what varies on a rank that does not vary on all: minus its own mean and each step's."""
    y = x.astype(np.float64)
    y -= np.median(y, axis=0)
    return (y - y.mean(1, keepdims=True)).ravel()


def _effect(y: Array, x: Array) -> float:
    """Return the slope of a line of y over x, 0 where it is not sure."""
    return _slopes(y - y.mean(), [x - x.mean()])[0]


def _slopes(y: Array, xs: list[Array]) -> list[float]:
    """Return the coefficients of a least-squares fit without a constant; 0 where one is not sure."""
    varying = [i for i, x in enumerate(xs) if float(x @ x) > 0]
    slopes = [0.0] * len(xs)
    if not varying or len(y) <= len(varying) + 2:
        return slopes
    matrix = np.stack([xs[i] for i in varying], 1)
    try:
        inverse = np.linalg.inv(matrix.T @ matrix)
    except np.linalg.LinAlgError:
        return slopes
    fit = inverse @ (matrix.T @ y)
    residual = y - matrix @ fit
    error = np.sqrt(float(residual @ residual) / (len(y) - len(varying)) * np.diag(inverse))
    for i, slope, e in zip(varying, fit, error, strict=True):
        slopes[i] = float(slope) if abs(slope) > SURE * e else 0.0
    return slopes

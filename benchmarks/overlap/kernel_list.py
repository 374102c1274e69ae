"""Read a list of device kernels, and tell the role of each.

A list is a CSV with the columns ``dur_us, stream, name, grid`` and, where it was measured, ``start_us``.
Start times give the order within each stream and the measured figures; no prediction reads them.
"""

import csv
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from telechat_moe.errors import BadInputError

ROLES = (
    ("layout", r"get_dispatch_layout"),
    ("notify", r"(\b|_)ep::.*notify"),
    ("dispatch", r"(\b|_)ep::.*dispatch"),
    ("combine", r"(\b|_)ep::.*combine"),
    ("exchange", r"all_?to_?all"),
    ("collective", r"(\b|_)ep::|nccl|hccl|hcom|all_?reduce|all_?gather|reduce_?scatter|send_?recv"),
    ("attention_backward", r"(flash|fmha|attn|attention).*(bwd|backward|grad)"),
    ("attention", r"flash|fmha|compute_attn|attention"),
    ("expert_out", r"reduce_fused|unpermute|moe_sum|finalize_moe"),
    ("expert_in", r"expand_to_fused|fused_mapping|count_expert|permute|moe_align"),
    ("norm_backward", r"(\bln|norm)\w*(_bwd|backward|_grad)|ln_bwd"),
    ("norm", r"layer_?norm|rms_?norm|ln_fwd"),
)
"""Each role with the pattern of its kernels' names (DeepEP, DeepSeek, Megatron, NCCL); the first that fits counts."""

COMMUNICATION = ("layout", "notify", "dispatch", "combine", "exchange", "collective")
PAYLOAD = ("dispatch", "combine", "exchange", "collective")
"""Roles that move the tokens; the kernels before them on their stream prepare the same transfer."""

_PATTERNS = tuple((role, re.compile(pattern, re.IGNORECASE)) for role, pattern in ROLES)


@dataclass(frozen=True)
class Kernel:
    """One kernel as it was launched."""

    stream: str
    name: str
    duration_us: float
    grid: str
    """Launch shape as written, such as `[2, 56, 1]`."""
    blocks: int
    role: str

    @property
    def communicates(self) -> bool:
        """Whether it belongs to a transfer between devices."""
        return self.role in COMMUNICATION

    @property
    def backward(self) -> bool:
        """Whether its name says that it computes gradients."""
        return re.search(r"bwd|backward|_grad", self.name, re.IGNORECASE) is not None


@dataclass(frozen=True)
class KernelList:
    """Kernels in the order of each stream, with their measured start where there is one."""

    kernels: tuple[Kernel, ...]
    measured_start_us: tuple[float, ...] | None


def role_of(name: str) -> str:
    """Return a kernel's role by its name; "" if none is known."""
    return next((role for role, pattern in _PATTERNS if pattern.search(name)), "")


def _blocks(grid: str) -> int:
    return math.prod(max(int(number), 1) for number in re.findall(r"\d+", grid))


def read_kernels(path: str | Path) -> KernelList:
    """Read a kernel list.

    Raises:
        BadInputError: The file cannot be read, a column is missing, a number is none, or the list is empty.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: cannot be read as a CSV of kernels: {error}") from None
    if not rows:
        raise BadInputError(f"{path}: no kernels; expected a CSV with dur_us, stream, name")
    missing = {"dur_us", "stream", "name"} - set(rows[0])
    if missing:
        raise BadInputError(
            f"{path}: no column {', '.join(sorted(missing))}; found {', '.join(rows[0])}"
        )
    kernels: list[Kernel] = []
    starts: list[float] = []
    for line, row in enumerate(rows, 2):
        try:
            duration = float(row["dur_us"])
            start = float(row["start_us"]) if row.get("start_us") else float("nan")
        except (TypeError, ValueError):
            raise BadInputError(
                f"{path}:{line}: dur_us {row['dur_us']!r}, start_us {row.get('start_us')!r}; "
                "expected numbers of microseconds"
            ) from None
        if not 0 <= duration < float("inf"):
            raise BadInputError(f"{path}:{line}: dur_us is {duration:g}; expected 0 or more")
        name, grid = row["name"] or "", row.get("grid") or ""
        if grid and not re.search(r"\d", grid):
            raise BadInputError(
                f"{path}:{line}: grid is {grid!r}; expected blocks, such as [2, 56, 1]"
            )
        kernels.append(
            Kernel(str(row["stream"]), name, duration, grid, _blocks(grid), role_of(name))
        )
        starts.append(start)
    known = all(s == s for s in starts) and len(set(starts)) > 1
    if not known:
        return KernelList(tuple(kernels), None)
    order = sorted(range(len(kernels)), key=lambda i: (starts[i], i))
    return KernelList(tuple(kernels[i] for i in order), tuple(starts[i] for i in order))


def by_stream(kernels: Sequence[Kernel]) -> dict[str, list[int]]:
    """Return each stream's kernels by their number in the list, in the stream's order; streams by name."""
    streams: dict[str, list[int]] = {}
    for i, kernel in enumerate(kernels):
        streams.setdefault(kernel.stream, []).append(i)
    return dict(sorted(streams.items()))


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield first and one past the last of each run of true flags."""
    for true, run in itertools.groupby(range(len(flags)), lambda i: flags[i]):
        if true:
            first, *rest = run
            yield first, first + len(rest) + 1

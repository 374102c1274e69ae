"""What the executor runs: for each stage its operations in order."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from telechat_moe.errors import BadInputError

Pass = tuple[str, int, int]
"""F forward, B full backward, D gradient of the input or W gradients of the weights; chunk; micro-batch."""
Operation = tuple[Pass, ...]
"""One pass, or a forward and a backward that are to overlap; here they run one after the other."""


@dataclass(frozen=True)
class Schedule:
    """A schedule of a step.

    Attributes:
        name: For messages.
        chunks: Chunks of the model.
        micro_batches: Micro-batches of the step.
        ops: Operations of each stage in order.
    """

    name: str
    chunks: int
    micro_batches: int
    ops: tuple[tuple[Operation, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages, so of processes."""
        return len(self.ops)

    @cached_property
    def stage_of(self) -> dict[tuple[int, int], int]:
        """Stage that computes a chunk for a micro-batch."""
        return {
            (chunk, micro): stage
            for stage, ops in enumerate(self.ops)
            for op in ops
            for kind, chunk, micro in op
            if kind == "F"
        }

    def check(self) -> None:
        """Refuse a program that does not compute every gradient exactly once, each where its forward was.

        Whether its order can finish at all is another question (the planner's cycle check).

        Raises:
            BadInputError: Naming what is missing, doubled or on the wrong stage, up to five of them.
        """
        found: Counter[Pass] = Counter()
        problems: list[str] = []
        for stage, ops in enumerate(self.ops):
            for op in ops:
                for kind, chunk, micro in op:
                    found.update((part, chunk, micro) for part in ("DW" if kind == "B" else kind))
                    if kind not in ("F", "B", "D", "W"):
                        problems.append(f"stage {stage}: an operation of the kind {kind!r}")
                    elif self.stage_of.get((chunk, micro), stage) != stage:
                        problems.append(
                            f"{show((kind, chunk, micro))} on stage {stage}, its F on another"
                        )
        wanted = {
            (kind, chunk, micro)
            for kind in "FDW"
            for chunk in range(self.chunks)
            for micro in range(self.micro_batches)
        }
        problems += [f"{show(part)} is missing" for part in sorted(wanted - set(found))]
        problems += [
            f"{show(part)} is not part of the step" for part in sorted(set(found) - wanted)
        ]
        problems += [f"{show(part)} appears {n} times" for part, n in found.items() if n > 1]
        if problems:
            raise BadInputError(
                f"schedule {self.name}: "
                + "; ".join(problems[:5])
                + f" ({len(problems)} problems)"
                + "; expected F, D and W (or B for both) of every chunk and micro-batch once"
            )


def show(part: Pass) -> str:
    """Write a pass for people."""
    return f"{part[0]}(chunk {part[1]}, micro-batch {part[2]})"


def show_operation(op: Operation) -> str:
    """Write an operation for people."""
    return " & ".join(show(part) for part in op)

"""What a legal flip changes downstream, and how a comparison continues after it.

In the forward pass, rows of tokens that were routed alike in both runs are compared and the others left out. Where
tokens mix (attention, experts' batches) even those rows may differ: then the call is replayed in isolation, on the
target's own inputs. Gradients, and everything after a collective, have no rows to leave out: they are compared as a
whole, or replayed.
"""

import math

import numpy as np

from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.dump.layer_numbers import LAYER
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump
from telechat_moe.tools.align.judge.collectives import kind_of
from telechat_moe.tools.align.judge.decisions import Array, Decision, Flip, decide
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.verdict import Verdict

LARGEST = 1 << 22
"""The most elements of a call that is replayed: in float64, with their bounds, they must fit into memory."""


class Pinned:
    """The flips of a rank in a step, and what they change.

    Args:
        target: The run to judge, with calls named as the reference's.
        profile: Standard that says how far tensors may differ.
        mixed: Whether flips of an earlier step changed the weights.

    Attributes:
        said: Flips as sentences, by legality.
        foreign: Number of the call from which on other ranks have flips; None: they have none.
        active: Whether differences may follow from legal flips.
    """

    def __init__(
        self, golden: RankDump, target: RankDump, profile: Profile, mixed: bool = False
    ) -> None:
        self.golden, self.target, self.profile = golden, target, profile
        self.said: dict[str, list[str]] = {"legal": [], "illegal": [], "not judged": []}
        self.foreign: int | None = None
        self._mixed = mixed
        self._tokens: set[int] = set()
        self._count = 0

    @property
    def active(self) -> bool:
        """Whether differences may follow from legal flips."""
        return self._mixed or bool(self._tokens)

    def enter(self, number: int, call: Call) -> None:
        """Go on to a call of the reference."""
        if self.foreign is not None and number >= self.foreign and kind_of(call) is not None:
            self._mixed = True
        if self._tokens and call.phase is not Phase.FORWARD:
            self._mixed = True

    def keep(self, shape: tuple[int, ...]) -> Array | None:
        """Return which rows of a tensor to compare; None: all, or its rows are not tokens."""
        if not self._tokens or self._mixed:
            return None
        lead = next((d for d in (1, 2) if math.prod(shape[:d]) == self._count), None)
        if lead is None or len(shape) < lead:
            return None
        kept = np.ones(self._count, np.bool_)
        kept[sorted(self._tokens)] = False
        return kept.reshape(shape[:lead])

    def decide(self, key: str, chosen: tuple[Array, Array]) -> tuple[str, str] | None:
        """Return status and reason for differing indices; None: they are not a choice."""
        found = decide(self.golden, self.target, key, chosen, self.profile, self.active)
        if found is None:
            return None
        call = self.golden.calls[key]
        names = {True: "legal", False: "illegal", None: "not judged"}
        for flip in found.flips:
            self.said[names[flip.legal]].append(
                self._sentence(found, flip, call, names[flip.legal])
            )
        if found.legal is False:
            wrong = [f for f in found.flips if f.legal is False]
            first = max(wrong, key=lambda f: f.margin)
            said = self._sentence(found, first, call, "illegal")
            return "diverged", f"{len(wrong)} illegal flips; {said}: {first.why}"
        self._tokens |= found.tokens
        self._count = found.count
        if found.legal is None:
            return "not judged", f"flips that cannot be judged: {found.flips[0].why}"
        return "pass", f"{len(found.flips)} of {found.rows} choices flipped, all legal"

    def _sentence(self, found: Decision, flip: Flip, call: Call, word: str) -> str:
        match = LAYER.search(call.parent or call.key)
        layer = f" of layer {match['number']}" if match else f" of {call.key}"
        who = "token" if found.count == found.rows else "choice"
        gone, came = (",".join(map(str, x)) for x in (flip.gone, flip.came))
        return (
            f"{word} flip: {who} {flip.row}{layer}: {gone}->{came}, "
            f"margin {flip.margin:.2g}, bound {flip.bound:.2g}"
        )

    def replay(self, key: str) -> dict[str, Verdict]:
        """Return the verdicts of replaying a call of the target, by position; empty: it cannot be replayed."""
        call = self.target.calls[key]
        elements = sum(math.prod(r.shape) for _, r in call.tensors())
        if elements > LARGEST or call.kind != "api" or kind_of(call) is not None:
            return {}
        forward, settings = (run.calls.get(call.forward_key) for run in (self.target, self.golden))
        found = replay_call(call, forward, settings)
        return {v.place: v for v in found if v.status != "not judged" and v.place}

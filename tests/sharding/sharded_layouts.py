"""The layouts that are compared with one process: chosen ones, and twelve drawn by a seed."""

import math
import random
from dataclasses import asdict, dataclass
from itertools import product


@dataclass(frozen=True)
class Layout:
    """Degrees as in :class:`telechat_moe.sharding.mesh.Mesh`; what else a recipe chooses."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    sp: bool = False
    expert_tp: bool = False
    zero: bool = False
    dispatcher: str = "auto"
    micro: int = 1
    policy: str | None = None
    documents: bool = False
    tied: bool = False
    z_loss: bool = False
    recompute: str = ""  # whole: layers; else names of modules
    vpp: int = 1
    scheduler: str = "1f1b"
    offset: tuple[tuple[int, ...], ...] = ()  # by chunk and stage
    mtp: int = 1
    hop: str = ""  # between nodes: gather or once
    node: int = 0
    crowd: bool = False  # every token goes to the same experts
    per_token: bool = False
    length: int = 16
    balance: str = "seq_aux_loss"  # or ep: aux_loss over expert groups
    parts: int = 1  # of a sequence, one after the other through the pipeline
    swap: int = (
        0  # how early swapped activations of all layers come back, in operators; 0: they stay
    )

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch, over all devices."""
        return self.dp if self.cp > 1 else max(4, self.dp)

    @property
    def balance_groups(self) -> int | None:
        """Runs of rows of a micro-batch that have a balance loss of their own; None: sequences."""
        devices = self.dp * self.cp * self.tp
        members = self.ep * (self.cp * self.tp if self.expert_tp else 1)
        groups = {"seq_aux_loss": None, "sub_seq_aux_loss": devices, "ep": devices // members}
        return groups.get(self.balance, 1)

    @property
    def single(self) -> "Layout":
        """The same batch and model on one device."""
        plain = {"policy", "documents", "tied", "z_loss", "mtp", "crowd", "per_token", "length"}
        plain |= {"balance"}
        same = {k: v for k, v in asdict(self).items() if k in plain}
        return Layout(micro=self.micro_batches, **same)

    @property
    def micro_batches(self) -> int:
        return max(2, self.micro) if self.pp > 1 else self.micro


LAYOUTS = {
    # two processes
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sp=True, z_loss=True),
    "tp2-sp-tied": Layout(tp=2, sp=True, tied=True),
    "tp2-sp-recompute": Layout(tp=2, sp=True, recompute="whole"),
    "dp2-ep2-recompute": Layout(dp=2, ep=2, recompute="mla_up,norms,swiglu,permute"),
    "dp2-ep2": Layout(dp=2, ep=2),
    "dp2-ep2-routed": Layout(dp=2, ep=2, dispatcher="alltoallv"),
    "dp2-accumulate": Layout(dp=2, ep=2, micro=2),
    "dp2-zero": Layout(dp=2, zero=True),
    "dp2-tokens": Layout(dp=2, ep=2, micro=2, mtp=2, per_token=True),
    "cp2-tokens": Layout(cp=2, micro=2, per_token=True),
    "pp2-tokens": Layout(pp=2, micro=4, per_token=True),
    "pp2-vpp2-v-tokens": Layout(
        pp=2, vpp=2, micro=4, scheduler="zero_bubble_v", mtp=0, per_token=True
    ),
    "dp2-many": Layout(dp=2, ep=2, micro=2, length=256),
    "tp2-sp-ep2-recompute": Layout(tp=2, sp=True, ep=2, recompute="whole", z_loss=True),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2),
    "pp2-vpp2": Layout(pp=2, vpp=2, micro=4),
    "pp2-vpp2-gpipe": Layout(pp=2, vpp=2, micro=4, scheduler="gpipe", mtp=0),
    "pp2-vpp2-smart": Layout(pp=2, vpp=2, micro=4, scheduler="seqsmartvpp"),
    "pp2-vpp2-v": Layout(pp=2, vpp=2, micro=4, scheduler="zero_bubble_v", z_loss=True),
    "pp2-vpp2-empty-chunk": Layout(pp=2, vpp=2, micro=4, offset=((0, 1), (0, -1))),
    "pp2-vpp2-recompute": Layout(pp=2, vpp=2, micro=2, recompute="whole"),
    "tp2-sp-ep2": Layout(tp=2, sp=True, ep=2),
    "tp2-sp-width": Layout(tp=2, sp=True, expert_tp=True),
    # four
    "tp4-sp-ep2-tied": Layout(tp=4, sp=True, ep=2, tied=True),
    "dp2-tp2-sp-documents": Layout(dp=2, tp=2, sp=True, documents=True),
    "dp2-tp2-sp-ep4": Layout(dp=2, tp=2, sp=True, ep=4),
    "dp2-tp2-ep4": Layout(dp=2, tp=2, ep=4),
    "dp2-tp2-sp-ep2": Layout(dp=2, tp=2, sp=True, ep=2),
    "dp2-tp2-sp-ep2-width": Layout(dp=2, tp=2, sp=True, ep=2, expert_tp=True),
    "dp2-tp2-ep2-width": Layout(dp=2, tp=2, ep=2, expert_tp=True),
    "dp2-tp2-sp-ep4-gather": Layout(dp=2, tp=2, sp=True, ep=4, dispatcher="allgather"),
    "dp2-tp2-sp-ep2-width-gather": Layout(
        dp=2, tp=2, sp=True, ep=2, expert_tp=True, dispatcher="allgather"
    ),
    "dp2-tp2-sp-ep4-capacity": Layout(dp=2, tp=2, sp=True, ep=4, policy="probs"),
    "dp2-tp2-ep4-capacity-gather": Layout(
        dp=2, tp=2, ep=4, dispatcher="allgather", policy="position"
    ),
    "dp2-tp2-sp-zero": Layout(dp=2, tp=2, sp=True, zero=True),
    "dp4-ep2-zero": Layout(dp=4, ep=2, zero=True),
    "pp2-tp2-sp": Layout(pp=2, tp=2, sp=True),
    "pp2-dp2-ep2": Layout(pp=2, dp=2, ep=2),
    "pp2-dp2-zero": Layout(pp=2, dp=2, zero=True),
    "pp2-dp2-zero-vpp2": Layout(pp=2, dp=2, vpp=2, micro=4, zero=True, ep=2),
    "pp2-tp2-sp-ep2-v": Layout(
        pp=2, tp=2, sp=True, ep=2, vpp=2, micro=4, scheduler="zero_bubble_v"
    ),
    "dp2-tp2-sp-ep4-zero-accumulate": Layout(dp=2, tp=2, sp=True, ep=4, zero=True, micro=3),
    "dp2-tp2-sp-ep4-routed": Layout(dp=2, tp=2, sp=True, ep=4, dispatcher="alltoallv"),
    "dp2-tp2-ep2-width-routed": Layout(dp=2, tp=2, ep=2, expert_tp=True, dispatcher="alltoallv"),
    "pp2-dp2-ep2-routed-vpp2": Layout(pp=2, dp=2, ep=2, vpp=2, micro=4, dispatcher="alltoallv"),
    "pp4-vpp2": Layout(pp=4, vpp=2, micro=4, mtp=0),
    "cp2-tp2-sp-ep4": Layout(cp=2, tp=2, sp=True, ep=4),
    "dp2-cp2-ep2": Layout(dp=2, cp=2, ep=2),
    "cp4-tokens": Layout(cp=4, micro=2, per_token=True),
    "dp2-pp2-zero-tokens": Layout(dp=2, pp=2, micro=4, zero=True, per_token=True),
    "cp2-tp2-sp-recompute": Layout(cp=2, tp=2, sp=True, ep=4, recompute="whole", z_loss=True),
    # eight
    "dp2-tp2-pp2-sp-ep4": Layout(dp=2, tp=2, pp=2, sp=True, ep=4),
    "dp2-cp2-tp2-sp-ep8": Layout(dp=2, cp=2, tp=2, sp=True, ep=8),
    "dp4-tp2-sp-ep2-width-zero": Layout(dp=4, tp=2, sp=True, ep=2, expert_tp=True, zero=True),
}


def drawn(seed: int, count: int) -> dict[str, Layout]:
    """Return layouts of two to eight devices that nobody chose."""
    chance, found = random.Random(seed), {}
    degrees = [x for x in product((1, 2, 4), repeat=4) if 1 < math.prod(x) <= 8 and x[2] < 4]
    while len(found) < count:
        dp, tp, cp, pp = chance.choice(degrees)
        width = chance.random() < 0.25
        spread = dp if width else dp * tp * cp
        policy = chance.choice([None, None, "probs", "position"]) if cp == 1 and pp == 1 else None
        chunks = chance.choice([1, 2]) if pp > 1 else 1
        layout = Layout(
            dp, tp, cp, pp,
            ep=chance.choice([n for n in (1, 2, 4, 8) if spread % n == 0]),
            sp=tp > 1 and chance.random() < 0.7,
            expert_tp=width and tp > 1,
            zero=dp > 1 and chance.random() < 0.5,
            dispatcher=chance.choice(["alltoall", "allgather"] + ["alltoallv"] * (policy is None)),
            micro=chance.choice([pp, 2 * pp][chunks - 1 :] if pp > 1 else [1, 1, 2, 3]),
            policy=policy,
            tied=pp == 1 and chance.random() < 0.3,
            z_loss=chance.random() < 0.3,
            recompute=chance.choice(["", "", "whole", "mla_up,norms,swiglu,permute"]),
            vpp=chunks,
            scheduler=chance.choice(["1f1b", "gpipe", "zero_bubble_v"] if chunks > 1 else ["1f1b"]),
            mtp=chance.choice([0, 1]),
        )  # fmt: skip
        if layout not in found.values():
            found[f"drawn-{len(found)}"] = layout
    return found


LAYOUTS |= drawn(18, 12)
# Sequences in parts.
PARTS = {"micro": 4, "scheduler": "seqpipe", "parts": 2, "per_token": True, "balance": "none"}
LAYOUTS |= {
    "pp2-parts2": Layout(pp=2, **PARTS, z_loss=True, mtp=0),
    "pp2-parts4-mtp2": Layout(pp=2, **PARTS | {"parts": 4}, mtp=2),
    "pp2-vpp2-parts2": Layout(pp=2, vpp=2, **PARTS | {"scheduler": "seqvpp"}),
    "pp2-tp2-sp-ep2-parts2": Layout(pp=2, tp=2, sp=True, ep=2, **PARTS, recompute="mla_up,norms"),
    "pp2-cp2-parts2": Layout(pp=2, cp=2, **PARTS, z_loss=True),
    "pp2-dp2-ep2-routed-zero-parts2": Layout(
        pp=2, dp=2, ep=2, zero=True, dispatcher="alltoallv", **PARTS
    ),
}
# Two hops to the experts: between nodes of ``node`` devices, and within a node.
GATHER, ONCE = {"hop": "gather", "node": 2}, {"hop": "once", "node": 2}
EXACT = {**GATHER, "dispatcher": "alltoallv"}
SP = {"tp": 2, "sp": True}
DEVICE, EXPERTS, ALL, STEP = (
    {"balance": kind} for kind in ("sub_seq_aux_loss", "ep", "aux_loss", "gbs_aux_loss")
)
LAYOUTS |= {
    # two processes
    "dp2-balance-by-device": Layout(dp=2, **DEVICE),
    "tp2-sp-balance-by-device": Layout(tp=2, sp=True, **DEVICE),
    "dp2-balance-by-all": Layout(dp=2, ep=2, **ALL, z_loss=True),
    "dp2-balance-by-step": Layout(dp=2, ep=2, **STEP, micro=3),
    "dp2-balance-by-step-recompute": Layout(dp=2, **STEP, micro=3, recompute="whole"),
    "tp2-balance-by-step-recompute-moe": Layout(tp=2, **STEP, micro=2, recompute="moe", mtp=0),
    "pp2-balance-by-step-recompute": Layout(pp=2, **STEP, micro=4, recompute="whole"),
    "pp2-vpp2-balance-by-step": Layout(pp=2, vpp=2, **STEP, micro=4),
    # four
    "dp4-ep2-balance-by-experts": Layout(dp=4, ep=2, **EXPERTS),
    "dp2-tp2-sp-ep2-balance-by-experts": Layout(dp=2, **SP, ep=2, **EXPERTS, z_loss=True),
    "dp4-ep2-balance-by-experts-recompute": Layout(
        dp=4, ep=2, **EXPERTS, recompute="whole", micro=2, zero=True
    ),
    "dp4-tp2-sp-ep2-width-balance-by-experts": Layout(dp=4, **SP, ep=2, expert_tp=True, **EXPERTS),
    "cp2-tp2-sp-balance-by-experts": Layout(cp=2, **SP, ep=2, **EXPERTS),
    "cp2-tp2-sp-balance-by-all-recompute": Layout(cp=2, **SP, ep=4, **ALL, recompute="whole"),
    "cp2-tp2-sp-balance-by-device": Layout(cp=2, **SP, **DEVICE),
    "pp2-dp2-balance-by-step": Layout(pp=2, dp=2, **STEP, micro=2),
    "dp2-tp2-sp-balance-by-step-recompute": Layout(
        dp=2, **SP, ep=4, **STEP, micro=2, recompute="whole"
    ),
}
LAYOUTS |= {
    "dp2-ep2-once-nodes-of-one": Layout(dp=2, ep=2, hop="once", node=1),
    # four processes
    "dp4-ep4-gather": Layout(dp=4, ep=4, **GATHER),
    "dp4-ep4-gather-exact": Layout(dp=4, ep=4, **EXACT),
    "dp4-ep4-gather-capacity": Layout(dp=4, ep=4, **GATHER, policy="probs"),
    "dp4-ep4-gather-exact-crowd": Layout(dp=4, ep=4, **EXACT, crowd=True),
    "dp4-ep4-once": Layout(dp=4, ep=4, **ONCE, zero=True, micro=2),
    "dp4-ep4-once-capacity": Layout(dp=4, ep=4, **ONCE, policy="position"),
    "dp4-ep4-once-crowd": Layout(dp=4, ep=4, **ONCE, crowd=True),
    "dp4-ep4-once-crowd-capacity": Layout(dp=4, ep=4, **ONCE, crowd=True, policy="probs"),
    "tp4-sp-ep4-gather-exact": Layout(tp=4, sp=True, ep=4, **EXACT),
    "dp2-tp2-ep4-gather": Layout(dp=2, tp=2, ep=4, **GATHER),
    "dp2-tp2-sp-ep4-gather-capacity": Layout(dp=2, **SP, ep=4, **GATHER, policy="position"),
    "dp2-tp2-sp-ep4-once": Layout(dp=2, **SP, ep=4, **ONCE),
    "dp2-tp2-ep4-once-recompute": Layout(dp=2, tp=2, ep=4, **ONCE, recompute="permute,swiglu"),
    "cp2-tp2-sp-ep4-once": Layout(cp=2, **SP, ep=4, **ONCE),
    "dp2-cp2-ep4-gather": Layout(dp=2, cp=2, ep=4, **GATHER),
    # eight
    "dp8-ep8-gather": Layout(dp=8, ep=8, **GATHER),
    "dp8-ep8-gather-nodes-of-four": Layout(dp=8, ep=8, hop="gather", node=4, policy="probs"),
    "dp8-ep8-once": Layout(dp=8, ep=8, **ONCE, policy="probs"),
    "dp8-ep8-once-nodes-of-four": Layout(dp=8, ep=8, hop="once", node=4),
    "dp8-ep4-once": Layout(dp=8, ep=4, **ONCE),
    "dp4-tp2-sp-ep8-exact": Layout(
        dp=4, **SP, ep=8, hop="gather", node=4, dispatcher="alltoallv", recompute="whole"
    ),
    "dp2-cp2-tp2-sp-ep8-once": Layout(dp=2, cp=2, **SP, ep=8, hop="once", node=4),
    "dp4-tp2-sp-ep4-width-once": Layout(
        dp=4, **SP, ep=4, expert_tp=True, hop="once", node=4, policy="probs"
    ),
    "dp4-tp2-ep4-width-gather": Layout(dp=4, tp=2, ep=4, expert_tp=True, hop="gather", node=4),
    "pp2-dp4-ep4-once": Layout(pp=2, dp=4, ep=4, **ONCE),
    "pp2-dp2-tp2-sp-ep4-gather-vpp2": Layout(pp=2, dp=2, **SP, ep=4, **GATHER, vpp=2, micro=4),
}

"""Compile small layouts, run them on processes, and run the same steps in one process.

    python sharded_run.py compile FOLDER CASE...      graphs of all ranks, and what each case starts from
    python sharded_run.py reference FOLDER CASE...    one process, the model as it is
    msrun ... sharded_run.py work FOLDER CASE...      one process a rank

A case is ``LAYOUT:OPTIMIZER`` or ``LAYOUT:OPTIMIZER:FAULT``; ``OPTIMIZER-deep`` has four layers. A program of its own, because compiling for a simulated
device leaves marks on a process.
"""

import math
import os
import pickle
import random
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from telechat_moe.recipe import load

STEPS, RATE = 10, 3e-3
RECORDED = 3  # steps whose states are compared
BETAS = (0.9, 0.95)
MOMENTS = {"momentum": ("momentum",), "adamw": ("adam_m", "adam_v")}


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

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch, over all devices."""
        return self.dp if self.cp > 1 else max(4, self.dp)

    @property
    def single(self) -> "Layout":
        """The same batch and model on one device."""
        plain = {"policy", "documents", "tied", "z_loss", "mtp", "crowd", "per_token", "length"}
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
# Two hops to the experts: between nodes of ``node`` devices, and within a node.
GATHER, ONCE = {"hop": "gather", "node": 2}, {"hop": "once", "node": 2}
EXACT = {**GATHER, "dispatcher": "alltoallv"}
SP = {"tp": 2, "sp": True}
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


@dataclass(frozen=True)
class Case:
    """A layout, what updates its weights, and what is done wrong on purpose."""

    name: str
    layout: Layout
    optimizer: str
    layers: int
    fault: str

    @staticmethod
    def of(name: str) -> "Case":
        chosen, optimizer, *fault = name.split(":")
        optimizer, _, deep = optimizer.partition("-")
        layout = LAYOUTS[chosen]
        layers = max(4 if deep or layout.pp > 1 else 2, layout.pp * layout.vpp)
        return Case(name, layout, optimizer, layers, fault[0] if fault else "")

    @property
    def folder(self) -> str:
        return self.name.replace(":", "_")

    @property
    def reference(self) -> str:
        """Name of the run in one process that it is compared with."""
        single = self.layout.single
        parts = [self.optimizer, self.layout.sequences, self.layers, single.micro]
        parts += [single.policy, single.documents, single.tied, single.z_loss, single.mtp]
        parts += [single.per_token, single.length]
        parts += ["crowd"] * single.crowd
        return "reference_" + "_".join(map(str, parts))


def recipe(layout: Layout, layers: int, sequences: int | None = None):
    """Return the recipe of a layout, with a layer for each chunk at least, and MTP layers more."""
    layers = max(layers, layout.pp * layout.vpp)
    rows = (sequences or layout.sequences) // layout.dp
    accumulate = 1 if layout.pp > 1 else layout.micro
    model = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": layout.mtp,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "seq_length": layout.length,
        "max_position_embeddings": layout.length,
        "initializer_range": 0.1,
        "batch_size": rows,
        "use_flash_attention": layout.cp > 1,
        "tie_word_embeddings": layout.tied,
        "moe_z_loss_coeff": 0.01 if layout.z_loss else 0.0,
    }
    if layout.policy is not None:
        model |= {"moe_token_drop_policy": layout.policy, "moe_expert_capacity_factor": 1.0}
    settings = {f"model.model_config.{name}": value for name, value in model.items()}
    settings |= {
        "train_dataset.data_loader.config.seq_length": layout.length,
        "runner_config.batch_size": rows,
        "runner_config.gradient_accumulation_steps": accumulate,
        "use_parallel": layout.devices > 1,
        "parallel_config.data_parallel": layout.dp,
        "parallel_config.model_parallel": layout.tp,
        "parallel_config.pipeline_stage": layout.pp,
        "parallel_config.expert_parallel": layout.ep,
        "parallel_config.context_parallel": layout.cp,
        "parallel_config.use_seq_parallel": layout.sp,
        "parallel_config.micro_batch_num": layout.micro_batches if layout.pp > 1 else 1,
        "callbacks.1.micro_batch_num": layout.micro_batches if layout.pp > 1 else 1,
        "callbacks.1.gradient_accumulation_steps": accumulate,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel.enable_parallel_optimizer": layout.zero,
        "telechat_moe.sharding.expert_tensor_parallel": layout.expert_tp,
        "telechat_moe.sharding.dispatcher": layout.dispatcher,
    }
    if layout.hop:
        kinds = {"gather": "alltoall_deredundency", "once": "alltoall_zero_redundancy"}
        settings["model.model_config.moe_token_dispatcher_type"] = kinds[layout.hop]
        settings["model.model_config.npu_nums_per_device"] = layout.node
    if layout.recompute == "whole":
        settings["recompute_config.recompute"] = True
    elif layout.recompute:
        settings["telechat_moe.sharding.recompute"] = f"[{layout.recompute}]"
    if layout.tied:
        settings["model.model_config.untie_embeddings_and_output_weights"] = False
    if layout.policy is not None:
        settings["telechat_moe.moe_capacity_tokens"] = 8
    if layout.per_token:
        settings["model.model_config.calculate_per_token_loss"] = True
    if layout.documents:
        columns = "[input_ids, labels, loss_mask, position_ids, attention_mask]"
        settings["train_dataset.input_columns"] = columns
        settings["train_dataset.construct_args_key"] = columns
        for key in ("reset_position_ids", "create_attention_mask", "reset_attention_mask"):
            settings[f"train_dataset.data_loader.config.{key}"] = True
    if layout.vpp > 1:
        settings["model.model_config.pp_interleave_num"] = layout.vpp
        settings["parallel.pipeline_config.pipeline_interleave"] = True
        settings["parallel.pipeline_config.pipeline_scheduler"] = layout.scheduler
    if layout.offset:
        settings["model.model_config.offset"] = [list(row) for row in layout.offset]
    if layout.zero:
        settings["parallel.parallel_optimizer_config.parallel_optimizer_threshold"] = 0
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in settings.items()])


def batches(case: Case, folder: Path) -> list[tuple[np.ndarray, ...]]:
    """Return the batch of each step, as the loader gives them: documents of counting tokens."""
    from telechat_moe.data import Loader, open_recipe, write_indexed

    layout = case.layout
    prefix = folder / "data" / "train"
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(5)
        documents = []
        for _ in range(80):
            start, stride = random.integers(1, 64), random.integers(1, 4)
            tokens = (start + stride * np.arange(random.integers(5, 30))) % 63 + 1
            documents.append(np.append(tokens, 0).astype(np.uint16))
        write_indexed(prefix, documents, np.dtype(np.uint16))
    rows = layout.sequences * layout.micro_batches
    name = "train_dataset.data_loader."
    overrides = {
        f"{name}config.data_path": f"['1', '{prefix}']",
        f"{name}sizes": f"[{rows * STEPS}, 0, 0]",
        f"{name}config.eod_mask_loss": True,
        f"{name}config.seq_length": layout.length,
        "model.model_config.seq_length": layout.length,
        f"{name}config.reset_position_ids": layout.documents,
        "lr_schedule.warmup_steps": 1,
    }
    if layout.documents:
        columns = "[input_ids, labels, loss_mask, position_ids, attention_mask]"
        overrides |= {"train_dataset.input_columns": columns}
        overrides |= {"train_dataset.construct_args_key": columns}
        overrides |= {f"{name}config.create_attention_mask": True}
        overrides |= {f"{name}config.reset_attention_mask": True}
    r = load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in overrides.items()])
    found = []
    with Loader(open_recipe(r), rows) as loader:
        for _ in range(STEPS):
            columns = next(loader)
            found.append(tuple(tensor_of(columns, name) for name in r.train_dataset.input_columns))
    return found


def tensor_of(columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    types = {"loss_mask": np.float32, "attention_mask": np.uint8}
    return np.ascontiguousarray(columns[name].astype(types.get(name, np.int32)))


def make_optimizer(kind: str):
    """Return what makes the optimizer of a step."""
    from sharded_momentum import Momentum

    from telechat_moe.train.optimizer import AdamW

    if kind == "momentum":
        return lambda params: Momentum(params)
    return lambda params: AdamW(params, BETAS, 1e-8, 0.1)


# ------------------------------------------------------------------ compile


def compile_cases(folder: Path, cases: list[Case]) -> None:
    """Write the graphs of each case; those that differ in a rewriting fault share theirs."""
    import sharded_faults as faults

    from telechat_moe.graph.execute import Job
    from telechat_moe.train.rank_graph import compile_recipe

    done: dict[str, list] = {}
    for case in cases:
        compiled = case.name if case.fault in faults.LAYOUT else case.name.rsplit(":", 1)[0]
        compiled = case.name if not case.fault else compiled
        if compiled not in done:
            with faults.in_layout(case.fault):
                means = case.fault == "mean-of-means"
                layout = replace(case.layout, per_token=case.layout.per_token and not means)
                done[compiled] = compile_recipe(
                    recipe(layout, case.layers),
                    target="CPU",
                    optimizer=make_optimizer(case.optimizer),
                )
        with faults.in_rewriting(case.fault):
            Job.write(folder / case.folder, done[compiled])


# ------------------------------------------------------------------ one process


def crowd(model) -> None:
    """Have the biases of selection send every token to the last expert, and its other choices to the one before."""
    from mindspore import Tensor

    for p in model.get_parameters():
        if p.name.endswith("expert_bias"):
            p.set_data(Tensor(100.0 * np.arange(p.shape[0], dtype=np.float32)))


def reference(folder: Path, cases: list[Case]) -> None:
    """Run the model in one process for each kind of batch and model among the cases."""
    import mindspore as ms
    from mindspore import Tensor

    from telechat_moe.model import CausalLM, initialize
    from telechat_moe.ops import select
    from telechat_moe.train.step import TrainStep

    ms.set_context(mode=ms.GRAPH_MODE)
    for case in {c.reference: c for c in cases}.values():
        layout, out = case.layout, folder / f"{case.reference}.pickle"
        if out.exists():
            continue
        r = recipe(layout.single, case.layers, layout.sequences)
        config, own = r.model_config, r.telechat_moe
        with select.using("plain"):
            model = CausalLM(config, own.moe_block_rows, own.moe_capacity_tokens)
            initialize(model, 1)
            if layout.crowd:
                crowd(model)
            model.set_train()
            optimizer = make_optimizer(case.optimizer)(model.trainable_params())
            micro = layout.micro_batches
            rate = config.moe_router_bias_update_rate
            step = TrainStep(model, optimizer, 1.0, micro, rate, config)
            step.set_train()
        start = {p.name: p.asnumpy().copy() for p in model.get_parameters()}
        rows, found = batches(case, folder), {"start": start, "steps": [], "states": []}
        size, prefixes = layout.sequences, MOMENTS[case.optimizer]
        for s, batch in enumerate(rows):
            parts = [
                tuple(Tensor(x[i * size : (i + 1) * size]) for x in batch) for i in range(micro)
            ]
            step.count_tokens(parts)
            for part in parts[:-1]:
                step.accumulate(*part)
            losses, norm, _, applied, loads, dropped = step(
                *optimizer.scalars(s + 1, RATE), *parts[-1]
            )
            answer = (losses.asnumpy().copy(), float(norm.asnumpy()), loads.asnumpy().copy())
            found["steps"].append((*answer, bool(applied.asnumpy())))
            found["dropped"] = found.get("dropped", 0.0) + float(dropped.asnumpy()[0])
            if s < RECORDED:
                states = (*model.trainable_params(), *optimizer.get_parameters())
                found["states"].append({p.name: p.asnumpy().copy() for p in states})
        found["last"] = {p.name: p.asnumpy().copy() for p in model.get_parameters()}
        for p in model.trainable_params():
            for prefix in (*prefixes, "accu_grads"):
                found["start"][f"{prefix}.{p.name}"] = np.zeros(p.shape, np.float32)
        found["batches"] = rows
        out.write_bytes(pickle.dumps(found))


# ------------------------------------------------------------------ one process a rank


def work(folder: Path, cases: list[Case]) -> None:
    """Run this process's rank of each case."""
    import mindspore as ms
    import sharded_faults as faults
    from mindspore import Tensor
    from mindspore.communication import get_rank, init

    from telechat_moe.graph.execute import Job, RankProgram
    from telechat_moe.train import token_weights
    from telechat_moe.train.token_weights import LOSS_MASK

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    rank, made = get_rank(), set()
    for case in cases:
        config = recipe(case.layout, case.layers).model_config
        given = pickle.loads((folder / f"{case.reference}.pickle").read_bytes())
        program = RankProgram(Job.read(folder / case.folder), rank, made)
        program.set_parameters(given["start"])
        scalars = make_scalars(case.optimizer)
        found = {"steps": [], "states": []}
        for s, batch in enumerate(given["batches"][: 3 if case.fault else STEPS]):
            with faults.in_counting(case.fault):
                masks, micro = [batch[LOSS_MASK]], case.layout.micro_batches
                program.set_token_weights(token_weights.token_weights(config, masks, micro))
            losses, norm, applied, loads, dropped = program(*scalars(s + 1), *map(Tensor, batch))
            answer = (losses.asnumpy().copy(), float(norm.asnumpy()), loads.asnumpy().copy())
            found["steps"].append((*answer, bool(applied.asnumpy())))
            found["dropped"] = found.get("dropped", 0.0) + float(dropped.asnumpy()[0])
            if s < RECORDED:
                found["states"].append(program.shards())
        found["last"] = program.shards()
        (folder / case.folder / f"out_{rank}.pickle").write_bytes(pickle.dumps(found))


def make_scalars(kind: str):
    """Return what gives the scalars of a step; the weights do not matter for it."""
    from mindspore import Parameter, Tensor

    weight = Parameter(Tensor(np.zeros(1, np.float32)), name="any")
    optimizer = make_optimizer(kind)([weight])
    return lambda step: optimizer.scalars(step, RATE)


if __name__ == "__main__":
    verb, place, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    os.environ.setdefault("GLOG_v", "3")
    verbs = {"compile": compile_cases, "reference": reference, "work": work}
    verbs[verb](place, [Case.of(name) for name in names])

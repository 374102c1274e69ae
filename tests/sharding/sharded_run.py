"""Compile small layouts, run them on processes, and run the same steps in one process.

    python sharded_run.py compile FOLDER CASE...      graphs of all ranks, and what each case starts from
    python sharded_run.py reference FOLDER CASE...    one process, the model as it is
    msrun ... sharded_run.py work FOLDER CASE...      one process a rank

A case is ``LAYOUT:OPTIMIZER`` or ``LAYOUT:OPTIMIZER:FAULT``. Compiling takes most of the time, so graphs have both optimizers. A program of its
own, because compiling for a simulated device leaves marks on a process.
"""

import os
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sharded_layouts import LAYOUTS, Layout

from telechat_moe.recipe import load

STEPS, RATE = 10, 3e-3
RECORDED = 3  # steps whose states are compared
BETAS = (0.9, 0.95)
MOMENTS = {"momentum": ("momentum",), "adamw": ("adam_m", "adam_v")}


@dataclass(frozen=True)
class Case:
    """A layout, which optimizer updates its weights, and what is done wrong on purpose."""

    name: str
    layout: Layout
    optimizer: str
    layers: int
    fault: str

    @staticmethod
    def of(name: str) -> "Case":
        chosen, optimizer, *fault = name.split(":")
        layout = LAYOUTS[chosen]
        # The first is dense, an MTP layer sparse: two sparse ones at least.
        layers = 4 if layout.pp > 1 else 3 - min(layout.mtp, 1)
        layers = max(layers, layout.pp * layout.vpp)
        return Case(name, layout, optimizer, layers, fault[0] if fault else "")

    @property
    def folder(self) -> str:
        return self.name.replace(":", "_")

    @property
    def job(self) -> str:
        """Folder of the graphs, which the optimizers share."""
        return "_".join([self.name.split(":")[0], *[self.fault] * bool(self.fault)])

    @property
    def reference(self) -> str:
        """Name of the run in one process that it is compared with."""
        single = self.layout.single
        parts = [self.optimizer, self.layout.sequences, self.layers, single.micro]
        parts += [single.policy, single.documents, single.tied, single.z_loss, single.mtp]
        parts += [single.per_token, single.length]
        parts += ["crowd"] * single.crowd
        parts += [single.balance, self.layout.balance_groups]
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
    if layout.swap:
        settings["swap_config.swap"] = True
        settings["swap_config.layer_swap"] = f"[{{layers: True, backward_prefetch: {layout.swap}}}]"
    settings |= within_documents(layout) | balanced(layout)
    settings["parallel_config.seq_split_num"] = layout.parts
    if layout.vpp > 1 or layout.parts > 1:
        settings["model.model_config.pp_interleave_num"] = layout.vpp
        settings["parallel.pipeline_config.pipeline_interleave"] = True
        settings["parallel.pipeline_config.pipeline_scheduler"] = layout.scheduler
    if layout.offset:
        settings["model.model_config.offset"] = [list(row) for row in layout.offset]
    if layout.zero:
        settings["parallel.parallel_optimizer_config.parallel_optimizer_threshold"] = 0
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in settings.items()])


def balanced(layout: Layout) -> dict[str, object]:
    """Return the settings of the balance loss; one that is no sequence's weighs enough to be seen in every gradient."""
    if layout.balance == "seq_aux_loss":
        return {}
    kind = layout.balance.replace("ep", "aux_loss")
    settings: dict[str, object] = {"model.model_config.moe_router_load_balancing_type": kind}
    if kind != "none":
        settings["model.model_config.moe_aux_loss_coeff"] = 0.1
    if layout.balance == "ep" and layout.devices > 1:
        settings["telechat_moe.moe.balance_group"] = "ep"
    return settings


def within_documents(layout: Layout) -> dict[str, object]:
    """Return the settings by which attention stays within documents, if it does."""
    columns = "[input_ids, labels, loss_mask, position_ids, attention_mask]"
    settings = {f"train_dataset.{k}": columns for k in ("input_columns", "construct_args_key")}
    keys = ("reset_position_ids", "create_attention_mask", "reset_attention_mask")
    settings |= {f"train_dataset.data_loader.config.{key}": True for key in keys}
    return settings if layout.documents else {}


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
        "lr_schedule.warmup_steps": 1,
    }
    overrides |= within_documents(layout)
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
    from sharded_momentum import Either, Momentum

    from telechat_moe.train.optimizer import AdamW

    def adamw(params):
        return AdamW(params, BETAS, 1e-8, 0.1)

    def either(params):
        return Either(adamw(params), Momentum(params))

    return {"momentum": Momentum, "adamw": adamw, "either": either}[kind]


# ------------------------------------------------------------------ compile


def compile_cases(folder: Path, cases: list[Case]) -> None:
    """Write the graphs of each case; those that differ in a fault of the rewriting are compiled once."""
    import sharded_faults as faults

    from telechat_moe.graph.execute import Job
    from telechat_moe.train.rank_graph import compile_recipe

    done: dict[str, list] = {}
    for case in {case.job: case for case in cases}.values():
        compiled = case.job if case.fault in faults.LAYOUT else case.name.split(":")[0]
        if compiled not in done:
            with faults.in_layout(case.fault):
                means = case.fault == "mean-of-means"
                layout = replace(case.layout, per_token=case.layout.per_token and not means)
                done[compiled] = compile_recipe(
                    recipe(layout, case.layers),
                    target="CPU",
                    optimizer=make_optimizer("either"),
                )
        with faults.in_rewriting(case.fault):
            Job.write(folder / case.job, done[compiled])


# ------------------------------------------------------------------ one process


def crowd(model) -> None:
    """Have the biases of selection send every token to the last expert, and its other choices to the one before."""
    from mindspore import Tensor

    for p in model.get_parameters():
        if p.name.endswith("expert_bias"):
            p.set_data(Tensor(100.0 * np.arange(p.shape[0], dtype=np.float32)))


def one_process(case: Case):
    """Return a model on one process, its step and its parameters as they start."""
    from telechat_moe.model import CausalLM, initialize
    from telechat_moe.model.balance import set_groups
    from telechat_moe.ops import select
    from telechat_moe.train.step import TrainStep

    layout = case.layout
    r = recipe(layout.single, case.layers, layout.sequences)
    config, own = r.model_config, r.telechat_moe
    with select.using("plain"):
        model = CausalLM(config, own.moe_block_rows, own.moe_capacity_tokens)
        initialize(model, 1)
        set_groups(model, layout.balance_groups)
        if layout.crowd:
            crowd(model)
        model.set_train()
        optimizer = make_optimizer("either")(model.trainable_params())
        rate = config.moe_router_bias_update_rate
        step = TrainStep(model, optimizer, 1.0, layout.micro_batches, rate, config)
        step.set_train()
    return model, step, {p.name: p.asnumpy().copy() for p in step.get_parameters()}


def reference(folder: Path, cases: list[Case]) -> None:
    """Run the model in one process for each kind of batch and model among the cases."""
    import mindspore as ms
    from mindspore import Tensor, ops

    ms.set_context(mode=ms.GRAPH_MODE)
    made = {}
    for case in {c.reference: c for c in cases}.values():
        layout, out = case.layout, folder / f"{case.reference}.pickle"
        if out.exists():
            continue
        key = case.reference.replace(case.optimizer, "")
        if key not in made:
            made = {key: one_process(case)}
        model, step, start = made[key]
        for p in step.get_parameters():  # a compiled graph keeps its memory
            ops.assign(p, Tensor(start[p.name]))
        optimizer, micro = step.optimizer, layout.micro_batches
        rows, found = batches(case, folder), {"steps": [], "states": []}
        size = layout.sequences
        for s, batch in enumerate(rows):
            parts = [
                tuple(Tensor(x[i * size : (i + 1) * size]) for x in batch) for i in range(micro)
            ]
            step.count_tokens(parts)
            for part in parts[:-1]:
                step.accumulate(*part)
            losses, norm, _, applied, loads, dropped = step(
                *optimizer.scalars(s + 1, RATE, case.optimizer), *parts[-1]
            )
            answer = (losses.asnumpy().copy(), float(norm.asnumpy()), loads.asnumpy().copy())
            found["steps"].append((*answer, bool(applied.asnumpy())))
            found["dropped"] = found.get("dropped", 0.0) + float(dropped.asnumpy()[0])
            if s < RECORDED:
                states = (*model.trainable_params(), *optimizer.get_parameters())
                found["states"].append({p.name: p.asnumpy().copy() for p in states})
        found["last"] = {p.name: p.asnumpy().copy() for p in model.get_parameters()}
        found["start"] = dict(start)
        for p in model.trainable_params():
            found["start"][f"accu_grads.{p.name}"] = np.zeros(p.shape, np.float32)
        found["batches"] = rows
        out.write_bytes(pickle.dumps(found))


# ------------------------------------------------------------------ one process a rank


def work(folder: Path, cases: list[Case]) -> None:
    """Run this process's rank of each case."""
    import mindspore as ms
    import sharded_faults as faults
    from mindspore import Tensor
    from mindspore.communication import get_rank, init

    from telechat_moe.graph.execute import Job
    from telechat_moe.train import token_weights
    from telechat_moe.train.programs.cpu import CpuProgram
    from telechat_moe.train.token_weights import LOSS_MASK

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    scalars = make_optimizer("either")([]).scalars
    rank, made = get_rank(), set()
    programs: dict[str, CpuProgram] = {}
    for case in cases:
        config = recipe(case.layout, case.layers).model_config
        given = pickle.loads((folder / f"{case.reference}.pickle").read_bytes())
        used = case.job in programs
        if not used:
            programs[case.job] = CpuProgram(Job.read(folder / case.job), rank, made)
        program = programs[case.job]
        program.set_parameters(given["start"], in_place=used)
        found = {"steps": [], "states": []}
        for s, batch in enumerate(given["batches"][: 3 if case.fault else STEPS]):
            with faults.in_counting(case.fault):
                masks, layout = [batch[LOSS_MASK]], case.layout
                counts = (layout.micro_batches, layout.parts)
                program.set_token_weights(token_weights.token_weights(config, masks, *counts))
            losses, norm, applied, loads, dropped = program(
                *scalars(s + 1, RATE, case.optimizer), *map(Tensor, batch)
            )
            answer = (losses.asnumpy().copy(), float(norm.asnumpy()), loads.asnumpy().copy())
            found["steps"].append((*answer, bool(applied.asnumpy())))
            found["dropped"] = found.get("dropped", 0.0) + float(dropped.asnumpy()[0])
            if s < RECORDED:
                found["states"].append(program.shards())
        found["last"] = program.shards()
        (folder / f"{case.folder}_{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    verb, place, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    os.environ.setdefault("GLOG_v", "3")
    verbs = {"compile": compile_cases, "reference": reference, "work": work}
    verbs[verb](place, [Case.of(name) for name in names])

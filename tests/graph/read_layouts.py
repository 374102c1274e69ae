"""Compile small layouts and read their graphs: ``python read_layouts.py OUT NAME ...`` writes a pickle.

A program of its own, because compiling for a simulated device leaves marks on a process.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

from telechat_moe.graph.read import Expected, read
from telechat_moe.graph.report import Subject, check_derived, report
from telechat_moe.processes import in_children
from telechat_moe.recipe import load
from telechat_moe.sharding.recipe import even_exchange, mesh_of

LENGTH, SEQUENCES, MICRO, NODE = 16, 4, 2, 2
SHARED = {"dp": 2, "tp": 2, "sp": True, "pp": 2, "target": "Ascend"}
LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sp": True},
    "dp2tp2": {"dp": 2, "tp": 2},
    "dp2tp2sp": {"dp": 2, "tp": 2, "sp": True},
    "ep2": {"dp": 2, "ep": 2},
    "ep4nosp": {"dp": 2, "tp": 2, "ep": 4},
    "ep4": {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    "ep2tp2": {"dp": 2, "tp": 2, "sp": True, "ep": 2},
    "ep2_expert_tp": {"dp": 2, "tp": 2, "sp": True, "ep": 2, "etp": True},
    "ep4_allgather": {"dp": 2, "tp": 2, "sp": True, "ep": 4, "dispatcher": "allgather"},
    "ep4_nodes": {"dp": 2, "tp": 2, "sp": True, "ep": 4, "hop": "alltoall_deredundency"},
    "zero": {"dp": 2, "tp": 2, "sp": True, "zero": True},
    "zero_ep2": {"dp": 4, "ep": 2, "zero": True},
    "cp2": {"cp": 2},
    "cp2tp2": {"cp": 2, "tp": 2, "sp": True, "ep": 4},
    "pp2": {"pp": 2},
    "pp2tp2": {"pp": 2, "tp": 2, "sp": True},
    "recompute": {"dp": 2, "recompute": True},
    **{
        f"balance_{kind}": {"dp": 4, "ep": 2, "balance": kind}
        for kind in ("sub_seq_aux_loss", "ep", "aux_loss", "gbs_aux_loss")
    },
    # Ascend's primitives, and micro-batches that share one network.
    "shared": {**SHARED, "ep": 2},
    "flat": {
        **SHARED,
        "ep": 2,
        "shared": False,
    },  # every stage's cells, a copy for each micro-batch
    "shared_vpp2": {**SHARED, "vpp": 2, "micro": 4},
    "shared_recompute": {**SHARED, "ep": 2, "recompute": True},
    "shared_accumulate": {"dp": 2, "ep": 2, "accumulate": 3, "target": "Ascend"},
    "gathered": {"dp": 4, "ep": 4, "hop": "alltoall_deredundency", "target": "Ascend"},
    "once": {"dp": 4, "ep": 4, "hop": "alltoall_zero_redundancy", "target": "Ascend"},
}


def overrides(layout):
    """Return the settings of a model of two layers and one MTP layer on a layout."""
    degree = {name: layout.get(name, 1) for name in ("dp", "tp", "pp", "ep", "cp")}
    micro = layout.get("micro", MICRO) if degree["pp"] > 1 else 1
    model = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2 * layout.get("vpp", 1),
        "pp_interleave_num": layout.get("vpp", 1),
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
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "use_flash_attention": True,
        "batch_size": sequences(layout) // degree["dp"],
    }
    settings = {f"model.model_config.{name}": value for name, value in model.items()}
    settings |= {
        "train_dataset.data_loader.config.seq_length": LENGTH,
        "runner_config.batch_size": sequences(layout) // degree["dp"],
        "use_parallel": True,
        "parallel_config.data_parallel": degree["dp"],
        "parallel_config.model_parallel": degree["tp"],
        "parallel_config.pipeline_stage": degree["pp"],
        "parallel_config.expert_parallel": degree["ep"],
        "parallel_config.context_parallel": degree["cp"],
        "parallel_config.use_seq_parallel": layout.get("sp", False),
        "parallel_config.micro_batch_num": micro,
        "callbacks.1.micro_batch_num": micro,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel.enable_parallel_optimizer": layout.get("zero", False),
        "telechat_moe.sharding.expert_tensor_parallel": layout.get("etp", False),
        "telechat_moe.sharding.dispatcher": layout.get("dispatcher", "auto"),
    }
    if balance := layout.get("balance"):
        settings["model.model_config.moe_router_load_balancing_type"] = balance.replace(
            "ep", "aux_loss"
        )
        settings["telechat_moe.moe.balance_group"] = "ep" if balance == "ep" else "dp"
    if layout.get("hop"):
        settings["model.model_config.moe_token_dispatcher_type"] = layout["hop"]
        settings["model.model_config.npu_nums_per_device"] = NODE
    if layout.get("vpp"):
        settings["parallel.pipeline_config.pipeline_interleave"] = True
    if layout.get("recompute"):
        settings["recompute_config.recompute"] = True
    if layout.get("accumulate"):
        settings["runner_config.gradient_accumulation_steps"] = layout["accumulate"]
        settings["callbacks.1.gradient_accumulation_steps"] = layout["accumulate"]
    if layout.get("zero"):
        settings["parallel.parallel_optimizer_config.parallel_optimizer_threshold"] = 0
    return [f"{key}={value}" for key, value in settings.items()]


def sequences(layout):
    """Return the sequences of a micro-batch, over all devices."""
    return layout.get("dp", 1) if layout.get("cp", 1) > 1 else SEQUENCES


def recipe(layout):
    """Return the recipe of a layout."""
    return load("telechat3_moe/pretrain_tiny.yaml", overrides(layout))


def compiled(layout, ranks, change=None):
    """Return the graphs of ranks; ``change`` is called before, in the process that compiles."""
    from telechat_moe.train.rank_graph import compile_recipe

    if change is not None:
        change()
    target, shared = layout.get("target", "CPU"), layout.get("shared")
    return compile_recipe(recipe(layout), ranks, target=target, shared_graph=shared)


def readings(name):
    """Return the readings of the first rank of each stage."""
    layout = LAYOUTS[name]
    r = recipe(layout)
    mesh = mesh_of(r)
    graphs = compiled(layout, [s * mesh.stage_devices for s in range(mesh.pp)])
    return [read(graph, mesh, Expected(*even_exchange(r, mesh))) for graph in graphs]


def broken():
    """Return a reading with the row-parallel product's output left to MindSpore."""
    from telechat_moe.sharding.layouts import TABLE, _layout

    def change():
        TABLE["Linear.row"]["matmul"] = _layout("token tp", ". tp")

    layout = LAYOUTS["dp2tp2sp"]
    r = recipe(layout)
    mesh = mesh_of(r)
    return read(compiled(layout, [0], change)[0], mesh, Expected(*even_exchange(r, mesh)))


def checks(layout=LAYOUTS["ep2tp2"], ranks=(0, 3)):
    """Return the report of two ranks of a stage, and one where a group was exchanged."""
    r = recipe(layout)
    first, other = compiled(layout, ranks)
    mesh = mesh_of(r)
    subject = Subject(str(r.source), mesh, Expected(*even_exchange(r, mesh)))
    good, bad = report(subject, [first], "CPU"), report(subject, [first], "CPU")
    a = ranks[0]
    tensor = next(n for n, found in first.groups.items() if found == [a, a + 1])
    data = next(n for n, found in first.groups.items() if found == [a, a + 2])
    groups = {**first.groups, tensor: first.groups[data], data: first.groups[tensor]}
    same = check_derived(good, mesh_of(r), [first], other)
    wrong = check_derived(bad, mesh_of(r), [replace(first, groups=groups)], other)
    return same, wrong, good, bad


def main(out, names):
    """Compile, two at a time."""
    own = {
        "broken": broken,
        "checks": checks,
        "shared_checks": lambda: checks(LAYOUTS["shared"], (4, 7)),
    }
    works = [(own.get(name, lambda name=name: readings(name)), name) for name in names]
    results = in_children(works, at_once=2)
    Path(out).write_bytes(pickle.dumps(dict(zip(names, results, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

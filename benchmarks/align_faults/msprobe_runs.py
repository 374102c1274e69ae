"""Dumps that the real msprobe writes of real programs in torch, on CPU: what users have.

:func:`dump` trains small models of transformers under ``msprobe.pytorch.PrecisionDebugger``, each in a process of its
own that one process forks after the imports. A run is a :class:`TorchRun`; a fault is planted below msprobe's hooks, so
that the dump holds what a faulty kernel would have made. Needs mindstudio-probe, torch and transformers.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_AT_ONCE = 2  # runs


@dataclass(frozen=True)
class TorchRun:
    """A run of a few steps and how it is dumped."""

    # A key of `MODELS`, or `tensor_parallel`, `sparse_experts`, `sparse_experts_float8`, `megatron_tp`, `megatron_ep`,
    # `megatron_a2a` (experts over ranks by all-to-all, with auxiliary losses)
    model: str = "deepseek"
    level: str = "L1"  # msprobe's level: L0, L1 or mix
    task: str = "tensor"  # or `statistics`
    optimizer: str = (
        ""  # class in the dump: adamw, adamw_foreach, adamw_fused, sgd; empty: it is not dumped
    )
    dtype: str = "float32"
    attention: str = "eager"  # or `sdpa`
    threads: int = 1
    tokens: int = 24  # of each of two sequences
    steps: int = 1  # how many are run
    dumped: tuple[int, ...] = (0,)  # those of them that are dumped
    micro_batches: int = 1
    recompute: bool = False
    ranks: int = 1  # processes, of `tensor_parallel`
    split: bool = False  # whether each process has a share of the micro-batches, in place of all
    fault: str = ""  # a key of `msprobe_faults.FAULTS`


# Sizes of all models: small, but their sums differ with the number of threads.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "initializer_range": 0.1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 16, "num_key_value_heads": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8},
    ),
}


def dump(folder: Path, runs: Mapping[str, TorchRun]) -> dict[str, Path]:
    """Make the dumps of runs below a folder; return where each is."""
    described = {name: asdict(run) for name, run in runs.items()}
    command = [sys.executable, "-m", "benchmarks.align_faults.msprobe_runs", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    process = subprocess.run(
        command,
        input=json.dumps(described),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"msprobe made no dumps: {process.stdout[-2000:]}{process.stderr[-4000:]}"
        )
    return {name: folder / name for name in runs}


# ---------------------------------------------------------------------------------------- in the processes


def _main(folder: Path, runs: Mapping[str, TorchRun]) -> int:
    """Fork a process for each run, or for each rank of it; return 1 if one fails."""
    import transformers
    from msprobe.pytorch import PrecisionDebugger  # noqa: F401  (imported once, for all)

    if any(run.model.startswith("megatron") for run in runs.values()):
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    for name, _ in MODELS.values():
        with contextlib.suppress(AttributeError):
            getattr(transformers, f"{name}ForCausalLM")
    pending: list[tuple[str, list[int]]] = []
    failed: list[str] = []
    with contextlib.ExitStack() as meetings:
        for name, run in runs.items():
            meeting = Path(meetings.enter_context(tempfile.TemporaryDirectory()))
            children: list[int] = []
            for rank in range(run.ranks):
                child = os.fork()
                if not child:
                    _child(folder / name, run, rank, meeting)
                children.append(child)
            pending.append((name, children))
            if len(pending) == _AT_ONCE:
                failed += _failed(*pending.pop(0))
        failed += [n for name, children in pending for n in _failed(name, children)]
    for name in failed:
        print(f"no dump: {name}")
        shutil.rmtree(folder / name, ignore_errors=True)
    return int(bool(failed))


def _failed(name: str, children: list[int]) -> list[str]:
    """Wait for the processes of a run; return its name if one of them failed."""
    codes = [os.waitpid(child, 0)[1] for child in children]
    return [name] if any(codes) else []


def _child(folder: Path, run: TorchRun, rank: int, meeting: Path) -> None:
    """Train and dump; end the process."""
    import traceback

    code = 1
    try:
        _train(folder, run, rank, meeting)
        code = 0
    except BaseException:  # the process ends here, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(folder: Path, run: TorchRun, rank: int, meeting: Path) -> None:
    import torch
    from msprobe.pytorch import PrecisionDebugger, seed_all

    torch.set_num_threads(run.threads)
    megatron = run.model.startswith("megatron")
    if run.ranks > 1 or megatron:
        store = f"file://{meeting}/store"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=run.ranks
        )
    seed_all(7)
    if run.model == "tensor_parallel":
        from benchmarks.align_faults import tensor_parallel

        model, batches = tensor_parallel.build(run.ranks, rank, run.steps * run.micro_batches)
        model = model.to(getattr(torch, run.dtype))
    elif megatron:
        from benchmarks.align_faults import megatron_moe

        layout = run.model.rpartition("_")[2]
        model, batches = megatron_moe.build(layout, run.steps * run.micro_batches)
        model = model.to(getattr(torch, run.dtype))
    elif run.model.startswith("sparse_experts"):
        from benchmarks.align_faults import sparse_experts

        float8 = run.model.endswith("float8")
        if float8:  # msprobe frees what it saved: a device's copy, but on CPU the program's own
            from msprobe.core.dump.data_dump.data_processor import pytorch_processor

            pytorch_processor.TensorHandler.free_tensor = staticmethod(lambda *_: None)
        model, batches = sparse_experts.build(float8, run.steps * run.micro_batches)
        model = model.to(getattr(torch, run.dtype))
    else:
        model, batches = _built(run)
    weights = [p for p in model.parameters() if p.requires_grad]
    update = _optimizer(run, weights)
    if run.fault:
        from benchmarks.align_faults.msprobe_faults import FAULTS

        FAULTS[run.fault].plant(model, update, batches)
    settings: dict[str, Any] = {"task": run.task, "dump_path": str(folder), "rank": []}
    settings |= {"step": [*run.dumped], "level": run.level, run.task: {"scope": [], "list": []}}
    settings[run.task] |= {"data_mode": ["all"], "summary_mode": "statistics"}
    config = meeting / f"config{rank}.json"
    config.write_text(json.dumps(settings))
    debugger = PrecisionDebugger(config_path=str(config))
    for step in range(run.steps):
        debugger.start(model=model)
        for batch in (step_batches := _batches(run, step, rank, batches)):
            (model(**batch).loss / len(step_batches)).backward()
        if not run.optimizer:
            debugger.stop()
        elif megatron:
            model.reduce_gradients()
        update.step()
        update.zero_grad()
        debugger.stop()
        debugger.step()


def _batches(run: TorchRun, step: int, rank: int, batches: list[Any]) -> list[Any]:
    """Return the micro-batches that a process has in a step."""
    batches = batches[step * run.micro_batches :][: run.micro_batches]
    return batches[rank :: run.ranks] if run.split else batches


def _optimizer(run: TorchRun, weights: Any) -> Any:
    import torch

    if run.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    kind = {"foreach": run.optimizer == "adamw_foreach", "fused": run.optimizer == "adamw_fused"}
    return torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1, **kind)


def _built(run: TorchRun) -> tuple[Any, list[dict[str, Any]]]:
    """Return a model of transformers and its batches."""
    import torch
    import transformers

    name, extra = MODELS[run.model]
    kwargs = {**SIZES, **extra, "attn_implementation": run.attention}
    config = getattr(transformers, f"{name}Config")(**kwargs)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    tokens = torch.randint(0, SIZES["vocab_size"], (run.steps * run.micro_batches, 2, run.tokens))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # transformers begins with ones and zeros, which no training keeps
            with torch.no_grad():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(getattr(torch, run.dtype))
    if run.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model, [{"input_ids": t, "labels": t} for t in tokens]


if __name__ == "__main__":
    sys.exit(
        _main(
            Path(sys.argv[1]),
            {
                name: TorchRun(**{**run, "dumped": tuple(run["dumped"])})
                for name, run in json.load(sys.stdin).items()
            },
        )
    )

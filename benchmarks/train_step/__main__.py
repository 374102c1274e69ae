"""Our training step beside Hugging Face's DeepseekV3 in torch, same weights and batches.

    python -m benchmarks.train_step [--steps 7] [--peers NAME...] [--recipe FILE] [--json FILE]

MTP, balance losses and the expert bias are off on both sides (transformers has none of them). Peers
run in processes of their own, two threads each, and take turns step by step; torch as users run it
and with malloc tuned (a third of its time is page faults otherwise). A step is forward, backward,
clipping and AdamW. In fp32 the first losses must agree within 1e-5, all within 1e-3; in bfloat16
within 2e-2 of the fp32 ones.

Needs the extras `train` and `test`, and torch.

--json keys: machine, recipe, tokens_per_step, useful_gflop_per_step (active experts, causal half of
attention, forward and backward), matmul_gflops (fp32, 1024 cubed, two threads: mindspore, torch,
and ours, all at once from every thread), peers (list of {name, seconds_min, seconds_median,
tokens_per_second, roofline (share of the best fp32 rate), peak_memory_gib, first_step_seconds,
losses}), ratios ({ours: {torch peer: {min, median}}}), breakdown ({part: {milliseconds, percent}}
of our fused step).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ops import TUNED_MALLOC
from benchmarks.train_step.rates import best_gflops, native_gflops
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.tools.plan.cost.measure_here import TrainingStep

THREADS = 2
WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster
OVERRIDES = [
    "model.model_config.num_nextn_predict_layers=0",
    "model.model_config.moe_aux_loss_coeff=0.0",
    "model.model_config.rms_norm_eps=1.0e-6",  # transformers' latent norms always have this one
]
# Name -> (ours or torch, options of the recipe or of torch, malloc tuned).
PEERS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "ours": ("ours", (), False),
    "ours, plain operators": ("ours", ("telechat_moe.operators.default=plain",), False),
    "ours, plain + fuser": (
        "ours",
        ("telechat_moe.operators.default=plain", "telechat_moe.operators.fuse_plain=true"),
        False,
    ),
    "ours, bf16": ("ours", ("model.model_config.compute_dtype=bfloat16",), False),
    "torch eager, as users run it": ("torch", (), False),
    "torch eager, expert loop": ("torch", ("fused",), True),
    "torch eager, grouped": ("torch", ("fused", "grouped"), True),
    "torch.compile, expert loop": ("torch", ("fused", "compile"), True),
    "torch.compile, grouped": ("torch", ("fused", "grouped", "compile"), True),
    "torch bf16, expert loop": ("torch", ("fused", "autocast"), True),
    "torch bf16, grouped": ("torch", ("fused", "grouped", "autocast"), True),
    "torch.compile bf16, grouped": ("torch", ("fused", "grouped", "compile", "autocast"), True),
}


def batches(vocab_size: int, batch: int, length: int) -> Any:
    """Yield token windows ``[B, S + 1]`` with a pattern that can be learned."""
    import numpy as np

    generator = np.random.default_rng(0)
    while True:
        start = generator.integers(0, vocab_size, (batch, 1))
        stride = generator.integers(1, 8, (batch, 1))
        yield ((start + stride * np.arange(length + 1)) % vocab_size).astype(np.int32)


class Ours(TrainingStep):
    """Our training step."""

    def __init__(self, folder: Path, recipe: Any, options: list[str]) -> None:
        super().__init__(recipe)
        self.updates = 0

    def save(self, path: Path) -> None:
        """Write the weights."""
        from safetensors.numpy import save_file

        params = self.model.get_parameters()
        tensors = {p.name: p.asnumpy().copy() for p in params if "expert_load" not in p.name}
        save_file(tensors, path)

    def step(self, window: Any) -> float:
        """Train on one window; return the loss."""
        self.updates += 1
        return self.train(window, self.updates)

    def matmul_gflops(self) -> float:
        """Return the speed of a chain of fp32 products, 1024 cubed."""
        import numpy as np
        from mindspore import Tensor

        from benchmarks.train_step.matmul_chain import Chain

        x = Tensor(np.random.default_rng(0).standard_normal((1024, 1024), np.float32) / 32)
        chain = Chain(8)
        return best_gflops(lambda: chain(x, x).asnumpy())

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of a step, run alone."""
        from benchmarks.train_step.step_parts import measure

        return measure(self.cell, self.model, self.recipe.runner_config.batch_size)


def worker(name: str, folder: Path, recipe_name: str) -> None:
    """Serve requests, one JSON line each, until told to stop."""
    from telechat_moe.recipe import load

    kind, options, _ = PEERS[name]
    recipe = load(recipe_name, overrides=[*OVERRIDES, *(options if kind == "ours" else ())])
    config, batch = recipe.model_config, recipe.runner_config.batch_size
    windows = batches(config.vocab_size, batch, config.seq_length)
    if kind == "ours":
        peer = Ours(folder, recipe, list(options))
        peer.save(folder / "weights.safetensors")
    else:
        from benchmarks.train_step.torch_peer import Torch

        peer = Torch(folder, recipe, list(options))
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for request in sys.stdin:
        answer: dict[str, Any] = {}
        if request.strip() == "step":
            window = next(windows)
            began = time.perf_counter()
            answer["loss"] = peer.step(window)
            answer["seconds"] = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer["peak_gib"] = peak / 2**20
        elif request.strip() == "matmul":
            answer["gflops"] = peer.matmul_gflops()
        elif request.strip() == "native":
            answer["gflops"] = native_gflops(THREADS)
        elif request.strip() == "parts":
            answer["parts"] = peer.parts()
        print(json.dumps(answer), file=reply, flush=True)


class Peer:
    """A worker process."""

    def __init__(self, name: str, folder: Path, recipe: str) -> None:
        self.name = name
        self.ours = PEERS[name][0] == "ours"
        self.exact = not any("bfloat16" in x or "autocast" in x for x in PEERS[name][1])
        env = TUNED_MALLOC if PEERS[name][2] else {}
        threads = {"OMP_NUM_THREADS": str(THREADS), "GLOG_v": "3", "HF_HUB_OFFLINE": "1"}
        root = str(Path(__file__).parents[2])
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, str(folder), "--recipe", recipe],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads, **env, "PYTHONPATH": os.pathsep.join([root, *inherited])},
            cwd=folder,
        )
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = 0.0
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died, exit code {self.process.wait()}")
        return json.loads(line)

    def ask(self, request: str) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.answer()

    def step(self) -> None:
        """Run a step and note its time, loss and memory."""
        answer = self.ask("step")
        self.seconds.append(answer["seconds"])
        self.losses.append(answer["loss"])
        self.peak_gib = answer["peak_gib"]

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def check_losses(expected: list[float], peer: Peer) -> None:
    """Stop unless a peer computed the same losses as the first one."""
    for i, (a, b) in enumerate(zip(expected, peer.losses, strict=True)):
        bound = 2e-2 if not peer.exact else 1e-5 if i == 0 else 1e-3
        if abs(a - b) > bound * abs(a):
            raise SystemExit(f"step {i + 1}: loss {a}, {peer.name} {b}: differs by over {bound}")


def compare(recipe_name: str, names: list[str], steps: int) -> dict[str, Any]:
    """Run all peers in turns and return the numbers."""
    from telechat_moe.interop.hf import convert
    from telechat_moe.recipe import load

    recipe = load(recipe_name, overrides=OVERRIDES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hf = folder / "hf"
        peers: list[Peer] = []
        for name in names:
            peers.append(Peer(name, hf if PEERS[name][0] == "torch" else folder, recipe_name))
            if not hf.exists():
                convert(folder / "weights.safetensors", hf, recipe.model_config, to="hf")
        for i in range(steps + WARM_UP):
            for peer in peers:
                peer.step()
            print(f"round {i + 1}/{steps + WARM_UP}", *[f"{p.seconds[-1]:.3f}s" for p in peers])
        for peer in peers[1:]:
            check_losses(peers[0].losses, peer)
        gflops = {
            "mindspore": peers[0].ask("matmul")["gflops"],
            "ours": peers[0].ask("native")["gflops"],
        }
        for peer in peers:
            if not peer.ours and "torch" not in gflops:
                gflops["torch"] = peer.ask("matmul")["gflops"]
        parts = peers[0].ask("parts")["parts"]
        for peer in peers:
            peer.stop()
    config = recipe.model_config
    tokens = recipe.runner_config.batch_size * config.seq_length
    return report(peers, gflops, parts, tokens, useful_gflop(config) * tokens) | {
        "recipe": recipe_name,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
    }


def useful_gflop(config: Any) -> float:
    """Return the useful GFLOP to train on one token: active experts, the causal half of attention."""
    from telechat_moe.recipe.arithmetic import flops_per_token

    return flops_per_token(config, mtp=False).training / 1e9


def report(
    peers: list[Peer], gflops: dict[str, float], parts: dict[str, float], tokens: int, useful: float
) -> dict[str, Any]:
    """Return the numbers of a comparison under their documented keys."""
    rows = [
        {
            "name": p.name,
            "seconds_min": min(p.seconds[WARM_UP:]),
            "seconds_median": statistics.median(p.seconds[WARM_UP:]),
            "tokens_per_second": tokens / min(p.seconds[WARM_UP:]),
            "roofline": useful / min(p.seconds[WARM_UP:]) / max(gflops.values()),
            "peak_memory_gib": p.peak_gib,
            "first_step_seconds": p.seconds[0],
            "losses": p.losses,
        }
        for p in peers
    ]
    ratios = {
        ours["name"]: {
            row["name"]: {
                kind: row[f"seconds_{kind}"] / ours[f"seconds_{kind}"] for kind in ("min", "median")
            }
            for row in rows
            if row is not ours
        }
        for ours, peer in zip(rows, peers, strict=True)
        if peer.ours
    }
    # The parts are run alone; what they leave of a whole step is the host, residual additions, and
    # what running alone changes.
    whole = rows[0]["seconds_median"]
    parts = {**parts, "host and rest": whole - sum(parts.values())}
    breakdown = {
        part: {"milliseconds": seconds * 1e3, "percent": 100 * seconds / whole}
        for part, seconds in sorted(parts.items(), key=lambda x: -x[1])
    }
    return {
        "peers": rows,
        "tokens_per_step": tokens,
        "useful_gflop_per_step": useful,
        "matmul_gflops": gflops,
        "ratios": ratios,
        "breakdown": breakdown,
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    first = result["peers"][0]["name"]
    rows: list[list[str]] = []
    for row in result["peers"]:
        ratio = result["ratios"][first].get(row["name"])
        rows.append(
            [
                row["name"],
                f"{row['seconds_min']:.3f}",
                f"{row['seconds_median']:.3f}",
                f"{row['tokens_per_second']:.0f}",
                f"{100 * row['roofline']:.0f} %",
                f"{row['peak_memory_gib']:.2f}",
                f"{row['first_step_seconds']:.1f}",
                f"{ratio['min']:.2f}x" if ratio else "",
            ]
        )
    titles = ("", "min s ", "median s ", "tokens/s ", "roofline ", "peak GiB ", "first step s ")
    print(f"{result['recipe']}: one step, {result['tokens_per_step']} tokens")
    show_table((*titles, f"'{first}' is "), rows)
    print(f"\nwhere a step of '{first}' goes")
    parts = [
        (part, f"{values['milliseconds']:.0f}", f"{values['percent']:.1f}")
        for part, values in result["breakdown"].items()
    ]
    show_table(("part", "ms ", "% "), parts)
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result["matmul_gflops"].items())
    print(f"fp32 matmul GFLOP/s: {rates}; {result['machine']}")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="timed rounds")
    parser.add_argument("--recipe", default="telechat3_moe/pretrain_19m.yaml")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], Path(args.worker[1]), args.recipe)
        return
    result = compare(args.recipe, args.peers, args.steps)
    if not write_json(args.json, result):
        show(result)


if __name__ == "__main__":
    main()

"""A small decoder block over random sequence lengths, forward, everything from the first call on counted.

Norm, q, k and v, rotary positions, causal attention, residual and norm, SwiGLU MLP, residual.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.ops.timing import Measurement, check_same
from telechat_moe.ops import dvm
from telechat_moe.ops.native import Kernel

N, D, H, F, LONGEST, EPS = 4, 64, 256, 512, 512, 1e-6

Arrays = list[np.ndarray]
Block = Callable[[Arrays], np.ndarray]


def cases(threads: int, quick: bool, tell: Callable[[str], None]) -> Iterator[Measurement]:
    """Run the block on as many random lengths from 16 to 512 with every peer, and compare all results."""
    tell("dynamic decoder block")
    rng = np.random.default_rng(2)
    lengths = rng.integers(16, LONGEST + 1, 40 if quick else 300)
    weights = {name: rng.standard_normal(s).astype(np.float32) for name, s in _SHAPES.items()}
    for name, w in weights.items():
        w *= 0.1 if name.startswith("norm") else w.shape[-1] ** -0.5
        w += name.startswith("norm")
    x = rng.standard_normal((LONGEST, H)).astype(np.float32)
    angle = np.arange(LONGEST)[:, None] * 1e4 ** (-np.arange(0, D, 2) / D)
    cos, sin = (
        f(angle).astype(np.float32).reshape(1, LONGEST, 1, D // 2) for f in (np.cos, np.sin)
    )
    case = Measurement(
        "dynamic", "decoder block", f"{len(lengths)} random lengths to {LONGEST}", threads
    )
    first: Arrays = []
    for peer, block in _peers(weights, threads):
        times = []
        for i, S in enumerate(lengths):
            inputs = [x[:S], cos[:, :S], sin[:, :S]]
            began = time.perf_counter()
            y = block(inputs)
            times.append((time.perf_counter() - began) * 1e6)
            if len(first) < len(lengths):
                first.append(y.copy())
            else:
                check_same(case, peer, first[i], y, 1e-4)
        case.best[peer] = case.median[peer] = float(np.sum(times))
        case.extra[f"{peer}: worst call"] = float(np.max(times))
        case.extra[f"{peer}: median call"] = float(np.median(times))
    case.error = _error(weights, [x, cos, sin], first[0])
    yield case


_SHAPES = {
    "norm1": (H,),
    "q": (H, H),
    "k": (H, H),
    "v": (H, H),
    "o": (H, H),
    "norm2": (H,),
    "gate": (F, H),
    "up": (F, H),
    "down": (H, F),
}


def _peers(w: dict[str, np.ndarray], threads: int) -> Iterator[tuple[str, Block]]:
    yield "ours", _alone(w)
    with contextlib.suppress(ImportError):
        yield from _mindspore(w)
    with contextlib.suppress(ImportError):
        yield from _torch(w, threads)


def _alone(w: dict[str, np.ndarray]) -> Block:
    """Return the block of our kernels on NumPy arrays; the first call compiles it."""
    k: dict[str, Any] = {}

    def compile_all() -> None:
        def norm(b: Any, x: Any, weight: Any) -> None:
            b.store(x * b.rsqrt(b.sum(x * x, -1) * (1 / H) + EPS) * weight)

        def add_norm(b: Any, x: Any, y: Any, weight: Any) -> None:
            h = x + y
            b.store(h * b.rsqrt(b.sum(h * h, -1) * (1 / H) + EPS) * weight)
            b.store(h)

        def swiglu(b: Any, gate: Any, up: Any) -> None:
            b.store(gate * b.sigmoid(gate) * up)

        rows = ("S", H)
        k["norm"] = dvm.Compiled(dvm.build(norm, rows, (H,)))
        k["add_norm"] = dvm.Compiled(dvm.build(add_norm, rows, rows, (H,)))
        k["swiglu"] = dvm.Compiled(dvm.build(swiglu, ("S", F), ("S", F)))
        k["add"] = dvm.Compiled(dvm.build(lambda b, x, y: b.store(x + y), rows, rows))
        k["matmul"] = Kernel("Matmul", {"bf16": False})
        k["rope"] = Kernel("Rope", {"interleaved": False})
        k["attention"] = Kernel("FlashAttention", {"scale": D**-0.5, "bf16": False})

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = np.empty((len(x), len(w[name])), np.float32)
        k["matmul"]([x, w[name]], [y])
        return y

    def block(inputs: Arrays) -> np.ndarray:
        if not k:
            compile_all()
        x, cos, sin = inputs
        S = len(x)
        (h,) = k["norm"](x, w["norm1"])
        q, key, v = (linear(h, name).reshape(1, S, N, D) for name in "qkv")
        turned = np.empty_like(q), np.empty_like(key)
        for y, plain in zip(turned, (q, key), strict=True):
            k["rope"]([plain, cos, sin], [y])
        o, lse = np.empty_like(v), np.empty((1, N, S), np.float32)
        k["attention"]([*turned, v, np.zeros((1, S), np.int32)], [o, lse])
        h, x = k["add_norm"](linear(o.reshape(S, H), "o"), x, w["norm2"])
        (a,) = k["swiglu"](linear(h, "gate"), linear(h, "up"))
        return k["add"](linear(a, "down"), x)[0]

    return block


def _mindspore(w: dict[str, np.ndarray]) -> Iterator[tuple[str, Block]]:
    """The model's own cells with both backends, in one graph for all lengths."""
    import mindspore as ms

    from benchmarks.ops.decoder_cell import Decoder
    from telechat_moe.ops.select import using

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", jit_config={"jit_level": "O0"})
    for name, backend in (("ours in a graph", "fused"), ("mindspore O0", "plain")):
        with using(backend):
            cell = Decoder(w, N, EPS)
        unknown = [[None, H], [1, None, 1, D // 2], [1, None, 1, D // 2]]
        last = ms.Tensor(shape=[1, None], dtype=ms.int32)
        cell.set_inputs(*[ms.Tensor(shape=s, dtype=ms.float32) for s in unknown], last)

        def block(inputs: Arrays, cell: Any = cell, fused: bool = backend == "fused") -> np.ndarray:
            S = len(inputs[0])
            # the first key that each query sees, or each query's position
            last = np.zeros(S, np.int32) if fused else np.arange(S, dtype=np.int32)
            arrays = [*map(np.ascontiguousarray, inputs), last.reshape(1, S)]
            return cell(*map(ms.Tensor.from_numpy, arrays)).asnumpy()

        yield name, block


def _torch(w: dict[str, np.ndarray], threads: int) -> Iterator[tuple[str, Block]]:
    import torch

    torch.set_num_threads(threads)
    t = {name: torch.from_numpy(value) for name, value in w.items()}
    linear = torch.nn.functional.linear

    def norm(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (H,), weight, EPS)

    def rope(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(1, 2)

    def forward(x: Any, cos: Any, sin: Any) -> Any:
        h = norm(x, t["norm1"])
        q, k, v = (linear(h, t[name]).view(1, -1, N, D) for name in "qkv")
        o = torch.nn.functional.scaled_dot_product_attention(
            rope(q, cos, sin), rope(k, cos, sin), v.transpose(1, 2), is_causal=True
        )
        x = x + linear(o.transpose(1, 2).reshape(-1, H), t["o"])
        h = norm(x, t["norm2"])
        a = torch.nn.functional.silu(linear(h, t["gate"])) * linear(h, t["up"])
        return x + linear(a, t["down"])

    torch._dynamo.reset()
    for name, function in (("torch eager", forward), ("inductor, cold", torch.compile(forward))):

        def block(inputs: Arrays, function: Any = function) -> np.ndarray:
            with torch.no_grad():
                return function(*map(torch.from_numpy, inputs)).numpy()

        yield name, block


def _error(w: dict[str, np.ndarray], full: Arrays, ours: np.ndarray) -> float:
    """Return our error against float64 for the first length."""
    S = len(ours)
    d = {name: value.astype(np.float64) for name, value in w.items()}
    x, cos, sin = full[0][:S].astype(np.float64), full[1][0, :S], full[2][0, :S]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x.reshape(S, N, D), 2, -1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    h = norm(x, d["norm1"])
    q, k, v = rope(h @ d["q"].T), rope(h @ d["k"].T), (h @ d["v"].T).reshape(S, N, D)
    scores = np.einsum("snd,tnd->nst", q, k) * D**-0.5
    scores[:, np.triu_indices(S, 1)[0], np.triu_indices(S, 1)[1]] = -np.inf
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("nst,tnd->snd", weight / weight.sum(-1, keepdims=True), v).reshape(S, H)
    x = x + o @ d["o"].T
    h = norm(x, d["norm2"])
    gate = h @ d["gate"].T
    y = x + (gate / (1 + np.exp(-gate)) * (h @ d["up"].T)) @ d["down"].T
    return float(np.abs(ours - y).max() / np.abs(y).max())

"""The larger operators beside torch: mixture of experts, attention, cross-entropy, AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.ops.products import register_rate
from benchmarks.ops.timing import Measurement, Tell, aligned, check_same, in_turns
from telechat_moe.ops.native import Kernel

COPY, SHARE = "copy of as many bytes", "share of the register rate"


def _torch(threads: int) -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return torch


def _normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) * scale
    return aligned(values.astype(np.float32))


def _zeros(*shape: int) -> np.ndarray:
    return aligned(np.zeros(shape, np.float32))


def matmul(threads: int, quick: bool, rate: float) -> Measurement:
    """Measure a linear layer of 1024 tokens a thread, 1024 wide, against the multiply-adds of registers."""
    x, w = _normal(1024 * threads, 1024), _normal(1024, 1024)
    y = aligned(x)
    case = Measurement("grouped matmul", "matmul", "1024 cubed a thread", threads)
    kernel = Kernel("Matmul", {"bf16": False})
    in_turns(case, {"ours": lambda: kernel([x, w], [y])}, 0.1 if quick else 0.5)
    case.extra[SHARE] = 2 * x.size * 1024 / 1e3 / case.best["ours"] / rate
    return case


def grouped_matmul(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure the rates of forward, dX and dW against multiply-adds in registers, and GMMAdd against dW and an addition."""
    rate = register_rate(threads)
    yield matmul(threads, quick, rate)
    for E, H, F in ((16, 256, 128), (8, 1024, 512)):
        for rows in (32, 64, 128, 512):
            tell(f"grouped matmul {E} x {H} x {F}, {rows} rows")
            P = E * rows
            x, w, dy = _normal(P, H), _normal(E, H, F), _normal(P, F)
            size = np.full(E, rows, np.int32)
            y, dx, dw = aligned(dy), aligned(x), aligned(w)
            forward = Kernel("GroupedMatmul", {"bf16": False})
            backward = Kernel("GroupedMatmulGrad", {"bf16": False})
            case = Measurement("grouped matmul", "GMM", f"{E}x{H}x{F}, {rows} rows each", threads)
            case.ours = "forward"
            peers = {
                "forward": lambda: forward([x, w, size], [y]),  # noqa: B023
                "dX and dW": lambda: backward([x, w, size, dy], [dx, dw]),  # noqa: B023
            }
            _check_products(case, peers, (x, w, dy), (y, dx, dw))
            in_turns(case, peers, 0.1 if quick else 0.5)
            flop = 2 * P * H * F / 1e3
            case.extra = {
                f"{SHARE}, forward": flop / case.best["forward"] / rate,
                f"{SHARE}, dX and dW": 2 * flop / case.best["dX and dW"] / rate,
            }
            yield case
            if quick:
                return
    tell("GMMAdd 134 MB")
    E, H, F, rows = 16, 2048, 1024, 32
    x, dy = _normal(E * rows, H), _normal(E * rows, F)
    size, main, dw = np.full(E, rows, np.int32), *(_zeros(E, H, F) for _ in "12")
    token = np.empty(1, np.float32)
    add, apart = Kernel("GMMAdd", {"bf16": False}), Kernel("GroupedMatmulDw", {"bf16": False})
    torch = _torch(threads)

    def separate() -> None:
        apart([x, size, dy], [dw])
        if torch is not None:  # its addition uses all threads; NumPy's one
            torch.from_numpy(main).add_(torch.from_numpy(dw))
        else:
            np.add(main, dw, out=main)

    case = Measurement("grouped matmul", "GMMAdd", "134 MB gradient, 512 rows", threads)
    peers = {"ours": lambda: add([x, size, dy, main], [token]), "dW, then add": separate}
    peers["ours"]()
    fused = main.copy()
    main.fill(0)
    separate()
    check_same(case, "dW, then add", fused, main, 1e-5)
    in_turns(case, peers, 1.0)
    yield case


def _check_products(case: Measurement, calls: dict[str, Any], arrays: Any, found: Any) -> None:
    """Compare our grouped products with NumPy's, expert by expert."""
    x, w, dy = arrays
    rows, steps = len(x) // len(w), range(len(w))
    parts = [(x[e * rows : (e + 1) * rows], w[e], dy[e * rows : (e + 1) * rows]) for e in steps]
    for call in calls.values():
        call()
    check_same(case, "forward", np.concatenate([a @ b for a, b, _ in parts]), found[0], 1e-4)
    check_same(case, "dX and dW", np.concatenate([d @ b.T for _, b, d in parts]), found[1], 1e-4)
    check_same(case, "dX and dW", np.stack([a.T @ d for a, _, d in parts]), found[2], 1e-4)


def _loads(E: int, pairs: int, zipf: bool) -> np.ndarray:
    if not zipf:
        return np.full(E, pairs // E)
    share = 1 / np.arange(1, E + 1) ** 1.1
    share[-1] = 0  # one expert gets nothing
    load = np.floor(share / share.sum() * pairs).astype(int)
    load[0] += pairs - load.sum()
    return load


def moe(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure permute, grouped matmul, SwiGLU, grouped matmul and unpermute, forward and backward."""
    for E, H, F in ((16, 256, 128),) if quick else ((16, 256, 128), (32, 1024, 512)):
        for zipf in (False, True):
            tell(f"MoE {E} x {H} x {F} {'Zipf' if zipf else 'uniform'}")
            yield _moe(E, H, F, zipf, threads, quick)


def _moe(E: int, H: int, F: int, zipf: bool, threads: int, quick: bool) -> Measurement:
    T, K = 2048, 4
    rng = np.random.default_rng(0)
    flat = np.repeat(np.arange(E), _loads(E, T * K, zipf))
    index = rng.permutation(flat).reshape(T, K).astype(np.int32)
    x, weight, dout = _normal(T, H), np.full((T, K), 1 / K, np.float32), _normal(T, H)
    gate, up, down = (_normal(E, *s, scale=0.05) for s in ((H, F), (H, F), (F, H)))
    P = T * K
    shapes = {"xp o do dxp": (P, H), "y g u dy": (P, F), "out dx": (T, H), "dw": (T, K)}
    shapes |= {"dd": down.shape, "dg": gate.shape, "du": up.shape}
    a = {n: _zeros(*s) for names, s in shapes.items() for n in names.split()}
    row, pair, size = np.empty(P, np.int32), np.empty(P, np.int32), np.empty(E, np.int32)
    f = {"bf16": False}
    products = ("GroupedSwiGLU", "GroupedMatmul", "GroupedMatmulGrad", "GroupedSwiGLUGrad")
    k = {name: Kernel(name, f) for name in products}
    k |= {n: Kernel(n, {}) for n in ("Permute", "Unpermute", "UnpermuteGrad", "PermuteGrad")}
    k["PermutePlan"] = Kernel("PermutePlan", {"experts": E})

    def ours() -> None:
        k["PermutePlan"]([index], [row, pair, size])
        k["Permute"]([x, pair, row], [a["xp"]])
        k["GroupedSwiGLU"]([a["xp"], gate, up, size], [a["y"], a["g"], a["u"]])
        k["GroupedMatmul"]([a["y"], down, size], [a["o"]])
        k["Unpermute"]([a["o"], row, weight], [a["out"]])
        k["UnpermuteGrad"]([a["o"], pair, weight, dout], [a["do"], a["dw"]])
        k["GroupedMatmulGrad"]([a["y"], down, size, a["do"]], [a["dy"], a["dd"]])
        k["GroupedSwiGLUGrad"](
            [a["xp"], gate, up, size, a["g"], a["u"], a["dy"]], [a["dxp"], a["dg"], a["du"]]
        )
        k["PermuteGrad"]([a["dxp"], row, x], [a["dx"]])

    case = Measurement(
        "moe", "MoE block f+b", f"{E}x{H}x{F} {'Zipf' if zipf else 'uniform'}", threads
    )
    peers: dict[str, Any] = {"ours": ours}
    torch = _torch(threads)
    if torch is not None:
        ours()
        _moe_torch(torch, case, peers, a, (x, weight, dout, gate, up, down), index)
    in_turns(case, peers, 0.5 if quick else 3.0)
    return case


def _moe_torch(
    torch: Any, case: Measurement, peers: dict[str, Any], a: Any, arrays: Any, index: Any
) -> None:
    tx, tw, td, tg, tu, tdn = (torch.from_numpy(v) for v in arrays)
    ti = torch.from_numpy(index.astype(np.int64))
    leaves = [t.clone().requires_grad_() for t in (tx, tw, tg, tu, tdn)]
    E, K = tg.shape[0], ti.shape[1]
    silu = torch.nn.functional.silu

    def loop() -> Any:  # as transformers' DeepseekV3MoE
        x, w, g, u, d = leaves
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ti, E).permute(2, 0, 1)
        for e in range(E):
            token, choice = torch.where(mask[e])
            if token.numel():
                h = x[token]
                y = (silu(h @ g[e]) * (h @ u[e])) @ d[e]
                out.index_add_(0, token, y * w[token, choice].unsqueeze(-1))
        return out

    def grouped() -> Any:
        x, w, g, u, d = leaves
        order = torch.argsort(ti.reshape(-1), stable=True)
        end = torch.cumsum(torch.bincount(ti.reshape(-1), minlength=E), 0).to(torch.int32)
        h = x[order // K]
        mm = torch._grouped_mm
        y = mm(silu(mm(h, g, end)) * mm(h, u, end), d, end)
        y = y * w.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, order // K, y)

    for name, function in (("torch loop (HF)", loop), ("torch grouped_mm", grouped)):
        try:
            check_same(case, name, a["out"], function().detach(), 1e-4)
        except (RuntimeError, AttributeError) as error:
            if "differs" in str(error):
                raise
            continue  # this torch has no grouped product for these shapes
        peers[name] = partial(_there_and_back, leaves, function, td)
        peers[name]()
        for ours, leaf in zip(("dx", "dw", "dg", "du", "dd"), leaves, strict=True):
            check_same(case, name, a[ours], leaf.grad, 1e-4)


def _there_and_back(leaves: list[Any], function: Callable[[], Any], grad: Any) -> None:
    """Compute a function, and the gradients of its leaves alone."""
    for leaf in leaves:
        leaf.grad = None
    function().backward(grad)


def attention(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure causal attention, forward and backward, with MLA's key and value widths."""
    shapes = [
        (4, 512, 8, 96, 64),
        (4, 512, 8, 192, 128),
        (1, 2048, 8, 96, 64),
        (1, 2048, 4, 192, 128),
    ]
    for B, S, N, D, Dv in shapes[:1] if quick else shapes:
        tell(f"attention {B}x{S}x{N}x{D}/{Dv}")
        q, v = _normal(B, S, N, D), _normal(B, S, N, Dv)
        k, do = q * 0.7, v * 0.9
        start = np.zeros((B, S), np.int32)
        o, lse = aligned(v), _zeros(B, N, S)
        grads = [aligned(x) for x in (q, k, v)]
        scale = {"scale": D**-0.5, "bf16": False}
        forward, backward = Kernel("FlashAttention", scale), Kernel("FlashAttentionGrad", scale)

        def ours() -> None:
            forward([q, k, v, start], [o, lse])  # noqa: B023
            backward([q, k, v, start, o, lse, do], grads)  # noqa: B023

        case = Measurement("attention", "attention f+b", f"{B}x{S}x{N}x{D}/{Dv}", threads)
        peers: dict[str, Any] = {"ours": ours}
        ours()
        torch = _torch(threads)
        if torch is not None:
            _attention_torch(torch, case, peers, (q, k, v, do), (o, grads))
        in_turns(case, peers, 0.5 if quick else 3.0)
        yield case


def _attention_torch(torch: Any, case: Measurement, peers: Any, arrays: Any, results: Any) -> None:
    q, k, v, do = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in arrays)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    D, Dv, S = q.shape[-1], v.shape[-1], q.shape[2]
    mask = torch.full((S, S), float("-inf")).triu(1)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def eager() -> Any:
        a, b, c = leaves
        return torch.softmax(a @ b.transpose(-1, -2) * D**-0.5 + mask, -1) @ c

    def plain() -> Any:
        return sdpa(*leaves, is_causal=True)

    def padded() -> Any:  # equal widths: torch's flash kernel
        a, b, c = leaves
        return sdpa(a, b, torch.nn.functional.pad(c, (0, D - Dv)), is_causal=True)[..., :Dv]

    ways = {"torch eager": eager, "torch sdpa": plain, "torch sdpa, v padded": padded}
    for name, function in ways.items():
        check_same(case, name, results[0], function().detach().transpose(1, 2), 1e-4)
        peers[name] = partial(_there_and_back, leaves, function, do)
        peers[name]()
        for ours, leaf in zip(results[1], leaves, strict=True):
            check_same(case, name, ours, leaf.grad.transpose(1, 2), 1e-4)


def cross_entropy(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure cross-entropy from logits, forward and backward."""
    for T, V in ((2048, 4096),) if quick else ((2048, 4096), (2048, 32000)):
        tell(f"cross-entropy {T}x{V}")
        x = _normal(T, V)
        label = np.random.default_rng(0).integers(0, V, T).astype(np.int32)
        mask, one = np.ones(T, np.float32), np.ones(1, np.float32)
        loss, lse, dx = np.empty(1, np.float32), _zeros(T, 2), aligned(x)
        z = {"z_loss": 0.0}
        forward, backward = Kernel("CrossEntropy", z), Kernel("CrossEntropyGrad", z)

        def ours() -> None:
            forward([x, label, mask], [loss, lse])  # noqa: B023
            backward([x, label, mask, lse, one], [dx])  # noqa: B023

        case = Measurement("cross-entropy", "cross-entropy f+b", f"{T}x{V}", threads)
        peers: dict[str, Any] = {"ours": ours}
        ours()
        torch = _torch(threads)
        if torch is not None:
            leaf = torch.from_numpy(x).requires_grad_()
            target = torch.from_numpy(label.astype(np.int64))

            def theirs(leaf: Any = leaf, target: Any = target, torch: Any = torch) -> Any:
                leaf.grad = None
                value = torch.nn.functional.cross_entropy(leaf, target)
                value.backward()
                return value.detach()

            check_same(case, "torch", loss, theirs().reshape(1), 1e-5)
            check_same(case, "torch", dx, leaf.grad, 1e-4)
            peers["torch"] = theirs
        in_turns(case, peers, 0.5 if quick else 2.0)
        yield case


def adamw(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure AdamW on 100 tensors with 19 million parameters, and compare what the first update changes."""
    tell("AdamW")
    n, size = 100, 20_000 if quick else 190_000
    start, gradients = ([_normal(size, scale=0.1) for _ in range(n)] for _ in "12")
    moments = [[_zeros(size) for _ in range(n)] for _ in "12"]
    params = [aligned(x) for x in start]
    scalars = [np.array(x, np.float32) for x in (1e-4, 1e-8, 0.1, 1.0)]
    token = np.empty(1, np.float32)
    kernel = Kernel(
        "AdamW", {"beta1": 0.9, "beta2": 0.95, "new1": 0.1, "new2": 0.05, "decayed": [1] * n}
    )
    flat = [*params, *moments[0], *moments[1], *gradients, *scalars]
    case = Measurement("adamw", "AdamW", f"{n} tensors, {n * size / 1e6:.0f}M", threads)
    # Without Python's part, a tenth of the time: our operator is bound, torch's is called without its Optimizer.
    peers: dict[str, Any] = {"ours": kernel.bind(flat, [token])}
    torch = _torch(threads)
    after: dict[str, Callable[[], np.ndarray]] = {}
    if torch is not None:
        peers["torch fused"], after["torch fused"] = _torch_adam(torch, start, gradients)
    with contextlib.suppress(ImportError):
        name = "mindspore AdamWeightDecay"
        peers[name], after[name] = _mindspore_adam(start, gradients)
    for call in peers.values():
        call()
    for name, value in after.items():  # an update is 5e-4 of a weight: float32 holds 4 digits of it
        check_same(case, name, params[0] - start[0], value() - start[0], 2e-3)
    if torch is not None:
        # Reads 14 bytes for each weight and writes as many: AdamW moves 28.
        to, source = torch.ones(2, n * size * 7 // 2)
        peers[COPY] = lambda: to.copy_(source)
        check_same(case, COPY, to.numpy(), source.numpy(), 0)
    in_turns(case, peers, 0.5 if quick else 2.0)
    yield case


def _torch_adam(
    torch: Any, start: list[np.ndarray], gradients: list[np.ndarray]
) -> tuple[Any, Any]:
    params, grads = ([torch.from_numpy(x.copy()) for x in values] for values in (start, gradients))
    first, second = ([torch.zeros_like(p) for p in params] for _ in "12")
    # So late, nothing is corrected for the moments' start, as in our scalars and MindSpore's.
    steps = [torch.tensor(1e6) for _ in params]
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}

    def step() -> None:
        torch._fused_adamw_(params, grads, first, second, [], steps, **options)

    return step, lambda: params[0].numpy()


def _mindspore_adam(start: list[np.ndarray], gradients: list[np.ndarray]) -> tuple[Any, Any]:
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    params = [ms.Parameter(ms.Tensor(x.copy()), name=f"p{i}") for i, x in enumerate(start)]
    optimizer = ms.nn.AdamWeightDecay(params, 1e-4, 0.9, 0.95, 1e-8, 0.1)
    inputs = tuple(ms.Tensor(g) for g in gradients)
    return lambda: (optimizer(inputs), params[0].asnumpy()), params[0].asnumpy

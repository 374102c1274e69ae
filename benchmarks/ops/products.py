"""Matrix products as the operators compute them, beside oneDNN alone, our own, OpenBLAS, MKL, and the processor's rate."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ops.timing import (
    Call,
    Measurement,
    Tell,
    aligned,
    check_same,
    in_turns,
    microseconds,
)
from telechat_moe.errors import CheckFailedError
from telechat_moe.ops import native

SERIES = 32 << 20
"""Bytes of the matrices that a timed call goes through, one product after the other: more than L2 holds."""
OURS, ONEDNN, OWN, OPENBLAS, MKL = "ours", "oneDNN", "own packing", "OpenBLAS", "MKL"
# Whether A and B are stored transposed, m, n, k: 1024 cubed, and tasks of the 19M step and of small groups of rows.
SHAPES = [
    *((ta, tb, 1024, 1024, 1024) for ta, tb in ((False, False), (False, True), (True, False))),
    (False, True, 256, 1024, 256), (False, False, 256, 256, 1024), (True, False, 128, 256, 2048),
    (False, False, 256, 1024, 256), (True, False, 128, 1024, 2048), (False, False, 256, 512, 256),
    (False, False, 256, 160, 256), (False, True, 256, 256, 160), (True, False, 256, 160, 512),
    (False, True, 128, 512, 48), (False, False, 128, 32, 512), (True, False, 512, 48, 128),
    (False, False, 32, 512, 1024), (False, True, 32, 1024, 512), (True, False, 256, 512, 32),
]  # fmt: skip


def register_rate(threads: int) -> float:
    """Return the GFLOP/s of fp32 multiply-adds in registers, of all threads."""
    native.set_threads(threads)
    run = native.load().telechat_multiply_adds
    run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_int64]
    rounds = 1_000_000
    return run(rounds) / min(microseconds({"": lambda: run(rounds)}, 0.2)[""]) / 1e3


def cases(threads: int, quick: bool, tell: Tell) -> Iterator[Measurement]:
    """Measure products on one thread, as a task of an operator computes them."""
    if threads > 1:  # a task has one thread
        return
    rate = register_rate(1)
    for ta, tb, m, n, k in SHAPES[:1] if quick else SHAPES:
        name = f"{'NT'[ta]}{'NT'[tb]} {m}x{n}x{k}"
        tell(f"product {name}")
        case = Measurement("products", "matmul", name, 1)
        product = _Product(ta, tb, m, n, k)
        peers = product.peers()
        for peer, call in peers.items():
            product.check(case, peer, call)
        in_turns(case, peers, 0.1 if quick else 0.5)
        flops = 2.0 * m * n * k * product.count / 1e3
        case.extra = {f"share of the register rate, {p}": flops / t / rate for p, t in case.best.items()}  # fmt: skip
        yield case
    native.load().telechat_use_gemm(b"")


class _Product:
    """A series of products of one shape, and each peer's way to compute them."""

    def __init__(self, ta: bool, tb: bool, m: int, n: int, k: int) -> None:
        self.how, self.count = (ta, tb, m, n, k), max(1, SERIES // (4 * (m * k + n * k + m * n)))
        rng = np.random.default_rng(0)
        shapes = ((k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n))
        self.a, self.b, self.c = (
            aligned(rng.standard_normal((self.count, *s), np.float32)) for s in shapes
        )
        self.left = self.a.transpose(0, 2, 1) if ta else self.a
        self.right = self.b.transpose(0, 2, 1) if tb else self.b

    def arguments(self) -> list[list[Any]]:
        """Return the C arguments of each product after the two that say what is transposed."""
        m, n, k = map(ctypes.c_int64, self.how[2:])
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        lda, ldb, ldc = (ctypes.c_int64(x.shape[2]) for x in (self.a, self.b, self.c))
        found: list[list[Any]] = []
        for matrices in zip(self.a, self.b, self.c, strict=True):
            a, b, c = (ctypes.c_void_p(x.ctypes.data) for x in matrices)
            found.append([m, n, k, one, a, lda, b, ldb, zero, c, ldc])
        return found

    def native(self, backend: str) -> Call:
        """Return a call of the native library's products with one of its two backends."""
        use, gemm = native.load().telechat_use_gemm, native.load().telechat_gemm
        ta, tb = self.how[:2]
        products = self.arguments()

        def call() -> None:
            use(backend.encode())
            for arguments in products:
                if gemm(ta, tb, *arguments):
                    raise CheckFailedError(native.last_error())

        return call

    def onednn(self, library: Path) -> Call:
        """Return a call of the oneDNN library that the operators call, without them."""
        sgemm = ctypes.CDLL(str(library)).dnnl_threadpool_interop_sgemm
        ways = [ctypes.c_char(b"NT"[t : t + 1]) for t in self.how[:2]]
        products = self.arguments()

        def call() -> None:
            for arguments in products:
                sgemm(*ways, *arguments, None)

        return call

    def peers(self) -> dict[str, Call]:
        """Return what is compared, MKL only if torch is installed."""

        def openblas() -> None:
            for a, b, c in zip(self.left, self.right, self.c, strict=True):
                np.matmul(a, b, out=c)

        found: dict[str, Call] = {OURS: self.native("onednn"), OWN: self.native("own")}
        found[OPENBLAS] = openblas
        if library := native.onednn_path():
            found[ONEDNN] = self.onednn(library)
        try:
            import torch
        except ImportError:
            return found
        torch.set_num_threads(1)
        triples = [
            tuple(map(torch.from_numpy, x)) for x in zip(self.left, self.right, self.c, strict=True)
        ]

        def mkl() -> None:
            for a, b, c in triples:
                torch.mm(a, b, out=c)

        return found | {MKL: mkl}

    def check(self, case: Measurement, peer: str, call: Any) -> None:
        """Compare the last product of a peer with float64."""
        self.c.fill(np.nan)
        call()
        exact = self.left[-1].astype(np.float64) @ self.right[-1]
        check_same(case, peer, exact, self.c[-1], 1e-5)

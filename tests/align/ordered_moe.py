"""A two-layer MoE trained in NumPy, float32, in any layout, with all sums over ranks in a fixed order (``bitwise.py``).

Ranks are simulated: each holds only its piece of tokens (data, context and micro-batch), heads, hidden units, classes
(TP), experts (EP), layers (stages) and optimizer state (ZeRO). Moves between ranks are copies; sums go through the tree.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from telechat_moe.tools.align.bitwise import nodes, ordered_product, ordered_sum, total

F = np.float32
BATCH, LENGTH, HIDDEN, HEADS, EXPERTS, TOP, WIDTH, CLASSES, LAYERS = 4, 8, 16, 4, 8, 2, 8, 32, 2
TOKENS, HEAD = BATCH * LENGTH, HIDDEN // HEADS


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    micro: int = 1
    zero: int = 1
    zigzag: bool = False

    @property
    def ranks(self):
        return self.dp * self.cp * self.tp

    def rows(self):
        """Return the global numbers of the tokens of each (data, micro-batch, context) piece."""
        grid = np.arange(TOKENS).reshape(BATCH, LENGTH)
        pieces = []
        for b, c in product(range(self.dp * self.micro), range(self.cp)):
            lines = np.array_split(np.arange(BATCH), self.dp * self.micro)[b]
            columns = np.array_split(np.arange(LENGTH), self.cp)[c]
            if self.zigzag:
                parts = np.array_split(np.arange(LENGTH), 2 * self.cp)
                columns = np.concatenate([parts[c], parts[-1 - c]])
            pieces.append(grid[np.ix_(lines, columns)].reshape(-1))
        return pieces

    def cut(self, n):
        """Return the pieces of a dimension that tensor parallelism cuts."""
        return np.array_split(np.arange(n), self.tp)


LAYOUTS = [
    Layout(*sizes, zigzag=z)
    for sizes, z in [
        ((1, 1, 1), 0), ((2, 1, 1), 0), ((4, 1, 1), 0), ((1, 2, 1), 0), ((1, 4, 1), 0), ((1, 2, 1), 1), ((1, 4, 1), 1),
        ((1, 1, 2), 0), ((1, 1, 4), 0), ((2, 2, 1), 0), ((2, 1, 2), 0), ((2, 1, 2, 2), 0), ((2, 2, 2, 4), 1),
        ((4, 1, 2, 8), 0), ((4, 1, 4, 4), 0), ((2, 2, 4, 8), 0), ((1, 1, 1, 1, 2), 0), ((1, 1, 1, 1, 4), 0),
        ((2, 1, 1, 1, 2), 0), ((1, 2, 2, 2, 4), 0), ((2, 1, 2, 2, 2, 2), 0), ((4, 1, 1, 4, 1, 4), 0),
        ((1, 1, 3), 0), ((3, 1, 1), 0), ((3, 3, 1, 3), 0), ((2, 2, 2, 2, 2, 8), 1),
    ]
]  # fmt: skip


def name(layout):
    """Return a short name: dp2-cp2-tp4-ep8-micro1-zero1."""
    sizes = "-".join(f"{n}{getattr(layout, n)}" for n in ("dp", "cp", "tp", "ep", "micro", "zero"))
    return sizes + ("-zigzag" if layout.zigzag else "")


def initial(seed=0):
    rng = np.random.default_rng(seed)

    def w(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(F)

    weights = {"table": w(CLASSES, HIDDEN), "norm": np.ones(HIDDEN, F), "head": w(HIDDEN, CLASSES)}
    for i in range(LAYERS):
        weights |= {f"{i}.norm1": np.ones(HIDDEN, F), f"{i}.norm2": np.ones(HIDDEN, F)}
        weights |= {f"{i}.{n}": w(HIDDEN, HIDDEN) for n in ("q", "k", "v", "o")}
        weights[f"{i}.router"] = w(HIDDEN, EXPERTS)
        for e in range(EXPERTS):
            weights |= {f"{i}.up{e}": w(HIDDEN, WIDTH), f"{i}.down{e}": w(WIDTH, HIDDEN)}
    return weights


def along(x):
    """Sum the last dimension, which one rank holds, in the tree."""
    return ordered_sum([(np.moveaxis(x, -1, 0), np.arange(x.shape[-1]))], x.shape[-1])


def heads(x):
    """Return columns as heads and their columns."""
    return x.reshape(*x.shape[:-1], -1, HEAD)


class Model:
    """One step: pieces of rows go in, gradients by name come out; ``pinned``: experts of each token, by layer."""

    def __init__(self, weights, layout, pinned=None):
        self.pinned, self.chosen = pinned, {}
        self.w, self.layout, self.rows = weights, layout, layout.rows()
        self.grads = {}
        self.terms = {}

    # products: columns (inner dimension whole) and rows (inner dimension cut) over tensor-parallel ranks

    def linear(self, x, w):
        parts = [
            ordered_product([(x, w[:, c], np.arange(len(w)))], len(w))
            for c in self.layout.cut(w.shape[1])
        ]
        return np.concatenate(parts, 1)

    def linear_cut(self, x, w):
        return ordered_product([(x[:, c], w[c], c) for c in self.layout.cut(len(w))], len(w))

    def weight_grad(self, name, x, dy, rows, count=TOKENS):
        """Keep what a piece of rows gives to a weight's gradient; :meth:`reduce` adds all pieces up."""
        self.terms.setdefault(name, (count, []))[1].append(
            nodes(x[:, :, None] * dy[:, None, :], rows, count)
        )

    def vector_grad(self, name, terms, rows):
        self.terms.setdefault(name, (TOKENS, []))[1].append(nodes(terms, rows, TOKENS))

    def reduce(self):
        return {name: total(parts, count) for name, (count, parts) in self.terms.items()}

    def norm(self, x, weight):
        inverse = 1 / np.sqrt(along(x * x) / F(HIDDEN) + F(1e-5))
        y = x * inverse[:, None]
        return y * weight, (x, y, inverse, weight)

    def norm_back(self, name, saved, dy, rows):
        _, y, inverse, weight = saved
        self.vector_grad(name, dy * y, rows)
        d = dy * weight
        return inverse[:, None] * (d - y * (along(d * y) / F(HIDDEN))[:, None])

    def gather(self, pieces):
        """All-gather: rows of all pieces in the order of the whole batch."""
        whole = np.empty((TOKENS, *pieces[0].shape[1:]), pieces[0].dtype)
        for rows, piece in zip(self.rows, pieces, strict=True):
            whole[rows] = piece
        return whole

    def attention(self, i, xs):
        q, k, v = ([self.linear(x, self.w[f"{i}.{n}"]) for x in xs] for n in "qkv")
        keys, values = self.gather(k), self.gather(v)
        outs, saved = [], []
        for rows, queries in zip(self.rows, q, strict=True):
            out, probabilities = np.empty_like(queries), {}
            for rank, own in enumerate(self.heads()):
                for j, row in enumerate(rows):
                    seen = slice(row // LENGTH * LENGTH, row + 1)
                    score = along(heads(queries[j, own]) * heads(keys[seen, own])) * F(HEAD**-0.5)
                    e = np.exp(score - score.max(0))
                    p = e / along(e.T)
                    out[j, own] = along(
                        np.moveaxis(p[:, :, None] * heads(values[seen, own]), 0, -1)
                    ).reshape(-1)
                    probabilities[rank, j] = p
            outs.append(out)
            saved.append(probabilities)
        return outs, (q, keys, values, saved, outs)

    def heads(self):
        """Return the columns of the heads of each tensor-parallel rank."""
        columns = np.arange(HIDDEN).reshape(HEADS, HEAD)
        return [columns[h].reshape(-1) for h in self.layout.cut(HEADS)]

    def attention_back(self, i, xs, state, douts):
        q, keys, values, saved, outs = state
        dq = [np.zeros_like(x) for x in q]
        sent = {}
        for piece, rows in enumerate(self.rows):
            for (rank, j), p in saved[piece].items():
                own, row = self.heads()[rank], rows[j]
                seen = np.arange(row // LENGTH * LENGTH, row + 1)
                do, k, v = (
                    heads(douts[piece][j, own]),
                    heads(keys[seen][:, own]),
                    heads(values[seen][:, own]),
                )
                ds = along(do * v) - along(do * heads(outs[piece][j, own]))
                ds = p * ds * F(HEAD**-0.5)
                dq[piece][j, own] = along(np.moveaxis(ds[:, :, None] * k, 0, -1)).reshape(-1)
                both = ds[:, :, None] * heads(q[piece][j, own]), p[:, :, None] * do
                for at, key in enumerate(seen):
                    terms = np.stack([both[0][at], both[1][at]])
                    sent.setdefault((rank, key), []).append((row - key, terms))
        whole = np.zeros((2, TOKENS, HIDDEN), F)
        for (
            (rank, key),
            entries,
        ) in sent.items():  # a key gets its gradient from the queries behind it, in their order
            pieces = [(np.stack([t for _, t in entries]), [n for n, _ in entries])]
            whole[:, key, self.heads()[rank]] = ordered_sum(pieces, LENGTH - key % LENGTH).reshape(
                2, -1
            )
        dxs = []
        for piece, rows in enumerate(self.rows):
            dx = None
            for n, d in (("q", dq[piece]), ("k", whole[0][rows]), ("v", whole[1][rows])):
                self.weight_grad(f"{i}.{n}", xs[piece], d, rows)
                part = self.linear_cut(d, self.w[f"{i}.{n}"].T)
                dx = part if dx is None else dx + part
            dxs.append(dx)
        return dxs

    def experts(self, i, xs):
        """Router, all-to-all to the owners of the experts, experts, and back."""
        states = []
        for rows, x in zip(self.rows, xs, strict=True):
            score = 1 / (1 + np.exp(-self.linear(x, self.w[f"{i}.router"])))
            chosen = np.argsort(-score, 1, kind="stable")[:, :TOP]
            chosen = chosen if self.pinned is None else self.pinned[i][rows]
            picked = np.take_along_axis(score, chosen, 1)
            states.append((score, chosen, picked / along(picked)[:, None]))
        x, chosen = self.gather(xs), self.gather([s[1] for s in states])
        self.chosen[i] = chosen
        made = np.zeros((TOKENS, TOP, HIDDEN), F)
        kept = {}
        for owner in np.array_split(np.arange(EXPERTS), self.layout.ep):
            for e in owner:
                token, slot = np.nonzero(chosen == e)
                up = self.linear(x[token], self.w[f"{i}.up{e}"])
                gate = 1 / (1 + np.exp(-up))
                made[token, slot] = self.linear_cut(up * gate, self.w[f"{i}.down{e}"])
                kept[e] = token, slot, up, gate
        ys = []
        for rows, (_, _, share) in zip(self.rows, states, strict=True):
            pair = made[rows] * share[:, :, None]
            ys.append(pair[:, 0] + pair[:, 1])
        return ys, (x, states, made, kept)

    def experts_back(self, i, xs, state, dys):
        x, states, made, kept = state
        dmade = self.gather(
            [dy[:, None] * s[2][:, :, None] for dy, s in zip(dys, states, strict=True)]
        )
        dx = np.zeros((TOKENS, TOP, HIDDEN), F)
        for e, (token, slot, up, gate) in kept.items():
            if not len(token):
                for n in ("up", "down"):
                    self.terms[f"{i}.{n}{e}"] = (
                        1,
                        [nodes(np.zeros((1, *self.w[f"{i}.{n}{e}"].shape), F), [0], 1)],
                    )
                continue
            place = np.arange(len(token))
            dh = self.linear(dmade[token, slot], self.w[f"{i}.down{e}"].T)
            self.weight_grad(f"{i}.down{e}", up * gate, dmade[token, slot], place, len(token))
            dup = dh * (gate + up * gate * (1 - gate))
            self.weight_grad(f"{i}.up{e}", x[token], dup, place, len(token))
            dx[token, slot] = self.linear_cut(dup, self.w[f"{i}.up{e}"].T)
        dxs = []
        for rows, own, dy, (score, chosen, share) in zip(self.rows, xs, dys, states, strict=True):
            dshare = along(dy[:, None] * made[rows])
            picked = np.take_along_axis(score, chosen, 1)
            dpicked = (dshare - along(dshare * share)[:, None]) / along(picked)[:, None]
            dscore = np.zeros_like(score)
            np.put_along_axis(dscore, chosen, dpicked, 1)
            dlogit = dscore * score * (1 - score)
            self.weight_grad(f"{i}.router", own, dlogit, rows)
            dxs.append(dx[rows, 0] + dx[rows, 1] + self.linear_cut(dlogit, self.w[f"{i}.router"].T))
        return dxs

    def step(self, ids, labels):
        """Return the loss; gradients are in :attr:`grads`."""
        xs = [self.w["table"][ids[rows]] for rows in self.rows]
        saved = []
        for i in range(LAYERS):
            n1 = [self.norm(x, self.w[f"{i}.norm1"]) for x in xs]
            mixed, state = self.attention(i, [y for y, _ in n1])
            xs = [x + self.linear_cut(m, self.w[f"{i}.o"]) for x, m in zip(xs, mixed, strict=True)]
            n2 = [self.norm(x, self.w[f"{i}.norm2"]) for x in xs]
            ys, moe = self.experts(i, [y for y, _ in n2])
            xs = [x + y for x, y in zip(xs, ys, strict=True)]
            saved.append((n1, mixed, state, n2, moe))
        last = [self.norm(x, self.w["norm"]) for x in xs]
        losses, dxs = [], []
        for rows, (y, keep) in zip(self.rows, last, strict=True):
            logit = self.linear(y, self.w["head"])
            e = np.exp(logit - logit.max(1, keepdims=True))
            pieces = [(e[:, c].T, c) for c in self.layout.cut(CLASSES)]
            p = e / ordered_sum(pieces, CLASSES)[:, None]
            own = np.arange(len(rows)), labels[rows]
            losses.append((-np.log(p[own]), rows))
            d = p.copy()
            d[own] -= F(1)
            d = d / F(TOKENS)
            self.weight_grad("head", y, d, rows)
            dxs.append(self.norm_back("norm", keep, self.linear_cut(d, self.w["head"].T), rows))
        for i in reversed(range(LAYERS)):
            dxs = self.back(i, saved[i], dxs)
        for rows, d in zip(self.rows, dxs, strict=True):
            hot = (ids[rows][:, None] == np.arange(CLASSES)).astype(F)
            self.weight_grad("table", hot, d, rows)
        self.grads = self.reduce()
        return ordered_sum(losses, TOKENS) / F(TOKENS)

    def back(self, i, saved, dxs):
        n1, mixed, state, n2, moe = saved
        d = self.experts_back(i, [y for y, _ in n2], moe, dxs)
        dxs = [
            a + self.norm_back(f"{i}.norm2", keep, b, rows)
            for a, b, (_, keep), rows in zip(dxs, d, n2, self.rows, strict=True)
        ]
        douts = []
        for rows, m, dx in zip(self.rows, mixed, dxs, strict=True):
            self.weight_grad(f"{i}.o", m, dx, rows)
            douts.append(self.linear(dx, self.w[f"{i}.o"].T))
        d = self.attention_back(i, [y for y, _ in n1], state, douts)
        return [
            a + self.norm_back(f"{i}.norm1", keep, b, rows)
            for a, b, (_, keep), rows in zip(dxs, d, n1, self.rows, strict=True)
        ]


def train(layout, steps, seed=0, disturb=None):
    """Yield loss, gradients and weights of each step; ``disturb(step, gradients)`` may spoil gradients."""
    weights = initial(seed)
    moments = {n: (np.zeros_like(w), np.zeros_like(w)) for n, w in weights.items()}
    rng = np.random.default_rng(seed + 1)
    for step in range(steps):
        ids = rng.integers(0, CLASSES, TOKENS + 1)
        model = Model(weights, layout)
        loss = model.step(ids[:-1], ids[1:])
        grads = {n: model.grads[n] for n in weights}
        if disturb is not None:
            disturb(step, grads)
        squares = [along((g * g).reshape(1, -1))[0] for g in grads.values()]
        norm = np.sqrt(ordered_sum([(np.array(squares, F), np.arange(len(squares)))], len(squares)))
        scale = min(F(1), F(1) / norm)
        weights = {
            n: update(w, grads[n] * scale, moments[n], step, layout.zero)
            for n, w in weights.items()
        }
        yield {
            "loss": np.asarray(loss), "norm": np.asarray(norm),
            **{f"gradient {n}": g for n, g in grads.items()}, **{f"weight {n}": w for n, w in weights.items()},
        }  # fmt: skip


def update(w, g, moments, step, zero):
    """AdamW; with ZeRO each rank updates a slice of the flattened weight."""
    flat, new = w.reshape(-1), np.empty(w.size, F)
    for own in np.array_split(np.arange(w.size), zero):
        m, v = (x.reshape(-1) for x in moments)
        grad = np.ascontiguousarray(g.reshape(-1)[own])
        m[own] = m[own] * F(0.9) + grad * F(0.1)
        v[own] = v[own] * F(0.95) + grad * grad * F(0.05)
        root = np.sqrt(v[own] / F(1 - 0.95 ** (step + 1))) + F(1e-8)
        new[own] = flat[own] * F(1 - 1e-3) - F(1e-2) * (m[own] / F(1 - 0.9 ** (step + 1))) / root
    return new.reshape(w.shape)

"""Rows of tokens that a dispatch has permuted, brought back to the order (token, slot).

Dropped pairs have no row; filler rows have no token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Array


class Rows(NamedTuple):
    """Permuted rows of one rank.

    Attributes:
        rank: The rank.
        values: Rows, [R, ...].
        token: Global number of each row's token, [R]; -1: filler.
        slot: Which of the token's choices the row is for, [R].
    """

    rank: int
    values: Array
    token: Array
    slot: Array


class Canonical(NamedTuple):
    """Rows in the order of tokens.

    Attributes:
        values: [T, K, ...]; zero where there is no row.
        present: [T, K]: there is a row; the others were dropped.
        filler: Number of filler rows that were left out.
    """

    values: Array
    present: Array
    filler: int


def rows_of(rank: int, values: Array, permutation: Array, slots: int, first: int = 0) -> Rows:
    """Return rows whose permutation says which pair ``token * slots + slot`` each row is; negative: filler.

    Args:
        rank: The rank.
        values: [R, ...].
        permutation: [R].
        slots: Choices of a token, K.
        first: Global number of this rank's token 0.
    """
    if slots < 1:
        raise LayoutError(f"rank {rank}: {slots} choices a token, expected 1 or more")
    numbers = _numbers(rank, permutation)
    filler = numbers < 0
    return Rows(rank, values, np.where(filler, -1, numbers // slots + first), numbers % slots)


def rows_at(rank: int, values: Array, positions: Array, first: int = 0) -> Rows:
    """Return rows whose ``positions[token, slot]`` says where a pair stands; negative: dropped.

    Args:
        rank: The rank.
        values: [R, ...].
        positions: [T, K].
        first: Global number of this rank's token 0.

    Raises:
        LayoutError: Two pairs stand in one row, or a position is none of the rows.
    """
    numbers = _numbers(rank, positions)
    if numbers.ndim != 2:
        raise LayoutError(
            f"rank {rank}: positions {list(numbers.shape)}, expected [tokens, choices]"
        )
    kept = np.argwhere(numbers >= 0)
    at = numbers[numbers >= 0]
    if at.size and at.max() >= len(values):
        raise LayoutError(
            f"rank {rank}: a pair stands in row {int(at.max())}, there are {len(values)}"
        )
    used, counts = np.unique(at, return_counts=True)
    if (counts > 1).any():
        row = int(used[counts > 1][0])
        pairs = kept[at == row][:2].tolist()
        raise LayoutError(
            f"rank {rank}: the pairs {pairs[0]} and {pairs[1]} stand both in row {row}"
        )
    token = np.full(len(values), -1, np.int64)
    slot = np.zeros(len(values), np.int64)
    token[at], slot[at] = kept[:, 0] + first, kept[:, 1]
    return Rows(rank, values, token, slot)


def canonical(
    pieces: Sequence[Rows], tokens: int, slots: int, *, dropped: bool = True, copies: bool = False
) -> Canonical:
    """Return the rows of all ranks in the order (token, slot).

    Args:
        pieces: Rows of each rank that holds any.
        tokens: Number of tokens, T.
        slots: Choices of a token, K.
        dropped: Pairs may be missing (capacity); else a missing pair is refused.
        copies: Ranks may hold copies of a row, equal to the last bit.

    Raises:
        LayoutError: A pair is there twice, a row's token or slot does not exist, rows differ in shape or type.
    """
    if not pieces:
        raise LayoutError("there are no rows")
    model = pieces[0].values
    values = np.zeros((tokens, slots, *model.shape[1:]), model.dtype)
    owner = np.full((tokens, slots), -1, np.int64)
    filler = 0
    seen: set[int] = set()
    for piece in pieces:
        if piece.rank in seen:
            raise LayoutError(f"rank {piece.rank} gives rows twice")
        seen.add(piece.rank)
        _check(piece, model, tokens, slots)
        real = np.asarray(piece.token) >= 0
        filler += int((~real).sum())
        token, slot, rows = piece.token[real], piece.slot[real], piece.values[real]
        _refuse_twice(piece.rank, token, slot, slots)
        held = owner[token, slot] >= 0
        if held.any():
            _compare(piece.rank, rows[held], values, owner, token[held], slot[held], copies)
        values[token[~held], slot[~held]] = rows[~held]
        owner[token[~held], slot[~held]] = piece.rank
    present = owner >= 0
    if not dropped and not present.all():
        t, k = np.argwhere(~present)[0]
        raise LayoutError(f"token {t} slot {k} has no row, and nothing was dropped")
    return Canonical(values, present, filler)


def _check(piece: Rows, model: Array, tokens: int, slots: int) -> None:
    rows = len(piece.values)
    if piece.values.shape[1:] != model.shape[1:] or piece.values.dtype != model.dtype:
        raise LayoutError(
            f"rank {piece.rank} holds rows {list(piece.values.shape[1:])} {piece.values.dtype}, others "
            f"{list(model.shape[1:])} {model.dtype}"
        )
    if np.shape(piece.token) != (rows,) or np.shape(piece.slot) != (rows,):
        raise LayoutError(
            f"rank {piece.rank} holds {rows} rows, {np.size(piece.token)} tokens and {np.size(piece.slot)} slots"
        )
    real = np.asarray(piece.token) >= 0
    for what, numbers, limit in (("token", piece.token, tokens), ("slot", piece.slot, slots)):
        wrong = real & ((numbers < 0) | (numbers >= limit))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise LayoutError(
                f"rank {piece.rank} row {row}: {what} {int(numbers[row])}, there are {limit}"
            )


def _refuse_twice(rank: int, token: Array, slot: Array, slots: int) -> None:
    pairs, counts = np.unique(token * slots + slot, return_counts=True)
    if (counts > 1).any():
        t, k = divmod(int(pairs[counts > 1][0]), slots)
        raise LayoutError(f"rank {rank} has {int(counts.max())} rows of token {t} slot {k}")


def _compare(
    rank: int, rows: Array, values: Array, owner: Array, token: Array, slot: Array, copies: bool
) -> None:
    t, k = int(token[0]), int(slot[0])
    if not copies:
        raise LayoutError(f"ranks {int(owner[t, k])} and {rank} both hold token {t} slot {k}")
    for row, t, k in zip(rows, token, slot, strict=True):
        if row.tobytes() != values[t, k].tobytes():
            raise LayoutError(
                f"ranks {int(owner[t, k])} and {rank} hold different rows of token {t} slot {k}"
            )


def _numbers(rank: int, x: Any) -> Array:
    found = np.asarray(x)
    if found.dtype.kind not in "iu":
        raise LayoutError(f"rank {rank}: a permutation of type {found.dtype}, expected integers")
    return found.astype(np.int64)

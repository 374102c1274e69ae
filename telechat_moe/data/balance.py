"""Deal the samples of a global batch so that no data-parallel rank waits for another one's attention.

Where attention stays within documents, packed samples of one length cost unequally: a token sees only the tokens before it
in its own document. The samples of a global batch stay the same, and so do their gradients' sum; which rank and which
micro-batch takes them is free.

Sources: the TeleChat3-MoE infrastructure report (samples are assigned anew by their documents' lengths); WLB-LLM (Wang et
al. 2025), section 3.1 (who waits for whom). Longest-processing-time rounds: Graham 1969.

Shapes: N samples of a global batch, S tokens of each, R ranks, M micro-batches, n = N / (R M).
"""

import numpy as np

LEVEL = 1.002
"""Bins are level, and exchanges end, when the fullest holds at most this many times the mean."""
_EXCHANGES = 4
"""Exchanges tried for each bin."""


def visible_pairs(input_ids_NS: np.ndarray, eod: int) -> np.ndarray:
    """Return how many (query, key) pairs the causal mask within documents leaves of each sample.

    Args:
        input_ids_NS: Token ids; the token ``eod`` ends a document and belongs to it.

    Returns:
        int64 ``[N]``: the sum of ``l (l + 1) / 2`` over the lengths of a sample's documents.
    """
    size = input_ids_NS.shape[1]
    sample, place = np.nonzero(input_ids_NS[:, :-1] == eod)
    starts = np.concatenate((np.arange(len(input_ids_NS)) * size, sample * size + place + 1))
    starts.sort()
    length = np.diff(starts, append=input_ids_NS.size)
    return np.bincount(starts // size, length * (length + 1) // 2, len(input_ids_NS)).astype(
        np.int64
    )


def deal(cost_N: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
    """Deal samples to ranks and micro-batches: equal counts, level costs; a pure function of its arguments.

    First the ranks' sums are made level, then the micro-batches of each rank; the k-th heaviest micro-batches of all
    ranks run at the same time. In that order they grow to the middle of the step and shrink to its end, for a pipeline
    fills and drains with the first and the last ones.

    Args:
        cost_N: What each sample costs, in any unit, not negative.

    Returns:
        int64 ``[M, R, n]``: which samples.

    Raises:
        ValueError: ``N`` is not divisible by ``ranks * micro_batches``.
    """
    count, places = len(cost_N), ranks * micro_batches
    if count % places:
        raise ValueError(
            f"{count} samples cannot be dealt evenly to {ranks} ranks x {micro_batches} micro-batches"
        )
    cost = np.asarray(cost_N, np.float64)
    dealt = np.empty((micro_batches, ranks, count // places), np.int64)
    order = _rising_then_falling(micro_batches)
    for rank, samples in enumerate(_level(cost, ranks)):
        parts = samples[_level(cost[samples], micro_batches)]
        heaviest = np.argsort(-cost[parts].sum(1), kind="stable")
        dealt[order, rank] = parts[heaviest]
    return dealt


def _rising_then_falling(count: int) -> np.ndarray:
    """Return where the k-th heaviest of ``count`` goes, so that the heaviest is in the middle."""
    lightest_first = np.arange(count)
    half = lightest_first // 2
    return np.where(lightest_first % 2, count - 1 - half, half)[::-1]


def _level(cost_N: np.ndarray, bins: int) -> np.ndarray:
    """Return samples ``[bins, N / bins]`` whose sums are level.

    The heaviest ``bins`` samples go one to each bin, and so on in rounds, in which the lightest bin takes the heaviest
    sample; then the fullest bin exchanges samples with others as long as that makes it lighter.
    """
    order = np.argsort(-cost_N, kind="stable")
    if bins == len(cost_N) or bins == 1:
        return order.reshape(bins, -1)
    cost: list[float] = cost_N[order].tolist()
    loads, filled = [0.0] * bins, list[list[int]]([] for _ in range(bins))
    for start in range(0, len(cost), bins):
        for sample, lightest in enumerate(sorted(range(bins), key=loads.__getitem__), start):
            filled[lightest].append(sample)
            loads[lightest] += cost[sample]
    chosen = np.array(filled)
    _exchange(cost_N[order], chosen, np.array(loads))
    return order[chosen]


def _exchange(cost_N: np.ndarray, chosen: np.ndarray, loads: np.ndarray) -> None:
    """Exchange samples of the fullest bin for lighter ones of other bins, in place, until that helps no more."""
    bins, mean = len(loads), loads.mean()
    for _ in range(_EXCHANGES * bins):
        full = int(loads.argmax())
        if loads[full] <= LEVEL * mean:
            return
        for other in np.argsort(loads, kind="stable")[: bins - 1].tolist():
            if _exchange_two(cost_N, chosen, loads, full, other):
                break
        else:
            return


def _exchange_two(
    cost_N: np.ndarray, chosen: np.ndarray, loads: np.ndarray, full: int, other: int
) -> bool:
    """Exchange the two samples that bring two bins closest to each other; False: none brings them closer."""
    gap = loads[full] - loads[other]
    full_cost, other_cost = cost_N[chosen[full]], cost_N[chosen[other]]
    by_cost = np.argsort(other_cost, kind="stable")
    after = np.searchsorted(other_cost[by_cost], full_cost - gap / 2).clip(0, len(other_cost) - 1)
    best, pair = gap, (0, 0)
    for candidate in (after, (after - 1).clip(0)):
        left = np.abs(gap - 2 * (full_cost - other_cost[by_cost[candidate]]))
        give = int(left.argmin())
        if left[give] < best:
            best, pair = left[give], (give, int(by_cost[candidate[give]]))
    if best >= gap * (1 - 1e-9):
        return False
    give, take = pair
    moved = full_cost[give] - other_cost[take]
    loads[full] -= moved
    loads[other] += moved
    chosen[full, give], chosen[other, take] = chosen[other, take], chosen[full, give]
    return True

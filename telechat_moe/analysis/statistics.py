"""What the routers of a model do: loads, entropy, margins, flips, specialisation, co-activation. NumPy only.

Shapes: L MoE layers, T tokens, K experts per token, E experts, U sequences, D domains, P permutations. ``index`` holds the
chosen experts of each token, all different.
"""

import math
from dataclasses import dataclass

import numpy as np

from telechat_moe.numerics import Array

ALPHA = 0.05
"""Level of significance."""


def overload(load: Array) -> Array:
    """Return the load of the busiest expert over the mean, along the last axis; NaN without load."""
    with np.errstate(invalid="ignore"):
        return np.asarray(load.max(-1) / load.mean(-1))


def margins(choice_TE: Array, index_TK: Array) -> Array:
    """Return by how much the last chosen expert was ahead of the first that was not, ``[T]`` float64.

    Args:
        choice_TE: What the router ranks experts by (score + bias); -inf where a group limit excludes one.
        index_TK: Chosen experts.

    Returns:
        NaN where no other expert could be chosen.
    """
    rest_TE = choice_TE.astype(np.float64)
    chosen_TK = np.take_along_axis(rest_TE, index_TK, 1)
    np.put_along_axis(rest_TE, index_TK, -np.inf, 1)
    with np.errstate(invalid="ignore"):
        margin_T = chosen_TK.min(1) - rest_TE.max(1)
    return np.where(np.isfinite(margin_T), margin_T, np.nan)


def chosen(index_TK: Array, experts: int) -> Array:
    """Return 1 where a token chose an expert, ``[T, E]`` float32."""
    chosen_TE = np.zeros((len(index_TK), experts), np.float32)
    np.put_along_axis(chosen_TE, index_TK, 1.0, 1)
    return chosen_TE


def chosen_counts(index_TK: Array, sequences: int, experts: int) -> Array:
    """Return how often the tokens of each sequence chose each expert, ``[U, E]``; sequences are equally long."""
    sequence = np.repeat(np.arange(sequences), index_TK.size // sequences)
    place = sequence * experts + index_TK.ravel()
    return np.bincount(place, minlength=sequences * experts).reshape(sequences, experts)


def flips(before_TK: Array, after_TK: Array) -> tuple[float, float]:
    """Return the share of tokens whose set of experts differs, and the share of choices that were replaced."""
    kept_T = (before_TK[:, :, None] == after_TK[:, None, :]).any(2).sum(1)
    K = before_TK.shape[1]
    return float(np.mean(kept_T < K)), float(1 - kept_T.mean() / K)


@dataclass(frozen=True)
class ExpertPairs:
    """How often two experts serve the same token.

    Attributes:
        share_EE: Share of the tokens that chose both, by expert (across layers: of this layer, of the next).
        chance_EE: That share if experts were chosen independently, with these loads.
        strength: Share of all pairs that would have to move to reach chance, 0 to 1 (total variation distance).
    """

    share_EE: Array  # noqa: N815
    chance_EE: Array  # noqa: N815
    strength: float

    def strongest(self, count: int, symmetric: bool) -> list[tuple[int, int, float, float]]:
        """Return the pairs that exceed chance by most tokens: experts, share, and share over chance."""
        excess_EE = self.share_EE - self.chance_EE
        if symmetric:
            excess_EE = np.where(np.triu(np.ones_like(excess_EE), 1) > 0, excess_EE, -np.inf)
        order = np.argsort(-excess_EE, axis=None, kind="stable")[:count]
        rows, columns = np.unravel_index(order, excess_EE.shape)
        pairs: list[tuple[int, int, float, float]] = []
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            if excess_EE[i, j] > 0:
                share, chance = float(self.share_EE[i, j]), float(self.chance_EE[i, j])
                pairs.append((i, j, share, share / chance))
        return pairs


def _pairs(share_EE: Array, chance_EE: Array) -> ExpertPairs:
    total = share_EE.sum()
    apart = np.abs(share_EE - chance_EE).sum() / (2 * total) if total else math.nan
    return ExpertPairs(share_EE, chance_EE, float(apart))


def coactivation(index_TK: Array, experts: int) -> ExpertPairs:
    """Return which experts of a layer serve the same tokens; needs K > 1.

    Chance is a pair's product of loads, scaled so that all pairs together are as many as there are.
    """
    chosen_TE = chosen(index_TK, experts)
    share_EE = (chosen_TE.T @ chosen_TE).astype(np.float64) / len(index_TK)
    load_E = np.diag(share_EE).copy()
    chance_EE = np.outer(load_E, load_E)
    np.fill_diagonal(share_EE, 0.0)
    np.fill_diagonal(chance_EE, 0.0)
    return _pairs(share_EE, chance_EE * (share_EE.sum() / max(chance_EE.sum(), 1e-300)))


def succession(index_TK: Array, next_TK: Array, experts: int) -> ExpertPairs:
    """Return which experts of a layer and of the next one serve the same tokens."""
    one_TE, two_TE = chosen(index_TK, experts), chosen(next_TK, experts)
    share_EE = (one_TE.T @ two_TE).astype(np.float64) / len(index_TK)
    chance_EE = np.outer(one_TE.mean(0, dtype=np.float64), two_TE.mean(0, dtype=np.float64))
    return _pairs(share_EE, chance_EE)


@dataclass(frozen=True)
class Specialisation:
    """How much the domain of a text says about the experts that its tokens choose.

    Attributes:
        information_L: Mutual information of domain and expert, bits a choice.
        by_chance_L: Its mean over permutations: what so few sequences give without any specialisation.
        p_L: Share of the permutations (this arrangement included) with at least as much information.
        adjusted_p_L: The same for all layers together: the chance that any layer would stand out as far.
        ratio_LDE: Share of an expert in the choices of a domain, over its share in all choices.
        terms_LDE: See :func:`information_terms`.
    """

    information_L: Array  # noqa: N815
    by_chance_L: Array  # noqa: N815
    p_L: Array  # noqa: N815
    adjusted_p_L: Array  # noqa: N815
    ratio_LDE: Array  # noqa: N815
    terms_LDE: Array  # noqa: N815

    def strongest(self, layer: int) -> tuple[int, int, float]:
        """Return the domain and expert that say most about each other in a layer, and their ratio."""
        terms_DE = self.terms_LDE[layer]
        domain, expert = np.unravel_index(int(terms_DE.argmax()), terms_DE.shape)
        return int(domain), int(expert), float(self.ratio_LDE[layer, domain, expert])


def arrangements(domain_U: Array) -> float:
    """Return in how many ways the domains can be given to the sequences."""
    log = math.lgamma(len(domain_U) + 1)
    log -= sum(math.lgamma(count + 1) for count in np.unique(domain_U, return_counts=True)[1])
    return math.exp(min(log, 700.0))


def information_terms(counts_DLE: Array) -> Array:
    """Return what each domain and expert add to the mutual information of both in a layer, bits a choice."""
    p_DLE = counts_DLE / counts_DLE.sum((0, 2), keepdims=True, dtype=np.float64)
    independent_DLE = p_DLE.sum(0, keepdims=True) * p_DLE.sum(2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p_DLE > 0, p_DLE * np.log2(p_DLE / independent_DLE), 0.0)


def mutual_information(counts_DLE: Array) -> Array:
    """Return the mutual information of domain and expert in each layer, ``[L]`` bits."""
    return information_terms(counts_DLE).sum((0, 2))


def specialisation(
    counts_ULE: Array, domain_U: Array, permutations: int = 999, seed: int = 0
) -> Specialisation:
    """Test whether the experts of a layer serve domains differently, by permuting the domains of whole sequences.

    Tokens of a sequence choose alike whatever its domain is, so not tokens but sequences change their domain. All layers
    see the same permutations. The adjusted p is the share of permutations in which any layer exceeds its own mean by as many
    deviations as this one does (Westfall and Young).

    Args:
        counts_ULE: Choices of each expert by the tokens of each sequence.
        domain_U: Domain of each sequence, from 0 without gaps.
        permutations: ``P``.
    """
    domains = int(domain_U.max()) + 1
    one_hot_DU = (np.arange(domains)[:, None] == domain_U).astype(np.float32)
    flat_UX = counts_ULE.reshape(len(domain_U), -1).astype(np.float32)

    def by_domain(order_U: Array) -> Array:
        return (one_hot_DU[:, order_U] @ flat_UX).reshape(domains, *counts_ULE.shape[1:])

    counts_DLE = by_domain(np.arange(len(domain_U)))
    information_L = mutual_information(counts_DLE)
    generator = np.random.default_rng(seed)
    orders = (generator.permutation(len(domain_U)) for _ in range(permutations))
    by_chance_PL = np.stack([mutual_information(by_domain(order_U)) for order_U in orders])
    mean_L, spread_L = by_chance_PL.mean(0), by_chance_PL.std(0) + 1e-12
    tie = 1e-9  # rounding: arrangements that only rename sequences give the same information
    highest_P = ((by_chance_PL - mean_L) / spread_L).max(1)
    ahead_L = (information_L - mean_L) / spread_L
    share_DLE = counts_DLE / counts_DLE.sum(2, keepdims=True)
    overall_LE = counts_DLE.sum(0) / counts_DLE.sum((0, 2))[:, None]
    ratio_DLE = share_DLE / np.where(overall_LE > 0, overall_LE, np.nan)
    return Specialisation(
        information_L,
        mean_L,
        (1 + (by_chance_PL >= information_L - tie).sum(0)) / (1 + permutations),
        (1 + (highest_P[:, None] >= ahead_L - tie).sum(0)) / (1 + permutations),
        ratio_DLE.transpose(1, 0, 2),
        information_terms(counts_DLE).transpose(1, 0, 2),
    )


def favourites(
    token_T: Array, index_TK: Array, experts: int, count: int = 6, minimum: int = 8
) -> list[list[tuple[int, int, float]]]:
    """Return the tokens that each expert takes more often than its load explains.

    Args:
        count: Tokens to return for each expert.
        minimum: An expert must have got a token so many times.

    Returns:
        For each expert (token, times, ratio to what its load explains), sorted by the excess of times over that.
    """
    by_expert: list[list[tuple[int, int, float]]] = []
    times_V = np.bincount(token_T)
    for expert in range(experts):
        chosen_T = (index_TK == expert).any(1)
        count_V = np.bincount(token_T[chosen_T], minlength=len(times_V))
        expected_V = times_V * chosen_T.mean()
        order = np.argsort(expected_V - count_V, kind="stable")[:count].tolist()
        good = [v for v in order if count_V[v] >= minimum and count_V[v] > expected_V[v]]
        by_expert.append([(v, int(count_V[v]), float(count_V[v] / expected_V[v])) for v in good])
    return by_expert

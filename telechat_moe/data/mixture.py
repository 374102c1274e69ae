"""Several sources by weights that change at given samples: a schedule such as "from sample 20000 on, half code".

Every segment of a schedule is Megatron's blend of its weights, begun anew, among the sources whose weight is not 0; every
source goes on where the segment before left it. A source is read in passes, each shuffled with a seed of its own, so that
what was served so far depends neither on later segments nor on the length of the run: the future of a schedule may change
where a run goes on, its past may not (:meth:`MixedDataset.past`).

Source: Megatron-LM ``megatron/core/datasets/helpers.cpp``, ``build_blending_indices`` (the blend of a segment).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from telechat_moe.data.blend import Blend, CombinedSource, first_of, lay_out, normalised
from telechat_moe.data.dataset import GptDataset, Indices, hash_settings
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.sample import SampleOptions
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

MixtureSchedule = Sequence[tuple[int, Sequence[float]]]
"""First sample and weights of each segment; the weights have any positive scale, and 0 is none of a source."""
_OPEN_PASSES = 2


class Passes(CombinedSource[GptDataset]):
    """The samples of one source, pass after pass without end; pass ``p`` is shuffled with ``seed + p``.

    Raises:
        BadInputError: If the files are broken or hold fewer tokens than one sample.
    """

    def __init__(
        self,
        prefix: str | IndexedDataset,
        seq_length: int,
        seed: int,
        *,
        documents: tuple[int, int] | None = None,
        options: SampleOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.source = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.seq_length, self.seed = seq_length, seed
        self._settings = {"documents": documents, "options": options, "progress": progress}
        self._open: OrderedDict[int, GptDataset] = OrderedDict()
        self.samples_per_pass = len(self.get_pass(0))

    def get_pass(self, number: int) -> GptDataset:
        """Return the samples of one pass; the last two that were used stay open."""
        if number not in self._open:
            seed = (self.seed + number) % 2**32
            dataset = GptDataset(self.source, self.seq_length, None, seed, **self._settings)
            self._open[number] = dataset
            while len(self._open) > _OPEN_PASSES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def by_part(self, indices: Indices) -> Iterator[tuple[GptDataset, np.ndarray, np.ndarray]]:
        """See :meth:`CombinedSource.by_part`; the parts are the passes."""
        numbers, within = np.divmod(indices, self.samples_per_pass)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            yield self.get_pass(number), rows, within[rows]

    def fingerprint(self) -> str:
        """Return a hash of all that decides the samples."""
        return self.get_pass(0).fingerprint()


class MixedDataset(Blend[Passes]):
    """Samples of several sources by a schedule of weights.

    Args:
        schedule: Segments in order, the first from sample 0.

    Raises:
        ValueError: If the schedule does not begin at 0, rise, and stay below ``size`` with a weight for every source.
    """

    def __init__(
        self,
        sources: Sequence[Passes],
        schedule: MixtureSchedule,
        size: int,
        progress: Progress | None = None,
    ) -> None:
        self.datasets = list(sources)
        starts = [start for start, _ in schedule]
        if not starts or starts[0] or sorted(set(starts)) != starts or starts[-1] >= size:
            raise ValueError(f"segments from samples {starts}; expected 0 first, then rising to below {size}")  # fmt: skip
        if any(len(weights) != len(sources) for _, weights in schedule):
            raise ValueError(f"expected {len(sources)} weights in each segment")
        self.schedule = [(start, normalised(weights)) for start, weights in schedule]
        order = lay_out(self.schedule, size, self.datasets[0].source, progress)
        self.chosen, self.within = order["chosen"], order["within"]

    def segments(self) -> Iterator[tuple[int, int, list[float]]]:
        """Yield first sample, end and weights of each segment; the weights sum to 1."""
        ends = [start for start, _ in self.schedule[1:]]
        for (start, weights), end in zip(self.schedule, [*ends, len(self)], strict=True):
            yield start, end, weights

    def past(self, sample: int) -> list[Any]:
        """Return what decided the samples before this one, as JSON values.

        Of each segment that begins before it the first sample, and number, fingerprint and weight of each source that has a
        weight. Two mixtures with equal pasts have served the same samples.
        """
        prints = [source.fingerprint() for source in self.datasets]
        return [
            [start, [[i, prints[i], weight] for i, weight in enumerate(weights) if weight > 0]]
            for start, weights in self.schedule
            if start < sample
        ]

    def fingerprint(self) -> str:
        """Return a hash that tells mixtures from other datasets; :meth:`past` tells them from each other."""
        return hash_settings({"mixture": 1, "seq_length": self.datasets[0].seq_length})


def open_mixture(
    prefixes: Sequence[str],
    schedule: MixtureSchedule,
    *,
    seq_length: int,
    size: int,
    seed: int = 1234,
    share: float = 1.0,
    options: SampleOptions | None = None,
    progress: Progress | None = None,
) -> MixedDataset:
    """Open sources that are mixed by a schedule.

    Args:
        share: Share of each source's documents to use, the first ones.

    Raises:
        BadInputError: If the schedule cannot be served, or a dataset is broken.
    """
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    settings: dict[str, Any] = {"options": options, "progress": progress}
    passes = [
        Passes(x, seq_length, seed, documents=first_of(x, share), **settings) for x in sources
    ]
    try:
        return MixedDataset(passes, schedule, size, progress)
    except ValueError as error:
        raise BadInputError(f"telechat_moe.mixture: {error}") from None

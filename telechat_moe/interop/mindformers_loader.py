"""Our data in MindFormers' trainers: a data loader type and a type of schedule, registered under their names.

With `TelechatMoeTrainer` they are used where a setting of the recipe needs them. With MindFormers' own trainer a recipe names
them, and the plug-in: ``type: TelechatDataLoader``, ``auto_register: telechat_moe_plugin.TelechatDataLoader``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindformers.core.context.build_context import Context
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_rank
from mindspore import Tensor, ops
from mindspore.dataset import GeneratorDataset
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from telechat_moe.data.rank_samples import RankSamples
from telechat_moe.errors import BadInputError
from telechat_moe.interop.mindformers_checkpoint import open_data
from telechat_moe.interop.mindformers_config import recipe_of
from telechat_moe.recipe import Recipe, RecipeError
from telechat_moe.recipe.rules.data import produced
from telechat_moe.train.schedule import from_recipe


@contextmanager
def recipe_in_use() -> Iterator[Recipe]:
    """Yield the recipe that MindFormers trains, from its context's copy of the configuration, which its trainer does not change.

    MindFormers' registry raises errors anew from their text alone; those of the recipe become such.
    """
    try:
        yield recipe_of(Context().config)
    except RecipeError as error:
        raise BadInputError(str(error)) from error


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class TelechatDataLoader:
    """The samples that `telechat-moe train` gives to a data-parallel rank, in that order, as a data set of MindSpore.

    Args:
        num_shards, shard_id: Processes that read different samples, and which this is; None: each reads the whole batch.
        keys: The keys of the section, which count as the recipe says them.

    Raises:
        BadInputError: The recipe has problems, or the data are not there, broken, too few, or others than the checkpoint's.
    """

    def __new__(
        cls, num_shards: int | None = None, shard_id: int | None = None, **keys: Any
    ) -> GeneratorDataset:
        """Return the data set."""
        del keys
        with recipe_in_use() as recipe:
            loader, first_step = open_data(recipe, get_real_rank())
        share = None if shard_id is None or num_shards is None else (shard_id, num_shards)
        samples = RankSamples(loader, recipe.micro_batches, first_step, share)
        section = recipe.train_dataset.data_loader.config
        assert section is not None  # else the data could not be opened
        in_order = {"shuffle": False, "num_parallel_workers": 1, "python_multiprocessing": False}
        return GeneratorDataset(samples, produced(section), **in_order)


@MindFormerRegister.register(MindFormerModuleType.LR)
class TelechatDecayLR(LearningRateSchedule):
    """The rates of `telechat-moe train` by the recipe's `lr_schedule`, in float32: `WarmUpStableDecayLR` with another decay.

    Args:
        keys: The keys of the section, which count as the recipe says them.
    """

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        del keys
        with recipe_in_use() as recipe:
            rate, self.last = from_recipe(recipe), recipe.train_steps
        # From a table: computed in the graph, rates would be rounded otherwise.
        self.rates = Tensor(np.array([rate(step) for step in range(self.last + 1)], np.float32))
        self.least, self.take = ops.Minimum(), ops.Gather()

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate of a step."""
        return self.take(self.rates, self.least(global_step, self.last), 0)

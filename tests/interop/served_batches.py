"""Build the training data of recipes in MindFormers as each process would, and write its batches: ``served_batches.py CASES OUT``.

CASES is a JSON list: recipe (a file), trainer (`ours`, `theirs`), rank, ranks, skip (steps that MindFormers leaves out). Nothing
is trained: what ``BaseTrainer.training_process`` does before it builds the network is done here, in its order.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.interop.mindformers_config import PLUGIN

os.environ |= {"GLOG_v": "3", "REGISTER_PATH": str(PLUGIN)}


def served(case: dict[str, Any]) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Return the batches of a process, and the rate of every step and of some after the last."""
    import mindspore as ms
    from mindformers import MindFormerConfig
    from mindformers.core.context import build_context, set_context
    from mindformers.core.context.build_context import Context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.trainer import CausalLanguageModelingTrainer
    from mindformers.trainer.utils import convert_checkpoint_config

    from telechat_moe.interop.mindformers_model import TelechatMoeTrainer
    from telechat_moe.recipe import load

    os.environ |= {"RANK_ID": str(case["rank"]), "RANK_SIZE": str(case["ranks"])}
    ms.reset_auto_parallel_context()
    config = MindFormerConfig(case["recipe"])
    parallel, config.use_parallel = config.use_parallel, False  # there is one process here
    if not Context.is_exists():
        build_context(config)
    config.use_parallel = parallel
    Context().config = MindFormerConfig(**config)  # as it does for the first
    set_context(dataset_broadcast_opt_level=0)
    if parallel:
        semi = config.parallel.parallel_mode in (1, "SEMI_AUTO_PARALLEL")
        if semi:
            Context().config.context.device_target = "Ascend"
        mode = "semi_auto_parallel" if semi else "data_parallel"
        stages = config.parallel_config.pipeline_stage or 1
        ms.set_auto_parallel_context(
            parallel_mode=mode,
            pipeline_stages=stages,
            full_batch=bool(config.parallel.full_batch and semi),
        )
    build_parallel_config(config)
    config.rank_id, config.device_num = case["rank"], case["ranks"]
    convert_checkpoint_config(config)
    trainer: Any = CausalLanguageModelingTrainer()
    if case["trainer"] == "ours":
        trainer = TelechatMoeTrainer()
        trainer.recipe = load(case["recipe"])
    config = trainer._train_dataset_preprocess(config)
    config.train_dataset.pop("construct_args_key", None)
    config = trainer.set_config(config, True)
    dataset = trainer._train_dataset_postprocess(trainer.create_train_dataset(), config)
    dataset.set_init_step(case["skip"])
    trainer.set_train_dataset(dataset)
    ms.reset_auto_parallel_context()  # the rate is no part of the split model
    rate = trainer.create_lr_scheduler(config.lr_schedule)
    steps = (ms.Tensor([step], ms.int32) for step in range(dataset.get_dataset_size() + 3))
    rates = np.concatenate([rate(step).asnumpy().reshape(1) for step in steps])
    return list(dataset.create_dict_iterator(output_numpy=True, num_epochs=1)), rates


def main(cases: str, out: str) -> None:
    """Write the batches of each case, ``CASE.BATCH.COLUMN``, and its rates, ``CASE.rates``."""
    arrays: dict[str, np.ndarray] = {}
    for number, case in enumerate(json.loads(Path(cases).read_text())):
        batches, arrays[f"{number}.rates"] = served(case)
        for step, batch in enumerate(batches):
            arrays |= {f"{number}.{step}.{name}": column for name, column in batch.items()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A value that a key takes in `dryrun` changes the compiled graph (`make test-slow GROUP=compiled_keys`)."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import key_effects
from key_values import KEYS, Key
from test_keys import REPEATS, base, faults, reads

from telechat_moe.recipe import Recipe

__all__ = ["base"]
NOT_IN_GRAPH = {
    **REPEATS,
    "Context.max_call_depth": "a limit of the compiler",
    "Optimizer.eps": "an input of the step, as the learning rate",
    "Optimizer.swap": "the report says where the moments are (test_dryrun.py); the graph is rewritten later",
    "Optimizer.weight_decay": "an input of the step, as the learning rate",
    "Parallel.dataset_strategy": "the one that CPU processes take says again what full_batch False says",
}


@pytest.mark.parametrize(
    "key", [k for k in KEYS if reads(k, "dryrun") and str(k) not in NOT_IN_GRAPH], ids=str
)
def test_the_compiled_graph_is_another(key: Key, base: dict[str, Any]) -> None:
    acted: dict[Key, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(base["output_dir"]).parent)
        key_effects.patch(patch)
        list(faults(key, base, "dryrun", key_effects.compiled, acted))
        if key in acted and isinstance(acted[key][0], Recipe):
            before, changed = acted[key]
            graph, last = key_effects.graph, min(before.devices, changed.devices) - 1
            assert any(graph(before, rank) != graph(changed, rank) for rank in {0, last})

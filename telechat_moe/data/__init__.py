"""From text to batches: corpora, tokenizer, Megatron token files, packed samples, loader.

::

    build("output/data", vocab_size=2048, seed=1)                 # text -> token files
    dataset = GptDataset("output/data/train", seq_length=256)     # token files -> samples
    for batch in Loader(dataset, batch_size=8): ...               # samples -> batches

May import errors, files, processes and recipe, and needs numpy; building and decoding also need ``tokenizers``. Begin with ``dataset.py``.
"""

from telechat_moe.data.blend import BlendedDataset, open_blend
from telechat_moe.data.build import BuildResult, build, verify
from telechat_moe.data.dataset import GptDataset
from telechat_moe.data.indexed import IndexedDataset, write_indexed
from telechat_moe.data.loader import Loader
from telechat_moe.data.mixture import MixedDataset, open_mixture
from telechat_moe.data.recipe import open_recipe, open_valid
from telechat_moe.data.sample import SampleOptions
from telechat_moe.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "BlendedDataset",
    "BuildResult",
    "GptDataset",
    "IndexedDataset",
    "Loader",
    "MixedDataset",
    "SampleOptions",
    "Tokenizer",
    "build",
    "load_tokenizer",
    "open_blend",
    "open_mixture",
    "open_recipe",
    "open_valid",
    "verify",
    "write_indexed",
]

"""Rules about the training data and its columns."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from telechat_moe.recipe.data_path import parse_data_path, parse_split
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.train import OUR_LOADER, GptDatasetConfig

DATA = "train_dataset."
LOADER = "train_dataset.data_loader."
CONFIG = "train_dataset.data_loader.config."
MEGATRON = "BlendedMegatronDatasetDataLoader"

INDEXED = (MEGATRON, OUR_LOADER)  # of Megatron's files

_COMMON = ("type", "auto_register", "shuffle", "tokenizer", "column_names")
_KEYS: dict[str, tuple[str, ...]] = {
    MEGATRON: (*_COMMON, "datasets_type", "sizes", "config", "phase"),
    OUR_LOADER: ("type", "auto_register", "datasets_type", "sizes", "config"),
    "HFDataLoader": (
        *_COMMON,
        *("load_func", "path", "name", "data_dir", "data_files", "split", "streaming", "size"),
        *("dataset_state_dir", "save_step", "create_attention_mask", "create_compressed_eod_mask"),
        *("compressed_eod_mask_length", "use_broadcast_data", "handler", "packing"),
    ),
    "MindDataset": (*_COMMON, "dataset_dir", "dataset_files"),
    "TFRecordDataset": (*_COMMON, "dataset_dir", "dataset_files"),
}


def _config(r: Recipe) -> GptDatasetConfig | None:
    loader = r.train_dataset.data_loader
    return loader.config if r.trains and loader.type in INDEXED else None


def loader_keys(r: Recipe) -> Iterator[Broken]:
    """MindFormers passes keys of another loader on, where most are dropped silently."""
    loader = r.train_dataset.data_loader
    for key in (field.name for field in fields(loader)):
        if getattr(loader, key) is not None and key not in _KEYS[loader.type]:
            yield LOADER + key, f"not read by {loader.type}", "remove it"


def megatron(r: Recipe) -> Iterator[Broken]:
    """A Megatron data set needs a kind, sizes and a configuration."""
    loader = r.train_dataset.data_loader
    if not r.trains or loader.type not in INDEXED:
        return
    for key, expected in (
        *((("datasets_type", "GPTDataset"),) if loader.type == MEGATRON else ()),
        ("sizes", "a list: samples for training, 0, 0"),
        ("config", "a section with seq_length, data_path, eod ..."),
    ):
        if getattr(loader, key) is None:
            yield LOADER + key, "is missing", expected
    if loader.sizes and loader.sizes[0] < r.global_batch:
        problem = f"{loader.sizes[0]} samples for training, a step takes {r.global_batch}"
        yield LOADER + "sizes", problem, f"at least {r.global_batch} for one step"


def task(r: Recipe) -> Iterator[Broken]:
    """MindFormers builds data from `train_dataset_task.dataset_config`, not from `train_dataset`."""
    if not r.trains:
        return
    if "train_dataset" not in r.given:
        yield "train_dataset", "is missing", "a section; training needs data"
    if r.train_dataset_task is None:
        yield "train_dataset_task", "is missing", "type and dataset_config: *train_dataset"
    elif r.train_dataset_task.dataset_config != r.train_dataset:
        problem = "another data set than train_dataset"
        yield "train_dataset_task.dataset_config", problem, "the alias *train_dataset"


def lengths(r: Recipe) -> Iterator[Broken]:
    """Data and model must agree on the sequence length; MindFormers finds out in the first step."""
    config, length = _config(r), r.model.model_config.seq_length
    if config and length is not None and config.seq_length != length:
        problem = f"{config.seq_length}, but model.model_config.seq_length is {length}"
        yield CONFIG + "seq_length", problem, str(length)


def produced(config: GptDatasetConfig) -> list[str]:
    """Return the columns that a Megatron data set gives, in order."""
    columns = ["input_ids", "labels", "loss_mask", "position_ids"]
    if config.create_compressed_eod_mask:
        return [*columns, "actual_seq_len"]
    return [*columns, "attention_mask"] if config.create_attention_mask else columns


def columns(r: Recipe) -> Iterator[Broken]:
    """MindFormers names columns by position: a wrong list swaps or drops inputs silently."""
    data, config = r.train_dataset, _config(r)
    if config:
        expected = produced(config)
        for key in ("input_columns", "construct_args_key"):
            columns = getattr(data, key)
            if columns is not None and columns != expected:
                mask = f"create_attention_mask {config.create_attention_mask}"
                if config.create_compressed_eod_mask:
                    mask = "create_compressed_eod_mask True"
                yield DATA + key, str(columns), f"{expected}, what the data set gives with {mask}"
    inputs, arguments = data.input_columns, data.construct_args_key
    if not config and None not in (inputs, arguments) and inputs != arguments:
        yield DATA + "construct_args_key", str(arguments), f"as input_columns: {inputs}"
    for key, names in (("input_columns", inputs or []), ("construct_args_key", arguments or [])):
        if len(set(names)) != len(names):
            yield DATA + key, str(names), "each column once"


def hugging_face_columns(r: Recipe) -> Iterator[Broken]:
    """MindFormers splits a batch into the columns of a mask, though the recipe lists others."""
    wrong = unlisted_columns(r.given.get("train_dataset") or {})
    if wrong and r.trains and r.use_parallel and r.parallel.dataset_strategy is None:
        yield wrong


def unlisted_columns(data: Mapping[str, Any]) -> Broken | None:
    """Return what is wrong if a `train_dataset` lists other columns than its Hugging Face batch is split into."""
    loader: Mapping[str, Any] = data.get("data_loader") or {}
    columns, steps = data.get("input_columns"), loader.get("handler") or ()
    if loader.get("type") not in ("HFDataLoader", "CommonDataLoader") or columns is None:
        return None
    packs = any("PackingHandler" in str(step) for step in steps)
    setting = "PackingHandler" if packs else "create_attention_mask True"
    if loader.get("create_compressed_eod_mask"):
        column, setting = "actual_seq_len", "create_compressed_eod_mask True"
    elif packs or loader.get("create_attention_mask"):
        column = "attention_mask"
    else:
        return None  # each device reads the whole batch
    expected = ["input_ids", "labels", "loss_mask", "position_ids", column]
    if columns == expected:
        return None
    reason = f"also as construct_args_key, for MindFormers splits these with {setting}"
    return DATA + "input_columns", str(columns), f"{expected}, {reason}"


def masks(r: Recipe) -> Iterator[Broken]:
    """Resets at document ends need an end-of-document id and somewhere to take effect."""
    config, m = _config(r), r.model.model_config
    if not config:
        return
    if config.reset_attention_mask and not (
        config.create_attention_mask or config.create_compressed_eod_mask
    ):
        problem = "True without a mask, where it has no effect"
        yield CONFIG + "reset_attention_mask", problem, "create_attention_mask True, or False here"
    for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
        if getattr(config, key) and config.eod < 0:
            yield CONFIG + "eod", f"{config.eod} with {key} True", "the end-of-document id"
            break
    if config.create_compressed_eod_mask and m.use_eod_attn_mask_compression is False:
        problem = "True with use_eod_attn_mask_compression False"
        yield CONFIG + "create_compressed_eod_mask", problem, "both True or both False"
    if m.use_eod_attn_mask_compression and not config.create_compressed_eod_mask:
        problem = "True, but the data set gives no actual_seq_len"
        key = "model.model_config.use_eod_attn_mask_compression"
        yield key, problem, f"{CONFIG}create_compressed_eod_mask True"


def _whole_documents_key(r: Recipe) -> str | None:
    """Return the section that keeps documents whole; None: text is cut."""
    settings = r.telechat_moe
    choices = {"conversations": settings.conversations, "packing": settings.packing}
    named = (f"telechat_moe.{k}" for k, section in choices.items() if section is not None)
    return next(named, None)


def whole_documents(r: Recipe) -> Iterator[Broken]:
    """Documents that stay whole see only themselves, and what follows them is not learned; MindFormers' packing trains on it."""
    section, config = _whole_documents_key(r), _config(r)
    if section is None or config is None:
        return
    for key in ("reset_position_ids", "reset_attention_mask"):
        if not getattr(config, key):
            problem = f"False with {section}, where each document must see only itself"
            yield CONFIG + key, problem, "True"
    if config.eod_mask_loss:
        problem = f"True with {section}, where the end of a document predicts nothing anyway"
        yield CONFIG + "eod_mask_loss", problem, "False"
    if not config.add_extra_token_to_sequence:
        problem = f"False with {section}, whose samples are whole"
        yield CONFIG + "add_extra_token_to_sequence", problem, "True"


def conversations(r: Recipe) -> Iterator[Broken]:
    """The tokenizer of conversations is the model's, and a pattern says how a message is written."""
    section = r.telechat_moe.conversations
    if section is None or _config(r) is None:
        return
    if not r.telechat_moe.corpus.tokenizer:
        problem = "None with telechat_moe.conversations"
        yield "telechat_moe.corpus.tokenizer", problem, "the tokenizer.json of the model"
    for name in sorted({"role", "content"} & {*section.ignore_fields}):
        expected = "fields without which a message is one"
        yield "telechat_moe.conversations.ignore_fields", name, expected
    if section.message is not None and section.variables:
        problem = "given beside message, where no chat template reads them"
        yield "telechat_moe.conversations.variables", problem, "remove them"
    if section.message is not None:
        before, _, after = section.message.partition("{content}")
        if section.message.count("{content}") != 1 or "{role}" not in before or "{role}" in after:
            expected = "a text with {role} and then {content}, as '{role}:\\n{content}\\n'"
            yield "telechat_moe.conversations.message", repr(section.message), expected


def token_ids(r: Recipe) -> Iterator[Broken]:
    """Ids beyond the vocabulary read outside the embedding."""
    config, size = _config(r), r.model.model_config.vocab_size
    if not config or size is None:
        return
    for key in ("eod", "pad"):
        if getattr(config, key) >= size:
            yield CONFIG + key, str(getattr(config, key)), f"below vocab_size ({size})"


def paths(r: Recipe) -> Iterator[Broken]:
    """Megatron takes a list of weights and prefixes; one slip makes a weight a file name."""
    config = _config(r)
    if config:
        for key in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            yield from _blend(CONFIG + key, getattr(config, key))
        if config.data_path and config.train_data_path:
            yield CONFIG + "train_data_path", "together with data_path", "only one of the two"
        try:
            if config.data_path:
                parse_split(config.split or "")
        except ValueError as error:
            problem = f"{config.split!r} with data_path" if config.split else "is missing"
            yield CONFIG + "split", problem, str(error)
    evaluation = r.telechat_moe.evaluation
    yield from _blend("telechat_moe.evaluation.data_path", evaluation.data_path)


def mixture(r: Recipe) -> Iterator[Broken]:
    """A schedule of weights needs several sources, a weight of each, and segments that begin in turn."""
    config, segments, key = _config(r), r.telechat_moe.mixture, "telechat_moe.mixture"
    if segments is None or config is None:
        return
    if not segments:
        yield key, "an empty list", "an item with from_sample 0 and weights, or remove the key"
    if (section := _whole_documents_key(r)) is not None:
        problem = f"weights that change, with {section}, whose passes differ in samples"
        yield key, problem, "remove it, and weights in data_path"
    path = config.data_path or config.train_data_path or []
    try:
        prefixes, weights = parse_data_path(path)
    except ValueError:
        return  # a problem of its own
    name = CONFIG + ("data_path" if config.data_path else "train_data_path")
    if weights is not None:
        yield name, f"weights beside {key}, where they have no effect", "prefixes only"
    elif len(set(prefixes)) < max(2, len(prefixes)):
        yield name, f"{path} with {key}", "two different prefixes or more"
    if (epochs := r.runner_config.epochs) > 1:
        problem = f"{epochs} with {key}, which repeats each source as its share takes"
        expected = "1, and all samples in train_dataset.data_loader.sizes"
        yield "runner_config.epochs", problem, expected
    size, before = (r.train_dataset.data_loader.sizes or [None])[0], -1
    for index, segment in enumerate(segments):
        segment_key, start = f"{key}.{index}", segment.from_sample
        if (index == 0) != (start == 0) or start <= before or (size is not None and start >= size):
            expected = "0 in the first item"
            if index:
                expected = f"above {before} and below the {size} samples of the run"
            yield f"{segment_key}.from_sample", str(start), expected
        before = start
        if len(segment.weights) != len(prefixes) or not 0 < sum(segment.weights) < math.inf:
            expected = f"{len(prefixes)} weights, one for each prefix of {name}, not all 0"
            yield f"{segment_key}.weights", str(segment.weights), expected


def _blend(key: str, value: Sequence[str] | None) -> Iterator[Broken]:
    try:
        if value is not None:
            parse_data_path(value)
    except ValueError as error:
        yield key, str(value), str(error)


def batching(r: Recipe) -> Iterator[Broken]:
    """Graphs have fixed shapes."""
    if not r.train_dataset.drop_remainder and r.trains:
        yield DATA + "drop_remainder", "False", "True: a graph has one batch size"


def evaluation(r: Recipe) -> Iterator[Broken]:
    """MindFormers' evaluation needs its own data."""
    if r.do_eval and (r.eval_dataset is None or r.eval_dataset_task is None):
        problem = "True without eval_dataset and eval_dataset_task"
        yield "do_eval", problem, "False, or both sections"

"""Compile the graph of a rank of MindFormers' own model, from a MindFormers recipe, without an NPU.

:func:`compile_mindformers` gives MindFormers' unchanged classes to the compiler of our own graphs
(:func:`telechat_moe.graph.compile.compile_ranks`): the configuration is read, the context set and the network,
optimizer and step built by the methods of its trainer, in the order of ``BaseTrainer.training_process``. Not
called are the data loader (the batch has its shapes), loading of weights and callbacks. Nothing of it is imported
into the caller's process.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from telechat_moe.errors import BadInputError
from telechat_moe.graph.compile import Built, RankGraph, compile_ranks
from telechat_moe.graph.read import Expected
from telechat_moe.graph.report import Subject
from telechat_moe.interop.mindformers_config import PLUGIN
from telechat_moe.processes import CompileError, in_clean_process
from telechat_moe.reading import parse_json
from telechat_moe.recipe import Recipe, RecipeError, find, load, loads, sections
from telechat_moe.recipe.rules.data import unlisted_columns
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, NODE_DEVICES
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.versions import mindformers_version, require_mindformers

SEMI_AUTO = (1, "SEMI_AUTO_PARALLEL")
MODEL = "model.model_config"
UPSTREAM_TRAINER = "CausalLanguageModelingTrainer"
_MTP = ("num_nextn_predict_layers", "mtp_depth", "mtp_num_layers")
# Settings for a real device, a real disk or another program; None means the whole section.
_DROPPED: dict[str, tuple[str, ...] | None] = {
    "context": ("ascend_config", "save_graphs", "save_graphs_path", "affinity_cpu_list"),
    "telechat_moe": None,
}


@in_clean_process
def compile_mindformers(
    path_or_recipe: str | os.PathLike[str] | Recipe,
    ranks: Sequence[int],
    *,
    overrides: Sequence[str] = (),
    ours: bool = False,
    done: Callable[[], object] | None = None,
) -> list[RankGraph]:
    """Compile ranks of the model that MindFormers itself builds from a recipe.

    Args:
        path_or_recipe: Loaded recipe, path, name of a recipe of ours, or of one that comes with MindFormers
            (``deepseek3/pretrain_deepseek3_671b.yaml``). Files are judged by MindFormers' rules, not by ours.
        ours: Compile what MindFormers' trainer trains with our plug-in instead: our model, its step and optimizer.

    Raises:
        BadInputError: MindFormers is not installed, the recipe is not semi-automatic parallel, or there is no
            such rank.
        RecipeError: No such recipe, or not YAML.
        CompileError: MindFormers or MindSpore refused; the message is theirs.
    """
    folder()
    name, written = sections_of(path_or_recipe, overrides)
    devices = devices_of(name, written)
    if wrong := [rank for rank in ranks if not 0 <= rank < devices]:
        text = f"its layout has {devices} devices, expected 0 to {devices - 1}"
        raise BadInputError(f"{name}: no rank {wrong[0]}: {text}")
    _refuse(name, written)
    try:
        return compile_ranks(
            lambda rank: _build(written, rank, ours), ranks, devices, {}, done=done
        )
    except CompileError as error:
        problems = "" if isinstance(path_or_recipe, Recipe) else _checked(path_or_recipe, overrides)
        raise CompileError(f"{error}{problems}") from None


def _checked(name: str | os.PathLike[str], overrides: Sequence[str]) -> str:
    """Return what `check` says of a recipe that MindFormers refused, often in words that are not the recipe's."""
    try:
        load(_file(name), overrides)
    except RecipeError as refusal:
        lines = [f"\n  {problem}" for problem in refusal.problems]
        return "".join(["\n`telechat-moe check` says of this recipe:", *lines])
    return ""


def _file(name: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe that comes with MindFormers or with this package, or lies anywhere."""
    official = folder() / "configs" / name
    return official if official.is_file() else find(name)


def sections_of(
    path_or_recipe: str | os.PathLike[str] | Recipe, overrides: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the name and the sections of a recipe; see :func:`compile_mindformers`."""
    if isinstance(path_or_recipe, Recipe):
        name, text = str(path_or_recipe.source), yaml.safe_dump(path_or_recipe.given)
    else:
        name, path = os.fspath(path_or_recipe), _file(path_or_recipe)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(f"{name}: cannot be read: {error}") from None
    written = sections(text, overrides, name=name)
    if isinstance(model := written.get("pretrained_model_dir"), str) and model:
        written["pretrained_model_dir"] = str(Path(model).absolute())  # children have other folders
    return name, written


def devices_of(name: str, written: Mapping[str, Any]) -> int:
    """Return the number of devices of the layout that sections ask for.

    Raises:
        BadInputError: The recipe is not semi-automatic parallel, or a degree is no positive integer.
    """
    kinds = (("model.arch", "type"), (MODEL, "model_type"))
    named = [_section(name, written, path).get(key) for path, key in kinds]
    if not any([*named, written.get("pretrained_model_dir")]):
        raise BadInputError(
            f"{name}: names no model: neither {MODEL}.model_type nor pretrained_model_dir is written; expected a type "
            "such as deepseek_v3, or the folder of a Hugging Face model"
        )
    run = written.get("run_mode", "train")
    if run not in ("train", "finetune"):
        text = "and a training step is compiled: expected train or finetune"
        raise BadInputError(f"{name}: run_mode is {run}, {text}")
    parallel = _section(name, written, "parallel")
    mode = parallel.get("parallel_mode")
    if not written.get("use_parallel") or mode not in SEMI_AUTO:
        raise BadInputError(
            f"{name}: use_parallel is {written.get('use_parallel')}, parallel.parallel_mode {mode}; the graph of a rank "
            "exists under semi-automatic parallelism only: expected use_parallel: True and parallel.parallel_mode: 1"
        )
    keys = ("data_parallel", "model_parallel", "context_parallel", "pipeline_stage")
    return prod(_integer(name, written, f"parallel_config.{key}", 1) for key in keys)


def _refuse(name: str, written: Mapping[str, Any]) -> None:
    """Refuse what MindFormers and MindSpore refuse in words that name no key of the recipe."""
    if not _section(name, written, "train_dataset.data_loader"):
        raise BadInputError(
            f"{name}: train_dataset.data_loader is empty, and says which columns a batch has; expected a section with "
            "type and config, as in telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
        )
    wrong = unlisted_columns(_section(name, written, "train_dataset"))
    if wrong and _section(name, written, "parallel").get("dataset_strategy") is None:
        raise BadInputError("{}: {}: {}; expected {}".format(name, *wrong))
    model = _model(name, written)
    layers = next((model[key] for key in _MTP if model.get(key) is not None), 0)
    if layers and model.get("mtp_loss_factor", model.get("mtp_loss_scaling_factor")) is None:
        raise BadInputError(
            f"{name}: {MODEL}.mtp_loss_factor is not written, with {layers} MTP layer (num_nextn_predict_layers), whose "
            f"loss MindFormers multiplies by it; expected a factor (--set {MODEL}.mtp_loss_factor=0.3), or no such layer "
            f"(--set {MODEL}.num_nextn_predict_layers=0)"
        )
    sample_length(name, written)


def _section(name: str, written: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a section by its dotted key, empty if it is not written."""
    section: Any = written
    for key in path.split("."):
        section = section.get(key) or {}
        if not isinstance(section, Mapping):
            raise BadInputError(f"{name}: {path}: {key} is {section!r}, expected a section")
    return section


def _integer(name: str, written: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer by its dotted key; without a default, it must be written."""
    above, _, last = key.rpartition(".")
    number = _section(name, written, above).get(last)
    if number is None and default is not None:
        return default
    if not isinstance(number, int) or number < 1:
        text = "is not written" if number is None else f"is {number}"
        raise BadInputError(f"{name}: {key} {text}, expected an integer >= 1")
    return number


def _hugging_face(name: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's configuration in the Hugging Face folder that a recipe names, empty if it names none."""
    folder = written.get("pretrained_model_dir")
    if not folder:
        return {}
    try:
        content = parse_json(Path(folder, "config.json").read_text(encoding="utf-8"))
        return {"model": {"model_config": dict(content)}}
    except (OSError, ValueError, TypeError):
        raise BadInputError(
            f"{name}: pretrained_model_dir is {folder}, where no config.json can be read, and MindFormers takes the "
            "model's dimensions from it; expected the folder of a Hugging Face model (its config.json is enough)"
        ) from None


def subject_of(name: str, written: Mapping[str, Any]) -> Subject:
    """Return what a report on MindFormers' model says of itself.

    MindFormers spreads experts over the innermost ranks of a stage, as we do, and tokens of a micro-batch over tensor
    and context parallel ranks before an exchange.
    """
    keys = {
        "dp": "data_parallel",
        "cp": "context_parallel",
        "tp": "model_parallel",
        "pp": "pipeline_stage",
        "ep": "expert_parallel",
    }
    sizes: dict[str, Any] = {
        short: _integer(name, written, f"parallel_config.{key}", 1) for short, key in keys.items()
    }
    sp = bool(_section(name, written, "parallel_config").get("use_seq_parallel"))
    zero1 = bool(_section(name, written, "parallel").get("enable_parallel_optimizer"))
    model, node = _model(name, written), 0
    if model.get("moe_token_dispatcher_type") == "alltoall_deredundency":
        model = {"model": {"model_config": model}}
        node = _integer(name, model, f"{MODEL}.npu_nums_per_device", NODE_DEVICES)
    mesh = Mesh(**sizes, sp=sp, zero1=zero1, node=node)
    states = bool(_section(name, written, "optimizer").get("swap"))
    model = f"MindFormers {mindformers_version()}"
    return Subject(name, mesh, _exchange(name, written, mesh), model, swaps_states=states)


def _model(name: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's configuration: written, in the Hugging Face folder, or MindFormers' default of its class."""
    folder_says = _section(name, _hugging_face(name, sections), MODEL)
    written = {**folder_says, **_section(name, sections, MODEL)}
    return {**DEEPSEEK_V3, **written} if written.get("model_type") == "deepseek_v3" else written


def _exchange(name: str, sections: Mapping[str, Any], mesh: Mesh) -> Expected:
    """Return the sizes of an exchange of tokens that are spread evenly; none without experts."""
    written = _model(name, sections)
    if not any(written.get(key) for key in ("n_routed_experts", "num_experts", "num_moe_experts")):
        return Expected(0, 0)
    model = {"model": {"model_config": written}}
    tokens = _integer(name, sections, "runner_config.batch_size", 1) * sample_length(name, sections)
    rows = tokens // (mesh.tp * mesh.cp) * _integer(name, model, f"{MODEL}.num_experts_per_tok", 8)
    return Expected(rows * _integer(name, model, f"{MODEL}.hidden_size"), rows)


def sample_length(name: str, sections: Mapping[str, Any]) -> int:
    """Return the tokens of a sample: the data set's (the last handler's that says it), else the model's."""
    both = [f"{section}.seq_length" for section in ("train_dataset.data_loader.config", MODEL)]
    handlers = _section(name, sections, "train_dataset.data_loader").get("handler")
    lengths = [h.get("seq_length") for h in handlers or () if isinstance(h, Mapping)]
    last_length = next((n for n in reversed(lengths) if n is not None), None)
    handler = ({"handler": {"seq_length": last_length}}, "handler.seq_length")
    for written, key in ((sections, both[0]), handler, (sections, both[1])):
        section, _, last = key.rpartition(".")
        if _section(name, written, section).get(last) is not None:
            return _integer(name, written, key)
    raise BadInputError(
        f"{name}: neither {both[0]} nor {both[1]} is written, so nothing says how long a sample is; write one "
        f"(--set {both[1]}=4096)"
    )


def folder() -> Path:
    """Return the folder that MindFormers is installed in, if it can run here."""
    require_mindformers()
    spec = importlib.util.find_spec("mindformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _build(written: Mapping[str, Any], rank: int, our_model: bool) -> Built:
    """Build MindFormers' training step. Runs in the child process, in a temporary folder, and changes the process."""
    import mindspore as ms

    os.dup2(2, 1)  # MindFormers logs to standard output
    sys.stdout = sys.__stdout__
    # It would bind the compiler to a core.
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    config, length = _configuration(written), sample_length("recipe", written)

    from mindformers import MindFormerConfig
    from mindformers.core.context import build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.tools.check_rules import check_rules
    from mindformers.trainer import Trainer
    from mindformers.trainer.build_trainer import build_trainer

    os.environ["REGISTER_PATH"] = str(PLUGIN)
    context = build_context(config)  # forgets all parallel settings, then sets those of the recipe
    context.config = MindFormerConfig(**written)  # of which types of ours ask, for their device
    ms.set_auto_parallel_context(global_rank=rank)
    if config.optimizer.type == "Muon":
        config.model.model_config.track_max_attention_logit = True
    Trainer._reassign_monitor_config(SimpleNamespace(config=config))
    config.metric = None  # of evaluation
    build_parallel_config(config)

    trainer = _our_trainer(written) if our_model else build_trainer(config.trainer)
    config = trainer._train_dataset_preprocess(config)
    columns = config.train_dataset.pop("construct_args_key", None)
    config = trainer.set_config(config, True)
    steps = _steps(config, trainer.global_batch_size)
    trainer.set_train_dataset(SimpleNamespace(get_dataset_size=lambda: steps))
    check_rules(config, mode="train", network=None, dataset=None)
    return Built(_step(trainer, columns), _batch(config, length))


def _our_trainer(written: Mapping[str, Any]) -> Any:
    """Return the trainer that recipes of ours name, in its state when training begins."""
    from telechat_moe.interop.mindformers_model import TelechatMoeTrainer

    trainer = TelechatMoeTrainer()
    trainer.recipe = loads(yaml.safe_dump(dict(written), allow_unicode=True))
    return trainer


def _configuration(written: Mapping[str, Any]) -> Any:
    """Return MindFormers' configuration object, read by it from a file as ``run_mindformer.py`` does."""
    from mindformers import MindFormerConfig

    settings = {key: value for key, value in written.items() if _DROPPED.get(key, ()) is not None}
    for key, below in _DROPPED.items():
        if below and isinstance(settings.get(key), dict):
            settings[key] = {k: v for k, v in settings[key].items() if k not in below}
    until_built = {"device_target": "CPU"}
    settings["context"] = {**settings.get("context", {}), **until_built}
    settings["load_checkpoint"] = ""
    settings["trainer"] = {"type": UPSTREAM_TRAINER}  # ours would build our model
    Path("recipe.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    return MindFormerConfig("recipe.yaml")


def _steps(config: Any, global_batch_size: int) -> int:
    """Return the steps of an epoch, on which schedules depend."""
    sizes = config.train_dataset.data_loader.sizes or [global_batch_size]
    return max(int(sizes[0]) // global_batch_size, 1)


def _step(trainer: Any, columns: list[str] | None) -> Any:
    """Return network, optimizer and wrapper as ``BaseTrainer.training_process`` puts them together."""
    config = trainer.config
    network = trainer.create_network(
        default_args={
            "parallel_config": config.parallel_config,
            "moe_config": config.moe_config,
            "dataset_config": config.train_dataset,
            "calculate_per_token_loss": getattr(config, "calculate_per_token_loss", False),
            "batch_size": config.runner_config.mini_batch_size,
        }
    )
    shared = config.optimizer.type in ("PmaAdamW", "FusedPmaAdamW", "Muon")
    parameters = set(network.get_model_parameters()) if shared else set()
    if columns is not None:
        network = trainer.warp_data_order_with_tool_cells(network, columns)
    network = trainer.wrap_network_with_tool_cells(network)
    trainer.set_network(network, is_train=True)
    optimizer = trainer.create_optimizer_scheduler(network, parameters)
    step = trainer.create_model_wrapper(network, optimizer)
    if hasattr(step, "ascend_910b_target"):
        # No chip tells; without it, overflow is asked as on the first 910.
        step.ascend_910b_target = True
    step.set_train(True)
    return step


def _batch(config: Any, length: int) -> tuple[Any, ...]:
    """Return a batch of the shapes that the data loader gives to a device, columns in their order, without values."""
    import mindspore as ms
    from mindspore.common.initializer import initializer

    loader = config.train_dataset.data_loader
    ends = (loader.config or {}).get("eod_pad_length") or loader.compressed_eod_mask_length or 128
    rows = config.runner_config.batch_size
    below = {"attention_mask": (1, length, length), "actual_seq_len": (ends,)}
    shapes = [below.get(column, (length,)) for column in config.train_dataset.input_columns]
    return tuple(initializer("zeros", (rows, *shape), ms.int32) for shape in shapes)

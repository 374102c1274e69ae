"""Observe which keys of a recipe MindFormers reads while it builds its trainer.

    python -m benchmarks.dryrun_mindformers.reads

puts what the installed version reads into the file by which ``telechat-moe check --for mindformers`` judges
(:mod:`telechat_moe.recipe.reads`): observed once per version and model type, because one observation takes half a minute
and needs MindFormers.

:func:`observe` lets MindFormers go from the recipe's file to the call that would start training, as
``run_mindformer.py`` does, and notes who asks for which key: of its configuration object, of the objects that it makes of
sections (network, parallel degrees, recomputation), and which arguments the classes have that it passes sections to. The
network is built and not compiled, so widths and depths are the recipe's own.
"""

import copy
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.interop.mindformers_dryrun import devices_of, folder, sections_of
from telechat_moe.processes import in_children, in_clean_process
from telechat_moe.recipe import ModelConfig, OtherModelConfig, Recipe
from telechat_moe.recipe.reads import FILE, schema_names, table_of
from telechat_moe.versions import PAIRS, mindformers_version

MODEL = "model.model_config"
# Functions that copy a whole section; what they ask for is not thereby read.
_COPIES = (
    *("__deepcopy__", "_deepcopy_dict", "deepcopy", "to_dict", "to_diff_dict", "_to_dict_helper"),
    *("_merge_a_into_b", "_dict2config", "_asdict_inner", "asdict", "convert", "wrapper", "pprint"),
    *("config2dict", "_reset_config_for_save", "__eq__", "dict_ms_dtype_to_str"),
)


class Observation(NamedTuple):
    """What was seen while MindFormers built its trainer.

    Attributes:
        reads: Keys that are read, dotted, with the type of a callback in the place of its index.
        sources: Keys of the model section by the attribute of ``TransformerConfig`` that they set.
    """

    reads: set[str]
    sources: dict[str, set[str]]


class _BuiltError(Exception):
    """The trainer is built and would train now."""


def before(owner: Any, name: str, action: Callable[..., object]) -> None:
    """Let a function of a class or an object call another with the same arguments first."""
    real = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return real(*args, **kwargs)

    static = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
    setattr(owner, name, staticmethod(both) if static else both)


class Recorder:
    """Notes who reads which key; changes classes of MindFormers, so it belongs into a child process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: set[str] = set()
        self.sources: dict[str, set[str]] = {}
        self.of_type: dict[str, str] = {}

    def note(self, section: str, key: object, thing: object) -> None:
        """Note that MindFormers reads a key of a thing, unless it only copies or makes it."""
        frame = sys._getframe(1)
        between = "get_value", "__getattr__"
        while frame and (frame.f_code.co_filename == __file__ or frame.f_code.co_name in between):
            frame = frame.f_back
        if not frame or frame.f_code.co_name in _COPIES:
            return
        made = frame.f_locals.get("self") is thing and frame.f_code.co_name != "__post_init__"
        if not made and Path(frame.f_code.co_filename).is_relative_to(self.root):
            self.reads.add(f"{section}.{key}".lstrip("."))

    def tag(self, value: Any, path: str) -> Any:
        """Tell a configuration object, and all in it, its own path."""
        from mindformers.tools.register.config import DictConfig, MindFormerConfig

        if isinstance(value, list):
            kinds = [
                dict.get(item, "type", "*") if isinstance(item, dict) else "*" for item in value
            ]
            return [
                self.tag(item, f"{path}.{kind}") for item, kind in zip(value, kinds, strict=True)
            ]
        if not isinstance(value, dict):
            return value
        if not isinstance(value, DictConfig):
            value = MindFormerConfig(**value)
        object.__setattr__(value, "path", path)
        for key, item in value.items():
            dict.__setitem__(value, key, self.tag(item, f"{path}.{key}".lstrip(".")))
        return value

    def install(self) -> None:
        """Change the classes."""
        self._sections()
        self._classes()
        self._objects()
        self._context()

    def _sections(self) -> None:
        from mindformers.tools.register.config import DictConfig, MindFormerConfig

        made = MindFormerConfig.__init__

        def make(config: Any, /, *files: Any, **sections: Any) -> None:
            made(config, *files, **sections)
            if files or "run_mode" in sections:  # the whole recipe, or a copy of it
                self.tag(config, "")

        MindFormerConfig.__init__ = make

        def see(config: Any, key: object, *_: object) -> None:
            if "path" in vars(config):
                self.note(vars(config)["path"], key, config)

        for name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
            before(DictConfig, name, see)

        def attribute(config: Any, key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            return config.get(key)

        def deepcopy(config: Any, memo: Any = None) -> Any:
            twin = type(config)()
            vars(twin).update(vars(config))
            for key, value in config.items():
                dict.__setitem__(twin, key, copy.deepcopy(value, memo))
            return twin

        DictConfig.__getattr__, DictConfig.__deepcopy__ = attribute, deepcopy

    def _classes(self) -> None:
        from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

        of_type = self.of_type = {
            MindFormerModuleType.OPTIMIZER: "optimizer",
            MindFormerModuleType.LR: "lr_schedule",
            MindFormerModuleType.WRAPPER: "runner_wrapper",
            MindFormerModuleType.CALLBACK: "callbacks",
            MindFormerModuleType.DATASET_LOADER: "train_dataset.data_loader",
        }
        skipped = (MindFormerModuleType.CONFIG, MindFormerModuleType.MODELS)

        def class_of(module_type: Any, kind: Any) -> Any:
            named = isinstance(kind, str)
            return MindFormerRegister.get_cls(module_type, kind) if named else kind

        def from_section(cfg: Any, module_type: Any = None, *_: object, **__: object) -> None:
            if module_type in skipped:
                keys = "model_type", "architectures", "type", "auto_register"
                self.reads |= {f"{MODEL}.{key}" for key in keys}
                return
            path = vars(cfg).get("path") if hasattr(cfg, "__dict__") else None
            path, kind = path or of_type.get(module_type), dict.get(cfg, "type")
            if path and kind:
                self.arguments(path, class_of(module_type, kind))

        def named(module_type: Any = None, class_name: Any = None, **_: object) -> None:
            if of_type.get(module_type, "callbacks") != "callbacks":
                self.arguments(of_type[module_type], class_of(module_type, class_name))

        before(MindFormerRegister, "get_instance_from_cfg", from_section)
        before(MindFormerRegister, "get_instance", named)

    def arguments(self, path: str, made: Any) -> None:
        """Note the arguments of a class that MindFormers passes a section to."""
        for cls in inspect.getmro(made):
            for function in (vars(cls).get("__init__"), vars(cls).get("__new__")):
                real = inspect.unwrap(getattr(function, "__func__", function)) if function else None
                if not inspect.isfunction(real):
                    continue
                file = Path(real.__code__.co_filename)
                if not file.is_relative_to(self.root) and cls is not made:
                    continue
                parameters = inspect.signature(real).parameters.values()
                known = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
                taken = re.compile(r"kwargs(?:\.(?:get|pop)\(|\[)[\"'](\w+)")
                known += taken.findall(inspect.getsource(real))
                self.reads |= {f"{path}.{name}" for name in known}

    def _objects(self) -> None:
        from mindformers.core.context.build_context import MFContextOperator
        from mindformers.models.configuration_utils import PretrainedConfig
        from mindformers.modules.transformer import transformer as old
        from mindformers.parallel_core.config_converter import ConfigConverter
        from mindformers.parallel_core.transformer_config import TransformerConfig
        from mindformers.tools.register.config import DictConfig

        for cls, *paths in (
            (PretrainedConfig, MODEL),
            (TransformerConfig, "made"),
            (MFContextOperator, "context", ""),
            (old.TransformerOpParallelConfig, "parallel_config"),
            (old.TransformerRecomputeConfig, "recompute_config"),
            (old.TransformerSwapConfig, "swap_config"),
        ):

            def see(thing: Any, key: str, paths: list[str] = paths) -> None:
                for path in () if key.startswith("__") else paths:
                    self.note(path, key, thing)

            before(cls, "__getattribute__", see)
        convert = ConfigConverter.convert.__func__

        def converting(cls: Any, model_config: Any, is_mla_model: bool = False) -> Any:
            from mindformers.parallel_core.transformer_config_utils import ConfigLogHandler

            for source, rules in cls._get_final_mapping(ConfigLogHandler(), is_mla_model).items():
                for rule in rules if isinstance(rules, list) else [rules]:  # a list until 1.9
                    target = rule if isinstance(rule, str) else rule[0]
                    self.sources.setdefault(target, set()).add(source)
            tagged = DictConfig()
            dict.update(tagged, model_config)
            object.__setattr__(tagged, "path", MODEL)
            return convert(cls, tagged, is_mla_model)

        ConfigConverter.convert = classmethod(converting)

    def _context(self) -> None:
        from mindformers.core.context.build_context import _MSContextApplier, ms_context
        from mindformers.core.context.parallel import ParallelOperator

        category = _MSContextApplier.get_category

        def see(applier: Any, key: str) -> None:
            if category(applier, key) is not None:
                self.reads.add(f"context.{key}")

        def see_whole(**settings: Any) -> None:  # MindSpore refuses other keys, here and below
            self.reads |= {f"context.{key}.*" for key in settings}

        before(_MSContextApplier, "get_category", see)
        before(ms_context, "set_context", see_whole)
        name = "_set_ms_auto_parallel_context"
        before(ParallelOperator, name, lambda **_: self.reads.add("parallel.*"))

    def result(self) -> Observation:
        """Return what was seen; attributes of the network's configuration stand for the keys that set them."""
        from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

        for module_type, path in self.of_type.items():  # classes that a recipe may name instead
            for name, cls in MindFormerRegister.registry[module_type].items():
                typed = module_type == MindFormerModuleType.CALLBACK
                self.arguments(f"{path}.{name}" if typed else path, cls)
        found = {key for key in self.reads if not key.startswith("made.")}
        sections = MODEL, "parallel_config", "recompute_config", "swap_config"
        for target, sources in self.sources.items():
            if f"made.{target}" in self.reads:
                found |= {f"{section}.{source}" for section in sections for source in sources}
        return Observation(found, self.sources)


@in_clean_process
def observe(kinds: Sequence[str]) -> dict[str, Observation]:
    """Return which keys of the recipes of these model types are read.

    Raises:
        CompileError: MindFormers refused a recipe; the message is its own.
    """
    recipes = {kind: sections_of(*RECIPES[kind])[1] for kind in kinds}
    works = [(partial(_observe, given), kind) for kind, given in recipes.items()]
    return dict(zip(recipes, in_children(works), strict=True))


def _observe(given: dict[str, Any]) -> Observation:
    import mindspore as ms

    os.dup2(2, 1)
    devices = devices_of("recipe", given)
    device = SimulatedDevice(0, devices, library())
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context import build_context

    device._patch_communication()
    recorder = Recorder(folder() / "mindformers")
    recorder.install()
    _stand_ins()
    _local(given)
    Path("recipe.yaml").write_text(yaml.safe_dump(given, allow_unicode=True), encoding="utf-8")
    config = MindFormerConfig("recipe.yaml")
    build_context(config)
    if devices > 1:
        ms.set_auto_parallel_context(global_rank=0)
    with suppress(_BuiltError):
        Trainer(config).train()
    return recorder.result()


def _stand_ins() -> None:
    """Replace what needs other devices, and stop before the first step."""
    import mindspore as ms
    from mindspore.communication import comm_func
    from mindspore.mint import distributed

    def stop(*args: object, **kwargs: object) -> None:
        raise _BuiltError

    ms.train.Model.train = stop
    barriers = comm_func.barrier, distributed.barrier
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("barrier") in barriers:
            vars(module)["barrier"] = lambda *args, **kwargs: None


def _local(given: dict[str, Any]) -> None:
    """Let a recipe point to this machine: target, data."""
    import numpy as np
    from mindformers.dataset.blended_datasets.indexed_dataset import IndexedDatasetBuilder

    context = given["context"] = dict(given.get("context") or {})
    context["device_target"] = "CPU"
    context.pop("ascend_config", None)
    given["load_checkpoint"] = ""
    builder = IndexedDatasetBuilder("data.bin", dtype=np.int32)
    tokens = np.zeros(1 << 20, np.int32)
    builder.add_document(tokens, [len(tokens)])
    builder.finalize("data.idx")
    for name in ("train_dataset", "train_dataset_task"):
        section = given.get(name) or {}
        section = section.get("dataset_config", section)
        section["num_parallel_workers"] = 1
        loader = section.get("data_loader") or {}
        if isinstance(loader.get("config"), dict):
            loader["config"]["data_path"] = ["1", "data"]


PRETRAIN = "qwen3/pretrain_qwen3_32b_4k.yaml"
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepseek_v3": ("deepseek3/pretrain_deepseek3_671b.yaml", ()),
    "telechat3_moe": (
        "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml",
        (f"{MODEL}.offset=[0,1,1,1,1,1,0,0]",),
    ),
    "qwen3": (PRETRAIN, ()),
    "qwen3_moe": ("qwen3_moe/pretrain_qwen3_30b_a3b_4k.yaml", ()),
    "telechat3": ("telechat3/pretrain_telechat3_36b.yaml", ()),
    "glm4_moe": (
        PRETRAIN,
        (
            "model={model_config: {model_type: glm4_moe, architectures: Glm4MoeForCausalLM}}",
            "parallel_config={model_parallel: 1, pipeline_stage: 1, micro_batch_num: 1}",
        ),
    ),
}
"""A recipe that comes with MindFormers for each model type that it trains; without one, the defaults of its class."""

# Not run with `use_legacy: False` in graph mode, or lists of names that are not looked at.
_OTHER_SOURCE = re.compile(
    r"models/(llama|glm2|multi_modal|auto)/|modules/(?!transformer/transformer)|pet/|config_converter|"
    r"transformer_config_utils|/configuration_|model_config_utils|tools/register/template|core/config_args|training_args|"
    r"pynative|dataset/dataloader/ordered_index|dataset/balance_|dataset/dataloader/balance_"
)
_READINGS = [
    re.compile(pattern)
    for pattern in (
        r"(?:(?<=onfig)|(?<=onfigs)|(?<=cfg)|(?<=args))\.(\w+)",
        r"(?:get\w*|pop|hasattr|setdefault)\([^()\"']*[\"']([\w.]+)[\"']",
        r"\[[\"'](\w+)[\"']\]",
        r"[\"'](\w+)[\"'] (?:not )?in ",
    )
]
_CHECKED = re.compile(r"self\.(\w+)(?! *=[^=])")


def named(root: Path) -> dict[str, str]:
    """Return every name that MindFormers' source takes from some configuration, with the first file."""
    found: dict[str, str] = {}
    inference = re.compile(r"inference|_infer|generation")
    for path in sorted(root.rglob("*.py"), key=lambda p: (bool(inference.search(str(p))), p)):
        file = path.relative_to(root).as_posix()
        if _OTHER_SOURCE.search(file):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            patterns = [_CHECKED] if file.endswith("/transformer_config.py") else _READINGS
            for text in (text for pattern in patterns for text in pattern.findall(line)):
                for name in text.split("."):
                    found.setdefault(name, file)
    return found


def table(observations: Mapping[str, Observation]) -> dict[str, dict[str, str]]:
    """Return what is known of every key of the schema, as :mod:`telechat_moe.recipe.reads` says.

    Args:
        observations: By model type.
    """
    names, source = schema_names(Recipe), named(folder() / "mindformers")
    of_models = schema_names(ModelConfig) | schema_names(OtherModelConfig)
    reads = {key for observation in observations.values() for key in observation.reads}
    written = {
        k for k in reads if not k.startswith(MODEL) and k.rpartition(".")[2] in {"*", *names}
    }
    sections = {
        "keys": dict.fromkeys(written, ""),
        "names": {name: source[name] for name in names & source.keys()},
    }
    for kind, (reads, sources) in observations.items():
        below = {k.removeprefix(f"{MODEL}.") for k in reads if k.startswith(f"{MODEL}.")}
        attributes = {s: [t for t in sources if s in sources[t]] for s in of_models}
        places = {
            k: [source[n] for n in (k, *attributes[k]) if n in source] for k in of_models - below
        }
        sections[kind] = dict.fromkeys(below & of_models, "")
        sections[kind] |= {k: files[0] for k, files in places.items() if files}
    return sections


Tables = dict[str, dict[str, dict[str, str | None]]]


def file_of(tables: Mapping[str, dict[str, dict[str, str]]]) -> Tables:
    """Return what the file holds of tables by version: the first as it is, of others what differs from it."""
    (first, base), *others = tables.items()
    written: Tables = {first: {s: dict(sorted(keys.items())) for s, keys in base.items()}}
    for version, changed in others:
        written[version] = {
            section: {k: new.get(k) for k in sorted(old.keys() | new) if old.get(k) != new.get(k)}
            for section, old in base.items()
            for new in (changed[section],)
        }
    return written


def main() -> None:
    """Observe the recipes of all model types; write the table of the installed version."""
    tables = {pair.mindformers: table_of(pair.mindformers) for pair in PAIRS}
    tables[mindformers_version()] = table(observe(list(RECIPES)))
    FILE.write_text(json.dumps(file_of(tables), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

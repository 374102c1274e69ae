"""Observe which keys of a recipe MindFormers reads while it builds its trainer.

    python -m telechat_moe.interop.mindformers_reads > telechat_moe/recipe/schema/mindformers_reads.json

writes what ``telechat-moe check --for mindformers`` judges by (:mod:`telechat_moe.recipe.reads`): observed once per
version and model type, because one observation takes half a minute and needs MindFormers.

:func:`observe` lets MindFormers 1.9.0 go from the recipe's file to the call that would start training, as
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from telechat_moe.graph.simulated_device import SimulatedDevice, library
from telechat_moe.interop.mindformers_dryrun import devices_of, folder, sections_of
from telechat_moe.processes import in_children, in_clean_process
from telechat_moe.recipe import ModelConfig, OtherModelConfig, Recipe
from telechat_moe.recipe.reads import schema_names
from telechat_moe.versions import MINDFORMERS

MODEL = "model.model_config"
# Functions that copy a whole section; what they ask for is not thereby read.
_COPIES = frozenset(
    (
        *(
            "__deepcopy__",
            "_deepcopy_dict",
            "deepcopy",
            "to_dict",
            "to_diff_dict",
            "_to_dict_helper",
        ),
        *("_merge_a_into_b", "_dict2config", "_asdict_inner", "asdict", "convert", "wrapper"),
        *("config2dict", "_reset_config_for_save", "pprint", "__eq__", "dict_ms_dtype_to_str"),
    )
)


class Observation(NamedTuple):
    """What was seen while MindFormers built its trainer.

    Attributes:
        reads: The first reader of each key, a file and line of MindFormers; keys are dotted, with the type of a
            callback in the place of its index.
        sources: Keys of the model section by the attribute of ``TransformerConfig`` that they set.
    """

    reads: dict[str, str]
    sources: dict[str, set[str]]


class _BuiltError(Exception):
    """The trainer is built and would train now."""


class Recorder:
    """Notes who reads which key; changes classes of MindFormers, so it belongs into a child process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: dict[str, str] = {}
        self.sources: dict[str, set[str]] = {}
        self.of_type: dict[str, str] = {}

    def note(self, section: str, key: object, thing: object) -> None:
        """Note that the caller's caller reads a key of a thing, unless it only copies or makes it."""
        frame = sys._getframe(2)
        while frame and frame.f_code.co_name in ("get_value", "__getattr__"):
            frame = frame.f_back
        if not frame or frame.f_code.co_name in _COPIES or frame.f_code.co_filename == __file__:
            return
        if frame.f_code.co_name != "__post_init__" and frame.f_locals.get("self") is thing:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(self.root):
            place = f"{path.relative_to(self.root)}:{frame.f_lineno}"
            self.reads.setdefault(f"{section}.{key}".lstrip("."), place)

    def tag(self, value: Any, path: str) -> Any:
        """Tell a configuration object, and all in it, its own path."""
        from mindformers.tools.register.config import DictConfig, MindFormerConfig

        if isinstance(value, list):
            kinds = [item.get("type", "*") if isinstance(item, dict) else "*" for item in value]
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

        def noting(name: str) -> Callable[..., Any]:
            real = getattr(dict, name)

            def read(config: Any, key: object, *others: Any) -> Any:
                if "path" in vars(config):
                    self.note(vars(config)["path"], key, config)
                return real(config, key, *others)

            return read

        for name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
            setattr(DictConfig, name, noting(name))

        def attribute(config: Any, key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(key)
            if "path" in vars(config):
                self.note(vars(config)["path"], key, config)
            return dict.get(config, key)

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
        real = MindFormerRegister.get_instance_from_cfg
        real_named = MindFormerRegister.get_instance

        def class_of(module_type: Any, kind: Any) -> Any:
            named = isinstance(kind, str)
            return MindFormerRegister.get_cls(module_type, kind) if named else kind

        def from_section(cfg: Any, module_type: Any = None, default_args: Any = None) -> Any:
            path = vars(cfg).get("path") if hasattr(cfg, "__dict__") else None
            if module_type in skipped:
                for key in ("model_type", "architectures", "type", "auto_register"):
                    self.reads.setdefault(f"{MODEL}.{key}", "tools/register/register.py:322")
            path = path or of_type.get(module_type)
            if path and module_type not in skipped and "type" in cfg:
                self.arguments(path, class_of(module_type, dict.get(cfg, "type")))
            return real(cfg, module_type, default_args)

        def named(module_type: Any = None, class_name: Any = None, **kwargs: Any) -> Any:
            if module_type in of_type and of_type[module_type] != "callbacks":
                self.arguments(of_type[module_type], class_of(module_type, class_name))
            return real_named(module_type, class_name, **kwargs)

        MindFormerRegister.get_instance_from_cfg = staticmethod(from_section)
        MindFormerRegister.get_instance = staticmethod(named)

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
                place = f"{os.path.relpath(file, self.root)}:{real.__code__.co_firstlineno}"
                known = [
                    p.name
                    for p in inspect.signature(real).parameters.values()
                    if p.kind != p.VAR_KEYWORD
                ]
                known += re.findall(
                    r"kwargs(?:\.(?:get|pop)\(|\[)[\"'](\w+)", inspect.getsource(real)
                )
                for name in known:
                    self.reads.setdefault(f"{path}.{name}", place)

    def _objects(self) -> None:
        from mindformers.core.context.build_context import MFContextOperator
        from mindformers.models.configuration_utils import PretrainedConfig
        from mindformers.modules.transformer import transformer as old
        from mindformers.parallel_core.config_converter import ConfigConverter
        from mindformers.parallel_core.transformer_config import TransformerConfig
        from mindformers.tools.register.config import DictConfig

        def noting(cls: Any, *paths: str) -> None:
            real = cls.__getattribute__

            def read(thing: Any, key: str) -> Any:
                for path in () if key.startswith("__") else paths:
                    self.note(path, key, thing)
                return real(thing, key)

            cls.__getattribute__ = read

        noting(PretrainedConfig, MODEL)
        noting(TransformerConfig, "made")
        noting(MFContextOperator, "context", "")
        for cls, path in (
            (old.TransformerOpParallelConfig, "parallel_config"),
            (old.TransformerRecomputeConfig, "recompute_config"),
            (old.TransformerSwapConfig, "swap_config"),
        ):
            noting(cls, path)
        convert = ConfigConverter.convert.__func__

        def converting(cls: Any, model_config: Any, is_mla_model: bool = False) -> Any:
            from mindformers.parallel_core.transformer_config_utils import ConfigLogHandler

            for source, rules in cls._get_final_mapping(ConfigLogHandler(), is_mla_model).items():
                for rule in rules:
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

        real = _MSContextApplier.get_category

        def category(applier: Any, key: str) -> Any:
            found = real(applier, key)
            if found is not None:
                self.reads.setdefault(f"context.{key}", "core/context/build_context.py:58")
            return found

        _MSContextApplier.get_category = category
        real_context = ms_context.set_context

        def set_context(**settings: Any) -> None:
            for key in settings:  # as above
                self.reads[f"context.{key}.*"] = "core/context/build_context.py:320"
            real_context(**settings)

        ms_context.set_context = set_context
        real_set = ParallelOperator._set_ms_auto_parallel_context

        def set_parallel(**settings: Any) -> None:
            self.reads["parallel.*"] = "core/context/parallel.py:93"  # MindSpore refuses other keys
            real_set(**settings)

        ParallelOperator._set_ms_auto_parallel_context = staticmethod(set_parallel)

    def result(self) -> Observation:
        """Return what was seen; attributes of the network's configuration stand for the keys that set them."""
        from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

        for (
            module_type,
            path,
        ) in self.of_type.items():  # other classes, which a recipe may name instead
            for name, cls in MindFormerRegister.registry[module_type].items():
                typed = module_type == MindFormerModuleType.CALLBACK
                self.arguments(f"{path}.{name}" if typed else path, cls)
        found = {key: place for key, place in self.reads.items() if not key.startswith("made.")}
        for target, sources in self.sources.items():
            place = self.reads.get(f"made.{target}", "")
            for source in sources if place else ():
                for section in (MODEL, "parallel_config", "recompute_config", "swap_config"):
                    found.setdefault(f"{section}.{source}", place)
        return Observation(found, self.sources)


@in_clean_process
def observe(given: Mapping[str, Any]) -> Observation:
    """Return who reads which key of a recipe's sections.

    Raises:
        CompileError: MindFormers refused the recipe; the message is its own.
    """
    devices = devices_of("recipe", given) if given.get("use_parallel") else 1
    (found,) = in_children([(partial(_observe, given, devices), "MindFormers")])
    return found


def _observe(given: Mapping[str, Any], devices: int) -> Observation:
    import mindspore as ms

    os.dup2(2, 1)
    device = SimulatedDevice(0, devices, library())
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context import build_context

    device._patch_communication()
    recorder = Recorder(folder() / "mindformers")
    recorder.install()
    _stand_ins()
    kept = copy.deepcopy(dict(given))
    _local(kept)
    Path("recipe.yaml").write_text(yaml.safe_dump(kept, allow_unicode=True), encoding="utf-8")
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

    def stop(*args: object, **kwargs: object) -> None:
        raise _BuiltError

    ms.train.Model.train = stop
    real = comm_func.barrier
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("barrier") is real:
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
            *(
                f"parallel_config.{key}=1"
                for key in ("model_parallel", "pipeline_stage", "micro_batch_num")
            ),
        ),
    ),
}
"""A recipe that comes with MindFormers for each model type that it trains; without one, the defaults of its class."""

# Not run with `use_legacy: False`, or lists of names that are not looked at.
_OTHER_SOURCE = re.compile(
    r"models/(llama|glm2|multi_modal|auto)/|modules/(?!transformer/transformer)|pet/|config_converter|"
    r"transformer_config_utils|/configuration_|model_config_utils|tools/register/template|core/config_args|training_args"
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
    """Return every name that MindFormers' source takes from some configuration, with the first file and line."""
    found: dict[str, str] = {}
    inference = re.compile(r"inference|_infer|generation|pynative")
    for path in sorted(root.rglob("*.py"), key=lambda p: (bool(inference.search(str(p))), p)):
        file = path.relative_to(root).as_posix()
        if _OTHER_SOURCE.search(file):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            patterns = [_CHECKED] if file.endswith("/transformer_config.py") else _READINGS
            for text in (text for pattern in patterns for text in pattern.findall(line)):
                for name in text.split("."):
                    found.setdefault(name, f"{file}:{number}")
    return found


def table(observations: Mapping[str, Observation]) -> dict[str, Any]:
    """Return what is known of every key of the schema.

    Args:
        observations: By model type.
    """
    names, source = schema_names(Recipe), named(folder() / "mindformers")
    of_models = schema_names(ModelConfig) | schema_names(OtherModelConfig)
    model: dict[str, Any] = {}
    for kind, (reads, sources) in observations.items():
        below = {k.removeprefix(f"{MODEL}.") for k in reads if k.startswith(f"{MODEL}.")}
        attributes = {s: [t for t in sources if s in sources[t]] for s in of_models}
        places = {
            k: [source[n] for n in (k, *attributes[k]) if n in source] for k in of_models - below
        }
        model[kind] = {
            "read": sorted(below & of_models),
            "named": {k: places[k][0] for k in sorted(places) if places[k]},
        }
    return {
        "mindformers": MINDFORMERS,
        "read": sorted(
            {
                key
                for found in observations.values()
                for key in found.reads
                if not key.startswith(MODEL) and key.rpartition(".")[2] in {"*", *names}
            }
        ),
        "named": {name: source[name] for name in sorted(names & source.keys())},
        "model": model,
    }


def main() -> None:
    """Observe the recipes of all model types, or of those named; print the table."""
    kinds = sys.argv[1:] or list(RECIPES)
    observations = {kind: observe(sections_of(*RECIPES[kind])[1]) for kind in kinds}
    json.dump(table(observations), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()

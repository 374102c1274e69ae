"""MindFormers 2.1.0 itself against our reading of mode 1: its schema, its shipped recipes, its conversion of the network.

Its schema loads without hyper_parallel; it is asked in a process of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamic_recipe import TEXT
from mindformers21 import ask, dynamic_recipes, unpack
from recipe_mutants import Mutator
from test_mode1_rules import ACCEPTED_THERE, SECOND_NAMES, V4
from test_mode1_translate import NAMES

from telechat_moe.cli import main
from telechat_moe.recipe import RecipeError, load, mode1
from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.mode1.schema import section_of

pytestmark = [
    pytest.mark.slow(group="mindformers21"),
    pytest.mark.mindformers,
]

SCHEMA = """
import contextlib, io, yaml
from mindformers.pynative.config.config import TrainConfig
from mindformers.tools.check_rules import check_yaml_depth_before_loading
answer = []
for text in question:
    try:
        check_yaml_depth_before_loading(io.StringIO(text))
        TrainConfig.from_dict(yaml.safe_load(text))
        answer.append("")
    except Exception as error:
        answer.append(f"{type(error).__name__}: {error}")
"""
NETWORK = """
import dataclasses
from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig
classes = {"deepseek_v3": DeepseekV3Config, "telechat3_moe": TeleChat3MoeConfig}
answer = []
for section in question:
    config = classes[section.pop("model_type")](**section).convert_to_transformer_config(is_mla_model=True)
    answer.append({f.name: repr(getattr(config, f.name, None)) for f in dataclasses.fields(config)})
"""
KEYS = """
import dataclasses, inspect, json
from mindformers.pynative.config.config import TrainConfig
from mindformers.pynative.config import config as module
from mindformers.parallel_core.transformer_config_utils import ConfigLogHandler
from mindformers.models.deepseek3.config_converter_deepseek_v3 import DeepseekV3ConfigConverter
from mindformers.models.deepseek4.config_converter_deepseek_v4 import DeepseekV4ConfigConverter
from mindformers.models.qwen3.config_converter_qwen3 import Qwen3ConfigConverter
from mindformers.models.configuration_utils import PretrainedConfig
sections = {name: [f.name for f in dataclasses.fields(cls)] for name, cls in vars(module).items() if dataclasses.is_dataclass(cls)}
defaults = {}
for name, cls in vars(module).items():
    if dataclasses.is_dataclass(cls):
        defaults[name] = {f.name: f.default for f in dataclasses.fields(cls) if isinstance(f.default, (int, float, str))}
models = {}
for name, converter, mla in (("deepseek_v3", DeepseekV3ConfigConverter, True), ("deepseek_v4", DeepseekV4ConfigConverter, True),
                             ("qwen3", Qwen3ConfigConverter, False)):
    models[name] = sorted(converter._get_final_mapping(ConfigLogHandler(), mla))
answer = {"sections": sections, "defaults": defaults, "models": models, "hugging_face": sorted(PretrainedConfig().to_dict())}
"""
CONVERSION = """
from mindformers.models.deepseek4.configuration_deepseek_v4 import DeepseekV4Config
answer = []
for section in question:
    try:
        DeepseekV4Config(**section).convert_to_transformer_config(is_mla_model=True)
        answer.append(True)
    except ValueError:
        answer.append(False)
"""
REASONS = {
    "a key that nothing reads": r": unknown key; |, never read by MindFormers",
    "a section of another mode": r": a section of mode 0 in a recipe of mode 1; ",
    "a setting without effect": r", without effect: ",
    "a word, range or type that the code behind the schema needs": r"; expected |; one of ",
    "a word of YAML that is not what it seems": r"; (YAML reads|None is the text|.* is too long)",
    "two meanings of the text": r": (a second time|.* name the same setting|the anchor .* is defined a second)|a second document|the tag |an anchor or tag|a key that is not a word|the key .*, which YAML reads|<< with something else|aliases expand|is inside &",
    "what is split must be split evenly": r"; a (divisor|multiple) of |; multiples of ",
    "what fails when the devices build it": (
        r"is missing|; at most |, with |; ranges that rise|but the masks give|but model.seq_length is|so that nothing is saved|"
        r"the same setting, is |which (counts alone|mode 1 does not have)|; \d+ items|; 0 to \d+|; the layers 0 to|"
        r"divided again; True|not True, |a regular expression|without the ends of all documents"
    ),
    "a default that belongs to another network": r": left out; MindFormers takes ",
    "a text that is no recipe": r"a recipe is a YAML map|not YAML: |characters; |an empty file|levels; write it simpler|values; write it simpler",
}
"""Why ours is stricter than the schema there, and how a line of each reason reads."""
NO_NUMBER = {
    "batch_size", "mla_qkv_concat", "use_fused_ops_topkrouter", "init_method", "output_layer_init_method",
    "offset", "virtual_pipeline_model_parallel_size", "model_architecture", "topk_method", "moe_router_fusion",
    "moe_permute_fusion", "moe_grouped_gemm", "moe_shared_expert_overlap", "print_separate_loss",
    "moe_z_loss_coeff",  # 0.0 and None
    "hidden_act",  # swiglu and fusedswiglu
}  # fmt: skip
"""Fields of a network that choose kernels, are in `parallelism` there, or have two words for a value."""
FINDINGS = {
    "pretrain_deepseek3_1b_8p_pynative.yaml": {
        "checkpoint.load_worker_number",
        "parallelism.data_parallel_shard_strategy",
        "parallelism.sequence_parallel",
        "model.scaling_factor",
        "model.router_dense_type",
    },
    **{
        f"pretrain_deepseek4_{size}.yaml": {
            "checkpoint.load_worker_number",
            "lr_scheduler.lr_end",
            "lr_scheduler.total_steps",
            "model.activation_func_clamp_value",
            "model.use_pad_tokens",
        }
        for size in ("flash", "flash_reduction", "pro", "pro_reduction")
    },
}
"""What is wrong with the shipped recipes: keys that nothing reads, and settings without effect."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("mindformers21"))


def problems_of(text: str) -> list[str]:
    try:
        mode1.loads(text, path=Path("mutant.yaml"))
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


def mended(texts: dict[str, str]) -> dict[str, str]:
    """Return the shipped recipes without the keys of FINDINGS, the folder for checkpoints written."""
    result: dict[str, str] = {}
    for name, text in texts.items():
        names = "|".join(key.rpartition(".")[2] for key in FINDINGS[name])
        result[name] = re.sub(rf"(?m)^ +({names}):.*\n", "", text)
    return result


def test_the_shipped_recipes_are_judged(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = dynamic_recipes(package)
    assert set(texts) == set(FINDINGS)
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text, "utf-8")
        assert main(["check", str(path), "--devices", "8"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert {line.split(": ")[1] for line in lines if ";" in line} == FINDINGS[name]
    for name, text in mended(texts).items():
        assert problems_of(text) == [], name


def test_the_schema_there_takes_what_ours_refuses(package: Path, tmp_path: Path) -> None:
    texts: list[str] = []
    for change in ACCEPTED_THERE:
        sections: Any = yaml.safe_load(TEXT)
        sections["parallelism"] |= {"tensor_parallel": 1, "sequence_parallel": False}
        key, _, value = change.partition("=")
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
        texts.append(yaml.safe_dump(sections))
    assert set(ask(package, SCHEMA, texts, tmp_path)) == {""}
    assert ask(package, SCHEMA, [TEXT, TEXT.replace("  steps:", "  step:")], tmp_path)[0] == ""


def test_mutants_are_judged_as_there_or_for_a_reason(package: Path, tmp_path: Path) -> None:
    shipped = dynamic_recipes(package)
    recipes = {
        **shipped,
        **{f"mended {n}": text for n, text in mended(shipped).items()},
        "small": TEXT,
    }
    mutator = Mutator(45, {name: text + "\n" for name, text in recipes.items()})
    texts = [mutator.mutant()[1].encode("utf-8", "ignore").decode("utf-8") for _ in range(2000)]
    verdicts = ask(package, SCHEMA, texts, tmp_path)
    stricter, lenient, equal = Counter[str](), list[str](), Counter[bool]()
    for text, verdict in zip(texts, verdicts, strict=True):
        lines = problems_of(text)
        equal[bool(lines) == bool(verdict)] += 1
        if verdict and not lines:
            lenient.append(f"{verdict}\n{text}")
        for line in lines if not verdict else ():
            reasons = [reason for reason, pattern in REASONS.items() if re.search(pattern, line)]
            assert reasons, line
            stricter[reasons[0]] += 1
    assert not lenient, f"{len(lenient)}: {lenient[0][:4000]}"
    assert equal[True] > 500
    assert len(stricter) >= 5, stricter


def test_every_key_of_the_schema_there_is_declared_with_its_default(
    package: Path, tmp_path: Path
) -> None:
    answer = ask(package, KEYS, None, tmp_path)
    top, classes = section_keys(section_of("Mode1")), answer["sections"]
    assert set(classes["TrainConfig"]) == set(top.names)
    pairs = {
        "CheckpointConfig": "Checkpoint", "TrainingConfig": "Training", "ParallelismConfig": "Parallelism",
        "OptimizerConfig": "AdamW", "TrainDatasetConfig": "DynamicDataset", "HealthCheckpointConfig": "HealthCheckpoint",
        "TrainStateConfig": "TrainState", "TensorboardConfig": "Tensorboard", "MoeMonitorConfig": "MoeMonitor",
        "ContextConfig": "DynamicContext", "ProfilerConfig": "Profiler", "RecomputeConfig": "Recompute",
        "RecomputeCommConfig": "RecomputeComm", "SwapConfig": "Swap", "LoraConfig": "Lora", "InferenceConfig": "Inference",
    }  # fmt: skip
    for their_name, name in pairs.items():
        keys = section_keys(section_of(name))
        assert set(classes[their_name]) <= set(keys.names), their_name
        assert their_name == "OptimizerConfig" or set(classes[their_name]) == set(keys.names)
        for key, default in answer["defaults"][their_name].items():
            column = keys.fields[key]
            if key not in keys.required and not column.metadata.get("takes"):
                assert column.default == default, f"{name}.{key}"
    for model, name in (
        ("deepseek_v3", "DeepseekV3"),
        ("deepseek_v4", "DeepseekV4"),
        ("qwen3", "Qwen3"),
    ):
        ignored = {
            "scoring_func",
            "architectures",
            "model_type",
        }  # read before the conversion, or deleted there
        unmapped = (
            set(section_keys(section_of(name)).names)
            - set(answer["models"][model])
            - set(answer["hugging_face"])
        )
        assert unmapped <= ignored, f"{name}: {unmapped}"


def test_second_names_are_taken_as_there(package: Path, tmp_path: Path) -> None:
    sections = [dict[str, Any](yaml.safe_load(V4.partition("=")[2])) for _ in SECOND_NAMES]
    for section, change in zip(sections, SECOND_NAMES, strict=True):
        key, _, value = change.partition("=")
        section[key] = yaml.safe_load(value)
    answers = ask(package, CONVERSION, sections, tmp_path)
    assert dict(zip(SECOND_NAMES, answers, strict=True)) == {
        change: not expected for change, expected in SECOND_NAMES.items()
    }


def test_the_networks_are_those_that_mindformers_builds(package: Path, tmp_path: Path) -> None:
    """Their own conversion of both model sections gives the same transformer, but for what is noted."""
    translations = {name: mode1.to_mode1(load(name)) for name in NAMES}
    sections: list[dict[str, Any]] = []
    for name, translation in translations.items():
        section = load(name).given["model"]["model_config"]
        sections.append({key: value for key, value in section.items() if key != "input_sliced_sig"})
        sections.append(translation.sections["model"])
    networks = ask(package, NETWORK, sections, tmp_path)
    for name, before, after in zip(NAMES, networks[::2], networks[1::2], strict=True):
        differing = {key for key in before if before[key] != after[key]} - NO_NUMBER
        notes = " ".join(translations[name].notes)
        assert {key for key in differing if key not in notes} == set(), name

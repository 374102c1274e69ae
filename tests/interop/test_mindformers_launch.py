"""What MindFormers would silently train otherwise is refused, before it starts and in its trainer."""

import importlib.util
from pathlib import Path

import mindformers_runs as runs
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.interop import mindformers_config as config
from telechat_moe.recipe import RecipeError, load, loads
from telechat_moe.train import guard

needs_mindformers = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
TINY = "telechat3_moe/pretrain_tiny.yaml"
WITHOUT = ["telechat_moe={}"]
"""Without what MindFormers' trainer does not do."""
ACCUMULATE = [
    "runner_config.gradient_accumulation_steps=2",
    "callbacks.1.gradient_accumulation_steps=2",
]
TWO = [f"{key}={value}" for key, value in runs.DATA_PARALLEL.items()]


def test_recipes_that_fit_pass() -> None:
    config.check_launch(load(TINY), 1)
    config.check_launch(load(TINY, TWO), 2)
    config.check_launch(load("telechat3_moe/pretrain_105b_a4b_4k.yaml"), 256)


@pytest.mark.parametrize(
    ("overrides", "processes"), [([], 2), (TWO, 1)], ids=["too many", "too few"]
)
def test_processes_that_would_be_fed_zeros(overrides: list[str], processes: int) -> None:
    with pytest.raises(BadInputError, match=rf"laid out for .*{processes} process\(es\) run"):
        config.check_launch(load(TINY, overrides), processes)


def test_a_model_of_mindformers_is_not_launched() -> None:
    other = load(TINY, ["trainer.type=CausalLanguageModelingTrainer"])
    with pytest.raises(RecipeError, match=r"trainer\.type: Causal.*own model; TelechatMoeTrainer"):
        config.check_launch(other, 1)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (ACCUMULATE, "runner_config.gradient_accumulation_steps", "trains with 1 instead"),
        ([*TWO, "parallel.gradients_mean=False"], "parallel.gradients_mean", "add up"),
        (
            [*TWO, "parallel.enable_parallel_optimizer=True"],
            "parallel.enable_parallel_optimizer",
            "on Ascend only",
        ),
        (
            [*TWO, "parallel.parallel_mode=1"],
            "parallel.parallel_mode",
            "on CPU, where MindSpore has no semi-automatic parallelism",
        ),
        (
            ["use_skip_data_by_global_norm=True", "runner_wrapper.use_clip_grad=False"],
            "use_skip_data_by_global_norm",
            "no norm to compare",
        ),
    ],
)
@pytest.mark.parametrize("verb", [("check", "--for"), ("launch", "--through")], ids=lambda v: v[0])
def test_silent_traps(
    overrides: list[str],
    key: str,
    message: str,
    verb: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`check` refuses them as what starts MindFormers' trainer does."""
    sets = [x for setting in [*overrides, *WITHOUT] for x in ("--set", setting)]
    assert main([verb[0], TINY, verb[1], "mindformers", *sets]) == (1 if verb[0] == "check" else 3)
    lines = [x for x in "".join(capsys.readouterr()).splitlines() if f": {key}: " in x]
    assert len(lines) == 1
    assert message in lines[0]


def test_device_queue_on_cpu_is_refused_by_the_recipe() -> None:
    with pytest.raises(TelechatMoeError, match=r"sink_mode: True on CPU"):
        load(TINY, ["runner_config.sink_mode=True"])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("['.*norm.*']", ""),
        ("['.*norm.*', 'head']", "leaves out head.weight"),
        ("[]", "decays layers.0"),
    ],
)
def test_weight_decay_that_mindformers_cannot_express(patterns: str, message: str) -> None:
    sets = [*WITHOUT, f"telechat_moe.weight_decay_exclude={patterns}"]
    without_decay = [*sets, "optimizer.weight_decay=0.0"]
    load(TINY, without_decay, use="mindformers")
    if message:
        with pytest.raises(RecipeError, match=f"weight_decay_exclude: .*which {message}"):
            load(TINY, sets, use="mindformers")
    else:
        load(TINY, sets, use="mindformers")


def test_plugin_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin-path"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    module, name = config.REFERENCE.split(".")
    assert name in (folder / f"{module}.py").read_text()
    paths = sorted(Path(config.__file__).parents[2].glob("recipes/*/*.yaml"))
    assert paths
    for path in paths:
        assert load(path).trainer.auto_register == config.REFERENCE


class TestConfigurationRoundTrip:
    """MindFormers fills in and changes what it read; we get the recipe back from it."""

    pytestmark = needs_mindformers

    @pytest.mark.parametrize("name", [TINY, "telechat3_moe/pretrain_105b_a4b_4k.yaml"])
    def test_same_recipe(self, name: str, tmp_path: Path) -> None:
        import yaml
        from mindformers import MindFormerConfig
        from mindformers.core.parallel_config import build_parallel_config

        sections = load(name, WITHOUT).given
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(sections))
        read = MindFormerConfig(str(path))
        build_parallel_config(read)
        read.rank_id = read.local_rank = 0
        found, meant = config.recipe_of(read), loads(path.read_text())
        for section in (
            *("optimizer", "lr_schedule", "runner_config", "runner_wrapper", "model", "callbacks"),
            *("telechat_moe", "recompute_config", "train_dataset", "devices", "global_batch"),
        ):
            assert getattr(found, section) == getattr(meant, section), section

    @pytest.mark.parametrize("monitor", [None, {"monitor_on": True}, {"monitor_on": False}])
    def test_the_fixed_threshold_of_steps_that_are_skipped(
        self, monitor: dict | None, tmp_path: Path
    ) -> None:
        """Its steps take it whether the monitor is on or not, and without the section from MindFormers' own."""
        import yaml
        from mindformers import MindFormerConfig

        sections = {**load(TINY, WITHOUT).given, "use_skip_data_by_global_norm": True}
        if monitor is not None:
            limits = {"global_norm_spike_threshold": 1.4, "global_norm_spike_count_threshold": 4}
            sections["monitor_config"] = {**monitor, **limits}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(sections))
        read = MindFormerConfig(str(path))
        limits = read.monitor_config
        for recipe in (config.recipe_of(read), loads(path.read_text())):
            assert guard.of_recipe(recipe).fixed_norm == limits.global_norm_spike_threshold
            steps, _ = guard.max_in_a_row(recipe)
            assert steps == limits.global_norm_spike_count_threshold - 1

    def test_misspelt_key_on_the_command_line(self, tmp_path: Path) -> None:
        """``run_mindformer.py --model.model_config.num_expert_per_tok 4`` adds a key in silence."""
        import yaml
        from mindformers import MindFormerConfig

        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(load(TINY, WITHOUT).given))
        read = MindFormerConfig(str(path))
        read.model.model_config["num_expert_per_tok"] = 4
        read.optimizer.weight_decay = 0.2
        with pytest.raises(
            TelechatMoeError, match=r"num_expert_per_tok: unknown key.*num_experts_per_tok"
        ):
            config.recipe_of(read)
        del read.model.model_config["num_expert_per_tok"]
        assert config.recipe_of(read).optimizer.weight_decay == 0.2
        read.telechat_moe["swap"] = {"pool_mib": 64}
        with pytest.raises(TelechatMoeError, match=r"telechat_moe.swap: a section, which"):
            config.recipe_of(read)


@pytest.mark.mindspore
@pytest.mark.mindformers
def test_processes_that_the_recipe_does_not_know_are_refused_in_the_trainer(tmp_path: Path) -> None:
    """Started past our own checks, as ``run_mindformer.py`` starts it, the trainer refuses as well."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    recipe = runs.write_recipe(tmp_path)
    code = (
        "import os, sys\n"
        f"os.environ['REGISTER_PATH'] = {str(config.PLUGIN)!r}\n"
        "from mindformers import MindFormerConfig, Trainer\n"
        "from mindformers.core.context import build_context\n"
        "read = MindFormerConfig(sys.argv[1]); build_context(read); trainer = Trainer(read)\n"
        "trainer.config.device_num = 2\n"
        "trainer.train()\n"
    )
    (tmp_path / "code.py").write_text(code)
    text = runs.run(["python", "code.py", str(recipe)], tmp_path, check=False)
    assert "MindFormers would feed zeros to the processes" in text

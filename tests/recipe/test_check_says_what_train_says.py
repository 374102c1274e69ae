"""`check` refuses all that starting a recipe refuses before it is compiled, in the same words, and all of it at once."""

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from key_values import small_recipe
from recipe_draws import DEVICES, LAYOUTS, M, draw, start, with_settings

from telechat_moe.cli import main
from telechat_moe.cli.judge import judge
from telechat_moe.ops import native
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.train import preflight

Capture = pytest.CaptureFixture[str]
CAPACITY_TOKENS = {
    f"{M}moe_token_drop_policy": "probs",
    f"{M}moe_expert_capacity_factor": 1.5,
    "telechat_moe.moe_capacity_tokens": 16,
}
ZERO = {**LAYOUTS["dp2"], "parallel.enable_parallel_optimizer": True}
SIZE = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
POOL = {**LAYOUTS["dp2"], "optimizer.swap": True, "telechat_moe.swap.pool_folder": "/dev/shm"}
LARGER = {f"{M}moe_intermediate_size": 512}
PIPELINE = {
    **LAYOUTS["pp2"],
    "telechat_moe.sharding.pipeline_schedule": "absent.json",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_recipe(tmp_path_factory.mktemp("draws"))


@pytest.fixture
def place(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the data, which the settings name by relative paths."""
    folder = Path(base["output_dir"]).parent
    monkeypatch.chdir(folder)
    shutil.rmtree(base["output_dir"], ignore_errors=True)
    return folder


def written(sections: dict[str, Any], folder: Path) -> str:
    path = folder / "drawn.yaml"
    path.write_text(yaml.dump(sections, Dumper=yaml.CSafeDumper, sort_keys=False))
    return str(path)


def said(capsys: Capture, *words: str) -> tuple[int, list[str]]:
    """Run a command; return its exit code, and its lines but for how each begins and ends the list."""
    code = main(list(words))
    lines = "".join(capsys.readouterr()).removeprefix("error: ").splitlines()
    ends = ("problems: ", "nothing was started.")
    lines = [line for line in lines if not line.startswith(ends) and not line.endswith(ends)]
    return code, [line.partition("not judged: ")[2] or line for line in lines]


def disagreements(base: dict[str, Any], seeds: range, folder: Path) -> tuple[list[str], int]:
    """Return the drawn recipes that `check` accepts and their start refuses, and how many are accepted."""
    found: list[str] = []
    accepted = 0
    for seed in seeds:
        device, given, words = draw(base, seed)
        use, _ = DEVICES[device]
        recipe = judge(written(given, folder), use=use).recipe
        if recipe is None or (use == "train" and recipe.context.device_target != "CPU"):
            continue
        accepted += 1
        try:
            start(recipe, use)
            WeightShards.of(recipe)  # `ckpt reshard`
        except Exception as error:
            found.append(f"{seed}: {words}: {type(error).__name__}: {error}")
    return found, accepted


@pytest.fixture
def as_if_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of devices that there are not."""
    mindspore = pytest.importorskip("mindspore", reason="mindspore is not installed")
    monkeypatch.setattr(mindspore.communication, "create_group", lambda *_: None)


@pytest.mark.mindspore
@pytest.mark.usefixtures("as_if_ascend")
def test_what_check_accepts_starts(base: dict[str, Any], place: Path) -> None:
    found, accepted = disagreements(base, range(30), place)
    assert not found
    assert accepted >= 10


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.usefixtures("as_if_ascend")
@pytest.mark.parametrize("part", range(4))
def test_what_check_accepts_starts_at_length(part: int, base: dict[str, Any], place: Path) -> None:
    found, accepted = disagreements(base, range(1000 + 200 * part, 1200 + 200 * part), place)
    assert not found
    assert accepted >= 60


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize("first", range(5000, 5800, 100))
def test_what_check_accepts_trains(first: int, base: dict[str, Any], place: Path) -> None:
    """The first drawn recipe for CPU that is accepted is compiled and trained, until its last mixture has begun."""
    pytest.importorskip("mindspore", reason="mindspore is not installed")
    for seed in range(first, first + 100):
        device, given, words = draw(base, seed)
        quiet = {"telechat_moe.evaluation.interval": 0, "telechat_moe.sample": None}
        given = with_settings(given, quiet)
        recipe = judge(written(given, place), use="train").recipe
        if device.startswith("CPU") and recipe is not None:
            break
    else:
        pytest.fail("none is accepted")
    begins = max((phase.from_sample for phase in recipe.telechat_moe.mixture or ()), default=0)
    steps = 1 + begins // recipe.global_batch
    short = {
        "train_dataset.data_loader.sizes": [steps * recipe.global_batch, 0, 0],
        "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-3, "warmup_steps": 0},
        "telechat_moe.lr_wsd_decay_style": None,
    }
    path = written(with_settings(given, short), place)
    command = [sys.executable, "-m", "telechat_moe.cli", "train", path, "--overwrite", "--plain"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, (words, process.stderr[-3000:])


SHOWN = [
    {},
    {f"{M}compute_dtype": "bfloat16"},
    CAPACITY_TOKENS,
    {**ZERO, SIZE: -1},
    {"telechat_moe.evaluation": {"batches": 3}},
    {"context.device_target": "Ascend", **LAYOUTS["ep2"]},
    {**LAYOUTS["pp2"], "parallel_config.use_seq_parallel": False},
    {f"{M}tie_word_embeddings": True, f"{M}moe_router_load_balancing_type": "aux_loss"},
]


@pytest.mark.parametrize("settings", SHOWN, ids=repr)
def test_what_show_prints_is_judged_as_what_was_written(
    settings: dict[str, Any], base: dict[str, Any], place: Path, capsys: Capture
) -> None:
    """A default that `show` writes means what the absent key means."""
    path = written(with_settings(base, settings), place)
    assert main(["show", path]) == 0
    shown = place / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert "use_legacy_format" not in shown.read_text()
    for use in ("train", "dryrun", "mindformers"):
        plain, again = (
            {(p.key, p.found) for p in judge(str(file), use=use).problems} for file in (path, shown)
        )
        assert plain == again, use


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_and_its_overrides_are_judged_alike(
    layout: str, base: dict[str, Any], place: Path
) -> None:
    """The same settings in the file or with --set have the same problems, but for their place."""
    plain = place / "plain.yaml"
    Path(written(base, place)).rename(plain)
    for more in ({}, CAPACITY_TOKENS, ZERO, POOL, {f"{M}compute_dtype": "bf16"}):
        settings = {**more, **LAYOUTS[layout]}
        sets = [f"{key}={value}" for key, value in settings.items()]
        by_set = judge(str(plain), sets).problems
        by_file = judge(written(with_settings(base, settings), place)).problems
        texts = [sorted((p.key, p.found, p.expected) for p in found) for found in (by_set, by_file)]
        assert texts[0] == texts[1], settings


CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "capacity of fused experts": (
        CAPACITY_TOKENS,
        [("telechat_moe.moe_capacity_tokens", "16 with experts that may be fused")],
    ),
    "blocks with a capacity": (
        {**CAPACITY_TOKENS, **LAYOUTS["dp2"], "telechat_moe.moe_block_rows": 8},
        [("telechat_moe.moe_block_rows", "8 with moe_expert_capacity_factor")],
    ),
    "bfloat16 on processes": (
        {**LAYOUTS["dp2"], f"{M}compute_dtype": "bfloat16"},
        [(f"{M}compute_dtype", "bfloat16 in the graphs of CPU processes")],
    ),
    "uneven sharing of states": ({**ZERO, SIZE: 3}, [(SIZE, "3, with data_parallel 2")]),
    "no sharing of states": ({**ZERO, SIZE: 1}, [(SIZE, "1, with data_parallel 2")]),
    "a pool outside": (POOL, [("telechat_moe.swap.pool_folder", "outside of output_dir")]),
    "a pool too small": (
        {
            **LAYOUTS["tp2"],
            **LARGER,
            "optimizer.swap": True,
            "telechat_moe.swap.pool_mib": 1,
        },
        [("telechat_moe.swap.pool_mib", "1, and rank 0 swaps")],
    ),
    "a pool too small for one": (
        {**LARGER, "optimizer.swap": True, "telechat_moe.swap.pool_mib": 1},
        [("telechat_moe.swap.pool_mib", "1, and this process swaps")],
    ),
    "a model too large": (
        {f"{M}hidden_size": 500_000},
        [("model.model_config", "TiB at least, and this machine has")],
    ),
    "a model too large for any device": (
        {f"{M}hidden_size": 100_000_000},
        [("model.model_config", "TiB for each device")],
    ),
    "a folder of the user": ({"output_dir": "~/x"}, [("output_dir", "~/x, and nothing puts")]),
    "an unknown key and absent files": (
        {
            "optimizer.wieght_decay": 0.1,
            "load_checkpoint": "nowhere",
            f"{M}num_experts_per_tok": 99,
            "telechat_moe.evaluation.data_path": ["none/valid"],
            "train_dataset.data_loader.config.data_path": ["1", "none/train"],
            "telechat_moe.corpus.tokenizer": "none.json",
        },
        [
            ("optimizer.wieght_decay", "unknown key"),
            ("load_checkpoint", "nowhere: no such file"),
            (f"{M}num_experts_per_tok", "99 of 8 experts"),
            ("telechat_moe.evaluation.data_path.0", "none/valid.idx: no such file"),
            ("train_dataset.data_loader.config.data_path.1", "none/train.idx: no such file"),
            ("telechat_moe.corpus.tokenizer", "none.json"),
        ],
    ),
    "an unknown key and an absent schedule": (
        {**PIPELINE, "seed": -1, "profil": False},
        [
            ("telechat_moe.sharding.pipeline_schedule", "absent.json: cannot be read"),
            ("seed", "-1"),
            ("profil", "unknown key"),
        ],
    ),
    "a broken list of files and absent files": (
        {
            "telechat_moe.evaluation.interval": 4,
            "telechat_moe.evaluation.data_path": ["1"],
            "load_checkpoint": "nowhere",
        },
        [
            ("telechat_moe.evaluation.data_path", "['1']"),
            ("load_checkpoint", "nowhere: no such"),
        ],
    ),
    "another model and absent files": (
        {f"{M}model_type": "qwen3", "load_checkpoint": "nowhere"},
        [(f"{M}model_type", "a model of MindFormers"), ("load_checkpoint", "nowhere: no such")],
    ),
    "a wrong value and a setting without effect": (
        {f"{M}hidden_size": "wide", "telechat_moe.moe_block_rows": 8},
        [(f"{M}hidden_size", "the text 'wide'"), ("telechat_moe.moe_block_rows", "may be fused")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_check_and_train_say_the_same(
    name: str, base: dict[str, Any], place: Path, capsys: Capture
) -> None:
    settings, expected = CASES[name]
    path = written(with_settings(base, settings), place)
    before = sorted(place.rglob("*"))
    code, lines = said(capsys, "check", path)
    assert code == 1
    for key, text in expected:
        assert any(text in line.partition(f": {key}: ")[2] for line in lines), key
    assert len([line for line in lines if "what follows from it" not in line]) == len(expected)
    for verb in ("train", "launch"):
        assert said(capsys, verb, path) == (3, lines)
    processes = "4" if settings.get("use_parallel") is None else "2"
    if name != "a pool outside":  # which these runs may have
        assert said(capsys, "run-sharded", path, "--processes", processes)[1] == lines
    assert sorted(place.rglob("*")) == before, "something was written"


def test_without_the_native_library(
    base: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def load() -> None:
        raise native.NativeError("the native operators are not built")

    monkeypatch.setattr(native, "load", load)
    assert judge(written(base, place)).recipe is not None
    settings = {f"{M}compute_dtype": "bfloat16", "telechat_moe.operators.rope": "fused"}
    path = written(with_settings(base, settings), place)
    code, lines = said(capsys, "check", path)
    assert code == 1
    assert sorted(line.split(": ")[1] for line in lines) == sorted(settings)
    assert said(capsys, "train", path) == (3, lines)


@pytest.mark.mindspore
@pytest.mark.usefixtures("as_if_ascend")
@pytest.mark.parametrize("layout", ["dp2", "ep2", "pp2"])
def test_a_capacity_for_some_tokens_is_that_of_the_graphs(
    layout: str, base: dict[str, Any], place: Path
) -> None:
    """On several processes experts are plain in the graphs, and so they are where rank 0 evaluates."""
    given = with_settings(base, {**CAPACITY_TOKENS, **LAYOUTS[layout]})
    recipe = judge(written(given, place)).recipe
    assert recipe is not None
    start(recipe, "train")


KEEPS = ("train_dataset_task", "callbacks", "telechat_moe", "resume_training", "load_checkpoint")


@pytest.mark.parametrize("seed", range(60))
def test_one_mistake_is_one_problem(seed: int, base: dict[str, Any], place: Path) -> None:
    """A misspelt key or a value of another kind hides what follows from it, and makes nothing else wrong."""
    chance, given = random.Random(seed), with_settings(base, {})
    sections: list[tuple[str, dict[str, Any]]] = [
        (name, section)
        for name, section in given.items()
        if isinstance(section, dict) and name not in KEEPS
    ]
    at, section = chance.choice(sections)
    while nested := [k for k, v in section.items() if isinstance(v, dict)]:
        leaves = [k for k in section if k not in nested]
        if leaves and chance.random() < 0.3:
            break
        at, section = f"{at}.{nested[0]}", section[nested[0]]
    key = chance.choice([k for k, v in section.items() if not isinstance(v, dict)] or [""])
    if not key:
        return  # an empty section
    if at.startswith("train_dataset"):
        given["train_dataset_task"]["dataset_config"] = given["train_dataset"]
    if chance.random() < 0.5 and len(key) > 4:
        wrong = key[:-2] + key[-1] + key[-2] if key[-1] != key[-2] else f"{key}s"
        section[wrong] = section.pop(key)
    else:
        wrong, section[key] = key, {"no": "value"}
    problems = judge(written(given, place)).problems
    own = [p for p in problems if p.key.startswith((f"{at}.{wrong}", f"{at}.{key}"))]
    twice = [p for p in problems if p.key.startswith("train_dataset_task.dataset_config")]
    assert own
    assert not [str(p) for p in problems if p not in own and p not in twice]


def test_devices_are_those_of_the_layout(
    base: dict[str, Any], place: Path, capsys: Capture
) -> None:
    path = written(with_settings(base, LAYOUTS["dp2"]), place)
    assert said(capsys, "check", path)[0] == 0
    assert said(capsys, "check", path, "--devices", "2")[0] == 0
    code, lines = said(capsys, "check", path, "--devices", "4")
    assert (code, "4 devices were given" in lines[0]) == (1, True)
    hosts = place / "hosts"
    hosts.write_text("localhost slots=1\n")
    code, lines = said(capsys, "launch", path, "--nodes", str(hosts), "--print")
    assert (code, "the recipe needs 2" in lines[0]) == (3, True)


def test_only_a_word_on_an_earlier_run_is_missing(base: dict[str, Any], place: Path) -> None:
    shutil.copytree(place / "run", place / "out/checkpoints")
    (problem,) = judge(written(base, place)).problems
    assert isinstance(problem, preflight.EarlierRun)
    assert main(["train", str(place / "drawn.yaml")]) == 2

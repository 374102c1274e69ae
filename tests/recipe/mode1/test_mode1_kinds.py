"""What kind of recipe a file is: every verb says it in one line, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dynamic_recipe import TEXT
from yaml_edit import recipe_text

from telechat_moe.cli import main
from telechat_moe.recipe import RecipeError
from telechat_moe.recipe.load import sections

TINY = recipe_text("telechat3_moe/pretrain_tiny.yaml")
HYPER = """\
trainer:
  _target_: hyper_parallel.trainer.Trainer
training: {steps: 10}
accelerator: {tp_size: 2, ep_size: 4}
"""
OLDER_HYPER = """\
model: {name: glm5, config_overrides: {num_hidden_layers: 4}}
train:
  max_steps: 100
  accelerator: {tp: 1}
"""
OLD = """\
use_legacy: True
run_mode: train
trainer: {type: CausalLanguageModelingTrainer}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, num_layers: 2}
"""
MODE1 = (
    "a recipe of mode 1, MindFormers 2's dynamic graphs; `telechat-moe cp RECIPE DEST --to mindformers-1` translates it to "
    "mode 0; check, show, plan memory and plan simulate take it as it is"
)
HYPER_LINE = ":2: a recipe of HyperParallel's own trainer (`_target_`); a recipe of MindFormers; "
OLDER_LINE = HYPER_LINE.replace(":2:", ":4:").replace("_target_", "accelerator")
LEFT = (
    "runner_config: {epochs: 1, batch_size: 2}",
    "parallel_config: {model_parallel: 2}",
    "use_legacy: False",
    "lr_schedule: {type: ConstantWarmUpLR}",
    "recompute_config: {recompute: True}",
    "trainer: {type: CausalLanguageModelingTrainer}",
    "seed: 1",
    "output_dir: ./output",
    "use_parallel: True",
    "parallel: {parallel_mode: 1}",
)
VERBS = (
    ("train", "{}"),
    ("launch", "{}"),
    ("dryrun", "{}"),
    ("run-sharded", "{}", "--processes", "2"),
    ("layouts", "{}"),
    ("data", "build", "--recipe", "{}"),
    ("check", "{}", "--for", "train"),
)


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write_text


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb))
@pytest.mark.parametrize(
    ("text", "line"),
    [(TEXT, f":1: {MODE1}"), (HYPER, HYPER_LINE), (OLDER_HYPER, OLDER_LINE)],
    ids=["mode1", "hyper", "older hyper"],
)
def test_other_verbs_say_what_it_is(
    verb: tuple[str, ...], text: str, line: str, write, capsys
) -> None:
    path = write(text)
    code = main([word.format(path) for word in verb])
    printed = capsys.readouterr()
    lines = (printed.out if verb[0] == "check" else printed.err).splitlines()
    assert code == (1 if verb[0] == "check" else 3), (code, printed)
    assert line in lines[0]
    assert len([text for text in lines if ":" in text and not text.startswith("problems")]) == 1, (
        lines
    )


def test_check_and_show_take_mode_1(write, capsys) -> None:
    path = write(TEXT)
    assert main(["check", path, "--devices", "16"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("recipe.yaml: ok for mindformers 2.1.0")
    assert printed[1].endswith("note: a recipe of mode 1, judged by what MindFormers 2.1.0 reads")
    assert main(["show", path]) == 0
    printed = capsys.readouterr().out
    assert "# devices:         8" in printed
    assert "# batch:           16 samples per update" in printed
    assert "# steps:           100" in printed
    assert "save_max: 5" in printed  # a default
    assert main(["show", path, "--set", "parallelism.data_parallel_shard=-1"]) == 0
    assert "# devices:         any (--devices N)" in capsys.readouterr().out


@pytest.mark.parametrize("count", [3, len(LEFT)])
def test_leftovers_of_mode_0_are_a_line_each(count: int, write, capsys) -> None:
    """Its network and its data say which recipe it is, however many sections are left over."""
    assert main(["check", write(TEXT + "\n".join(LEFT[:count]))]) == 1
    lines = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()[:-2]]
    assert len(lines) == count
    assert all(": a section of mode 0 in a recipe of mode 1; " in line for line in lines)
    assert lines[:3] == [
        "runner_config: a section of mode 0 in a recipe of mode 1; training, or remove it",
        "parallel_config: a section of mode 0 in a recipe of mode 1; parallelism, or remove it",
        "use_legacy: a section of mode 0 in a recipe of mode 1; remove it",
    ]


def test_names_of_mode_0_lead_to_those_of_mode_1(write, capsys) -> None:
    text = TEXT.replace(
        "  expert_parallel: 4", "  expert_parallel: 4\n  pipeline_stage: 1"
    ).replace(
        "  rotary_scaling_factor: 1.0", "  rotary_scaling_factor: 1.0\n  pp_interleave_num: 2"
    )
    assert main(["check", write(text)]) == 1
    printed = capsys.readouterr().out
    assert (
        "pipeline_stage: unknown key; the section parallelism has no such key; did you mean 'parallelism.pipeline_parallel'"
        in printed
    )
    assert (
        "pp_interleave_num: unknown key; a key of mode 0; mode 1 has parallelism.pipeline_parallel_interleave_num"
        in printed
    )


def test_a_recipe_of_old_networks_is_a_line(write, capsys) -> None:
    assert main(["check", write(OLD)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "a recipe of MindFormers' old networks" in lines[0]
    assert len(lines) == 2


def test_mode_0_with_a_section_of_mode_1_stays_mode_0(write, capsys) -> None:
    assert main(["check", write(TINY + "training: {steps: 3}\n"), "--for", "dryrun"]) == 1
    assert "training: unknown key" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["mindformers-1", "mindformers-2"])
def test_a_recipe_of_another_program_is_not_translated(
    target: str, write, capsys, tmp_path
) -> None:
    assert main(["cp", write(HYPER), str(tmp_path / "dest.yaml"), "--to", target]) == 3
    (line, _) = capsys.readouterr().err.splitlines()
    assert HYPER_LINE in line


@pytest.mark.parametrize("text", [TEXT, HYPER, OLDER_HYPER])
def test_mindformers_static_graphs_are_not_made_of_another_recipe(text: str) -> None:
    with pytest.raises(RecipeError, match=r"a recipe of (mode 1|HyperParallel's own trainer)"):
        sections(text)


def test_keys_of_mode_1_have_a_reader_or_none(write, capsys) -> None:
    path = write(TEXT + "  offset: 0\n")
    assert main(["show", path, "--keys", "--json", "-"]) == 0
    keys = {row["key"]: row for row in json.loads(capsys.readouterr().out)["keys"]}
    lines = [*TEXT.splitlines(), "  offset: 0"]
    assert all(key.rpartition(".")[2] in lines[row["line"] - 1] for key, row in keys.items())
    assert {*keys} >= {"training.steps", "train_dataset.dataloader.config.seq_length"}
    assert [key for key, row in keys.items() if not row["readers"]] == ["model.offset"]
    assert keys["optimizer.betas"] == {
        "line": lines.index("  betas: [0.9, 0.95]") + 1,
        "key": "optimizer.betas",
        "value": [0.9, 0.95],
        "readers": ["mindformers"],
        "train": "refused",
    }
    assert main(["show", path, "--keys"]) == 0
    assert "training.steps" in capsys.readouterr().out

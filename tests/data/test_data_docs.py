"""Every command of docs/data.md runs, in its order."""

import copy
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from random_data import make_corpus, make_documents, make_text

from telechat_moe.cli import main
from telechat_moe.data import write_indexed
from telechat_moe.recipe import find

PAGE = Path(__file__).parents[2] / "docs/data.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `data`)")
    import pyarrow.parquet as parquet

    from telechat_moe.data.tokenizer import train_tokenizer

    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "my_texts", 30, 100)
    with arrow.CompressedOutputStream("web.jsonl.zst", "zstd") as stream:
        stream.write(b'{"text": "some text"}\n' * 20)
    parquet.write_table(arrow.table({"text": ["held out", "text"]}), "held_out.parquet")
    Path("my_model").mkdir()
    tokenizer = train_tokenizer([make_text("t", 200)], 300)
    Path("my_model/tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")

    for seed, name in enumerate(("web", "code")):
        Path(name).mkdir()
        write_indexed(f"{name}/train", make_documents(seed, 3000, 400), np.uint16)
    blend, schedule, packed = map(yaml.safe_load, blocks("yaml"))
    recipe = yaml.safe_load(find("telechat3_moe/pretrain_tiny.yaml").read_text(encoding="utf-8"))
    config = recipe["train_dataset"]["data_loader"]["config"]
    config["data_path"] = blend["train_dataset"]["data_loader"]["config"]["data_path"]
    recipe["train_dataset_task"]["dataset_config"] = recipe["train_dataset"]
    recipe["telechat_moe"]["evaluation"]["data_path"] = None
    Path("blend.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["data", "audit", "--plan", "blend.yaml"]) == 0
    whole = copy.deepcopy(recipe) | {
        "telechat_moe": recipe["telechat_moe"] | packed["telechat_moe"]
    }
    for part in (whole["train_dataset"], whole["train_dataset_task"]["dataset_config"]):
        part["data_loader"]["config"] |= packed["train_dataset"]["data_loader"]["config"]
        part["input_columns"] = part["construct_args_key"] = None
    Path("packed.yaml").write_text(yaml.safe_dump(whole))
    assert main(["data", "audit", "--plan", "packed.yaml"]) == 0
    config["data_path"] = ["web/train", "code/train"]
    recipe["telechat_moe"] |= schedule["telechat_moe"]
    Path("mixed.yaml").write_text(yaml.safe_dump(recipe))

    lines = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) == 5
    capsys.readouterr()
    for line in lines:
        assert main(line[1:]) == 0, line
    table = capsys.readouterr().out.rpartition("every sample is accounted for")[2].splitlines()
    rows = [line.split() for line in table if "/train" in line]
    assert [row[-2:] for row in rows] == [
        ["1.0000", "2000"], ["0.0000", "0"], ["0.5000", "800"],
        ["0.5000", "800"], ["0.0000", "0"], ["1.0000", "400"],
    ]  # fmt: skip

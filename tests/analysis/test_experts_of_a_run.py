"""`telechat-moe experts` on a tiny run: what it computes against the model itself, and what it says of broken runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from mindspore import Tensor
from tokenizers import Tokenizer, models

from telechat_moe.analysis.observe import Observer
from telechat_moe.cli import main
from telechat_moe.data import write_indexed
from telechat_moe.data.sample import SampleOptions, collate
from telechat_moe.ops.routing import routing_reference
from telechat_moe.recipe import load

TOKENS, TOP_K, EXPERTS = 64, 2, 8  # of a step, of a token, of a layer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 12 steps with loads of 5, 5 and 2, and two sources of validation data with other tokens."""
    folder = mini.write_data(tmp_path_factory.mktemp("data"))
    generator = np.random.default_rng(1)
    for name, low in (("low", 1), ("high", 33)):
        documents = [generator.integers(low, low + 31, 30).astype(np.uint16) for _ in range(60)]
        write_indexed(folder / name, documents, np.dtype(np.uint16))
    words = {"<|endoftext|>": 0} | {f"word{i}": i for i in range(1, 64)}
    Tokenizer(models.WordLevel(words)).save(str(folder / "tokenizer.json"))
    output = folder / "run"
    changes = {
        "telechat_moe__moe__load_interval": 5,
        "telechat_moe__evaluation__data_path": f"['{folder}/low', '{folder}/high']",
        "model__model_config__num_nextn_predict_layers": 1,
    }
    assert main(mini.arguments(folder, output, **changes)) == 0
    return output


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def records(output: Path) -> list[dict]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "expert_loads"]


def edit(output: Path, change) -> None:
    """Change the last record of loads."""
    path = output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change([line for line in lines if line["event"] == "expert_loads"][-1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def experts(output: Path, *arguments: str) -> tuple[int, dict]:
    """Run the verb with little text; return its exit code and report."""
    (output / "experts.json").unlink(missing_ok=True)
    code = main(["experts", str(output), "--sequences", "32", "--permutations", "99", *arguments])
    path = output / "experts.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def test_a_run_records_its_loads(run: Path) -> None:
    found = records(run)
    assert [(r["step"], r["steps"]) for r in found] == [(5, 5), (10, 5), (12, 2)]
    for record in found:
        loads_LE = np.array(record["loads"])
        assert loads_LE.shape == (2, EXPERTS)
        assert (loads_LE.sum(1) == record["steps"] * TOKENS * TOP_K).all()
    events = b"".join(p.read_bytes() for p in (run / "tensorboard").iterdir())
    assert b"experts/dead" in events
    assert b"expert_load_entropy/moe_layer_1" in events


def test_report_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = experts(run)
    assert code == 0
    assert found["verdict"] == "pass"
    assert found["not_judged"] == {}
    assert found["layers"] == ["layer 1", "MTP 1"]
    assert list(found["domains"].values()) == [16, 16]
    last = np.array(records(run)[-1]["loads"])
    np.testing.assert_allclose(found["load"]["tokens_per_step"][-1], last / 2, rtol=1e-5)
    np.testing.assert_allclose(found["load"]["overload"][-1], last.max(1) / last.mean(1), rtol=1e-5)
    assert [c["step"] for c in found["checkpoints"]] == [6, 9, 12]
    assert found["checkpoints"][0]["flipped"] is None
    assert all(0 < x < 1 for c in found["checkpoints"][1:] for x in c["flipped"])
    assert found["specialisation"]["significant"] == [True, True]  # the sources share no token
    assert all(pair["share"] > 0 for layer in found["coactivation"] for pair in layer["pairs"])
    assert [len(experts) for experts in found["favourites"].values()] == [EXPERTS, EXPERTS]
    out = capsys.readouterr().out
    assert "MTP 1" in out
    page = (run / "experts.html").read_text()
    assert "Specialisation by domain and depth" in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.slow
def test_routers_are_watched_as_they_are(run: Path) -> None:
    """Choices, margins and norms are those of the model's own cells, called one by one."""
    recipe = load(run / "recipe.json")
    observer = Observer(recipe, rows=4)
    observer.load(run / "checkpoints/step-00000012")
    window = np.random.default_rng(5).integers(1, 64, (8, 17)).astype(np.int32)
    batches = [collate(part, 16, SampleOptions()) for part in window.reshape(2, 4, 17)]
    seen = observer.run(batches, 2 * TOKENS - 16)  # the last sequence does not count
    assert seen.index_LTK.shape == (2, 2 * TOKENS - 16, TOP_K)

    model = observer.model
    batch = batches[0]
    id_BS, position_BS = Tensor(batch["input_ids"]), Tensor(batch["position_ids"])
    cos, sin = model.rope(position_BS)
    mask = model.mask(4, 16, None)
    x, _ = model.layers[0](model.embedding(id_BS), model.zero, cos, sin, mask)
    block = model.layers[1]
    attended = block.attention(block.input_norm(x), cos, sin, mask)
    normed, residual = block.add_attention(x, attended)
    router = block.moe.router
    logits_TE = normed.asnumpy() @ router.weight.asnumpy().T
    score_TE, index_TK, weight_TK = routing_reference(
        router.rule, logits_TE, router.expert_bias.asnumpy()
    )
    assert (np.sort(index_TK) == np.sort(seen.index_LTK[0, :TOKENS])).all()
    choice_TE = np.sort(score_TE + router.expert_bias.asnumpy(), 1)[:, ::-1]
    margin_T = choice_TE[:, TOP_K - 1] - choice_TE[:, TOP_K]
    np.testing.assert_allclose(seen.margin_LT[0, :TOKENS], margin_T, atol=1e-6)
    p_TE = score_TE / score_TE.sum(1, keepdims=True)
    entropy_T = -(p_TE * np.log(p_TE)).sum(1) / np.log(EXPERTS)
    np.testing.assert_allclose(seen.entropy_LT[0, :TOKENS], entropy_T, atol=1e-6)
    shared_TH = block.moe.shared(normed).asnumpy()
    gate, up, down = (w.asnumpy() for w in block.moe.experts.get_parameters())
    routed_TH = np.zeros_like(shared_TH)
    for t, h in enumerate(normed.asnumpy()):
        for e, weight in zip(index_TK[t], weight_TK[t], strict=True):
            inner = h @ gate[e]
            routed_TH[t] += weight * ((inner / (1 + np.exp(-inner)) * (h @ up[e])) @ down[e])
    for norm_LT, expected_TH in (
        (seen.residual_LT, residual.asnumpy()),
        (seen.shared_LT, shared_TH),
        (seen.routed_LT, routed_TH),
    ):
        np.testing.assert_allclose(
            norm_LT[0, :TOKENS], np.linalg.norm(expected_TH, axis=1), rtol=1e-4
        )


def test_one_source_is_not_judged(run: Path) -> None:
    low = run.parent / "low"
    code, found = experts(run, "--set", f"telechat_moe.evaluation.data_path=['{low}']")
    assert code == 0
    assert "give several with --text NAME=PATH" in found["not_judged"]["specialisation"]
    assert found["specialisation"] is None
    assert "Specialisation by" not in (run / "experts.html").read_text()


def test_long_documents_of_one_source_are_domains(run: Path) -> None:
    generator = np.random.default_rng(2)
    documents = [generator.integers(1, 64, n).astype(np.uint16) for n in (200, 40, 300)]
    write_indexed(run.parent / "long", documents, np.dtype(np.uint16))
    path = f"telechat_moe.evaluation.data_path=['{run.parent / 'long'}']"
    _, found = experts(run, "--set", path)
    names = list(found["domains"])
    assert [name.partition(":")[0] for name in names] == ["document 0", "document 2"]
    assert names[0].startswith(f"document 0: word{documents[0][0]}")


def test_text_of_the_user(run: Path, tmp_path: Path) -> None:
    for name, low in (("few", 1), ("many", 40)):
        words = [f"word{i}" for i in np.random.default_rng(3).integers(low, low + 20, 600)]
        lines = [json.dumps({"text": word}) for word in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    text = [x for name in ("few", "many") for x in ("--text", f"{name}={tmp_path}/{name}.jsonl")]
    code, found = experts(run, *text)
    assert code == 0
    assert found["domains"] == {"few": 16, "many": 16}
    assert experts(run, *text[:2])[0] == 2
    assert experts(run, "--text", "few")[0] == 2
    assert experts(run, *text[:2], "--text", f"none={tmp_path}/none")[0] == 3


def test_without_checkpoints_only_loads_are_judged(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    code, found = experts(copy)
    assert code == 0
    assert set(found["not_judged"]) == {
        "routers",
        "flips",
        "specialisation",
        "co-activation",
        "succession",
        "favourites",
    }
    assert "holds none" in found["not_judged"]["routers"]
    assert found["load"]["steps"] == [5, 10, 12]


def test_without_data_only_loads_are_judged(copy: Path) -> None:
    code, found = experts(copy, "--set", "telechat_moe.evaluation.data_path=['gone']")
    assert code == 0
    assert "gone.idx: no such file" in found["not_judged"]["specialisation"]


def test_without_records_dead_experts_are_not_judged(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "expert_loads" not in line))
    shutil.rmtree(copy / "checkpoints")
    code, found = experts(copy)
    assert code == 4
    assert found["verdict"] == "not judged"
    assert "telechat_moe.moe.load_interval is 5" in found["not_judged"]["load"]
    assert "dead experts are not judged" in capsys.readouterr().out


def test_dead_expert(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def starve(record: dict) -> None:
        row = record["loads"][1]
        row[3], row[4] = 0, row[3] + row[4]

    shutil.rmtree(copy / "checkpoints")
    edit(copy, starve)
    code, found = experts(copy)
    assert code == 1
    assert found["problems"] == ["MTP 1: 1 of 8 experts are dead at step 12 (3)"]
    assert "MTP 1: 1 of 8 experts are dead" in capsys.readouterr().err


def test_loads_that_do_not_sum(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lose(record: dict) -> None:
        record["loads"][1][0] -= 1

    edit(copy, lose)
    assert experts(copy) == (3, {})
    said = capsys.readouterr().err
    assert "metrics.jsonl, step 12" in said
    assert "add up to 255, tokens x top-k are 256" in said


def test_truncated_metrics(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "checkpoints")
    path = copy / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "step", "st')  # what a kill leaves
    assert experts(copy)[0] == 0
    path.write_bytes(whole.replace(b'"event": "expert_loads"', b'"event": "expert', 1))
    assert experts(copy)[0] == 3
    assert "metrics.jsonl:" in capsys.readouterr().err
    path.unlink()
    assert experts(copy)[0] == 3


def test_tokens_of_another_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "foreign"
    write_indexed(path, [np.full(200, 64, np.uint16)] * 2, np.dtype(np.uint16))
    assert experts(run, "--set", f"telechat_moe.evaluation.data_path=['{path}']")[0] == 3
    assert "token 64, but the model's vocab_size is 64" in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experts(tmp_path) == (3, {})
    assert "no recipe.json there" in capsys.readouterr().err


def test_checkpoint_of_another_model(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = json.loads((copy / "recipe.json").read_text())
    given["model"]["model_config"]["kv_lora_rank"] = 8
    (copy / "recipe.json").write_text(json.dumps(given))
    assert experts(copy) == (3, {})
    assert "does not fit the model" in capsys.readouterr().err

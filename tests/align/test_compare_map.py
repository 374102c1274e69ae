"""Runs whose calls are not the same, compared by a map under a published standard: verdicts against NumPy's own numbers."""

import json

import numpy as np
import pytest
from test_across import GRADIENT, WEIGHT, dump, four, one, tensor

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.compare.mapped import compare_linked, weight_links
from telechat_moe.tools.align.compare.profiles import Options, profile
from telechat_moe.tools.align.dump.msprobe_write import write
from telechat_moe.tools.align.dump.records import Call, Phase, TensorRecord
from telechat_moe.tools.align.maps.links import Link

CLOSE = profile("close", Options(rtol=1e-5, atol=1e-7))
GRAD = Link("gradient", ("weight w input.grad",), ("Optimizer.w.* input.grad",))


def status(outcome):
    return {row.key: row.status for row in outcome.rows}


def test_four_ranks_against_one_by_what_all_updates_have(tmp_path):
    links = weight_links(four(tmp_path))
    assert [link.name for link in links] == [
        f"w: {what}"
        for what in ("gradient", "weight before", "weight after", "momentum_buffer before", "momentum_buffer after")
    ]  # fmt: skip
    outcome = compare_linked(one(tmp_path), four(tmp_path), CLOSE, links)
    assert (outcome.verdict, set(status(outcome).values())) == ("pass", {"pass"})
    grad = next(row for row in outcome.rows if row.key == "w: gradient")
    assert (grad.shape, grad.elements) == ((8, 6), 48)  # the whole tensor, of four halves
    assert any("no other is compared" in note for note in outcome.notes)


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 + 5e-5])
def test_a_standard_says_what_numpy_says(tmp_path, factor):
    outcome = compare_linked(one(tmp_path), four(tmp_path, factor=factor), CLOSE, [GRAD])
    right = np.allclose(GRADIENT * np.float32(factor), GRADIENT, rtol=1e-5, atol=1e-7)
    assert (outcome.verdict == "pass") == right


def test_what_cannot_be_compared_is_no_pass(tmp_path):
    missing = Link("nothing", ("nothing output.0",), ("none output.0",))
    outcome = compare_linked(one(tmp_path), four(tmp_path), CLOSE, [GRAD, missing])
    assert (outcome.verdict, status(outcome)["nothing"]) == ("inconclusive", "not comparable")
    outcome = compare_linked(one(tmp_path), four(tmp_path), CLOSE, [GRAD, missing], common=True)
    assert (outcome.verdict, status(outcome)["nothing"]) == ("pass", "left out")
    with pytest.raises(BadInputError, match="1 entries does not fit: no entry names a tensor of"):
        compare_linked(one(tmp_path), four(tmp_path), CLOSE, [missing], common=True)
    assert compare_linked(one(tmp_path), four(tmp_path), CLOSE, [GRAD], steps=[7]).verdict == "inconclusive"  # fmt: skip
    stale = compare_linked(
        one(tmp_path), four(tmp_path, stale=[2]), CLOSE, weight_links(one(tmp_path))
    )
    assert stale.verdict == "diverged"
    assert status(stale)["w: weight before"] == "diverged"


def chosen(root, index, after):
    record = TensorRecord("int64", index.shape, read=lambda: index)
    calls = [
        Call("Module.gate.0.forward", "module", "Module.gate", 0, Phase.FORWARD, [], {}, [record]),
        Call("Module.out.0.forward", "module", "Module.out", 0, Phase.FORWARD, [], {}, [tensor(after)]),
    ]  # fmt: skip
    return dump(root, {0: calls})


def test_a_choice_that_comes_out_otherwise_ends_the_comparison(tmp_path):
    index = np.array([[3, 1], [0, 2], [5, 4]])
    links = [
        Link("experts", ("Module.gate.* output.0",), ("Module.gate.* output.0",), in_any_order=True),
        Link("out", ("Module.out.* output.0",), ("Module.out.* output.0",)),
    ]  # fmt: skip
    reference = chosen(tmp_path, index, WEIGHT)
    turned = compare_linked(reference, chosen(tmp_path, index[:, ::-1], WEIGHT), CLOSE, links)
    assert turned.verdict == "pass"
    other = index.copy()
    other[1, 0] = 7
    outcome = compare_linked(reference, chosen(tmp_path, other, 2 * WEIGHT), CLOSE, links)
    assert (outcome.verdict, set(status(outcome).values())) == ("inconclusive", {"not comparable"})  # fmt: skip
    assert outcome.flips["not judged"] == ["experts of step 0: 1 of 3 rows chose otherwise"]
    wrong = compare_linked(reference, chosen(tmp_path, index, 2 * WEIGHT), CLOSE, links)
    assert (wrong.verdict, status(wrong)["out"]) == ("diverged", "diverged")


def test_from_the_command_line(tmp_path, capsys):
    write(one(tmp_path), tmp_path / "a")
    write(one(tmp_path, 2 * GRADIENT), tmp_path / "b")
    names = {"name": "g", "reference": "weight w input.grad", "target": "weight w input.grad"}
    (tmp_path / "map.json").write_text(json.dumps([names]))
    a, b, given = (str(tmp_path / n) for n in ("a", "b", "map.json"))
    assert main(["align", "compare", a, a, "--map", given]) == 0
    capsys.readouterr()
    assert main(["align", "compare", a, b, "--map", given, "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(r["key"], r["status"]) for r in report["rows"]] == [("g", "diverged")]
    assert main(["align", "compare", a, b, "--map", "weights"]) == 1
    assert main(["align", "compare", a, b, "--map", given, "--said", given]) == 2
    assert main(["align", "compare", a, b, "--map", str(tmp_path / "none")]) == 3

"""Maps of two frameworks' runs: the same weights under other names, transposed, stacked, fused, in another order."""

import json
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.interop import names, upstream_names
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.maps.links import linked, read_map
from telechat_moe.tools.align.maps.tensor_map import as_json, tensor_map

CONFIG = load(
    "telechat3_moe/pretrain_tiny.yaml",
    [
        "model.model_config.num_hidden_layers=2",
        "model.model_config.n_routed_experts=4",
        "model.model_config.num_nextn_predict_layers=0",
    ],
).model_config
DRAW = np.random.default_rng(0)
OURS = {w.name: DRAW.standard_normal(w.shape).astype(np.float32) for w in weights(CONFIG)}
OURS = {k: np.ones_like(v) if k.endswith("norm.weight") else v for k, v in OURS.items()}
BIAS = "layers.1.moe.router.expert_bias"


def record(values):
    return TensorRecord(values.dtype.name, values.shape, read=lambda: values)


def run(root, values, framework):
    """A dump that holds nothing but an update of each weight."""
    calls = {}
    for name, value in values.items():
        kwargs = {"weight": record(value), "grad": record(value * 2)}
        key = f"Optimizer.{name}.SGD.0.forward"
        calls[key] = Call(
            key, "api", key.removesuffix(".0.forward"), 0, Phase.OPTIMIZER, [], kwargs, [record(value * 3)]
        )  # fmt: skip
    return Dump(root, {(0, 0): RankDump(0, 0, framework, "tensor", "L1", calls)})


def hugging_face():
    weights = {}
    for pair in names.pairs(CONFIG):
        stack = OURS[pair.name] if pair.stacked else [OURS[pair.name]]
        for name, value in zip(pair.hf, stack, strict=True):
            weights[name] = value.T if pair.stacked else value
    return weights


def megatron():
    """Megatron-Core's names and layouts, with Transformer Engine: gate and up one after another, norms fused."""
    weights = {
        "embedding.word_embeddings.weight": OURS["embedding.weight"],
        "decoder.final_layernorm.weight": OURS["norm.weight"],
        "output_layer.weight": OURS["head.weight"],
    }
    same = {
        "input_norm.weight": "input_layernorm.weight",
        "attention.q_down.weight": "self_attention.linear_q_down_proj.weight",
        "attention.q_norm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "attention.q_up.weight": "self_attention.linear_q_up_proj.weight",
        "attention.kv_down.weight": "self_attention.linear_kv_down_proj.weight",
        "attention.kv_norm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
        "attention.kv_up.weight": "self_attention.linear_kv_up_proj.weight",
        "attention.out.weight": "self_attention.linear_proj.weight",
        "ffn_norm.weight": "pre_mlp_layernorm.weight",
        "ffn.down.weight": "mlp.linear_fc2.weight",
        "moe.router.weight": "mlp.router.weight",
        "moe.router.expert_bias": "mlp.router.expert_bias",
        "moe.shared.down.weight": "mlp.shared_experts.linear_fc2.weight",
    }
    for i in range(2):
        layer_weights = {
            k.removeprefix(f"layers.{i}."): v
            for k, v in OURS.items()
            if k.startswith(f"layers.{i}.")
        }
        layer = f"decoder.layers.{i}"
        weights |= {
            f"{layer}.{there}": layer_weights[here]
            for here, there in same.items()
            if here in layer_weights
        }
        for here, there in (("ffn", "mlp"), ("moe.shared", "mlp.shared_experts")):
            if f"{here}.gate.weight" in layer_weights:
                both = layer_weights[f"{here}.gate.weight"], layer_weights[f"{here}.up.weight"]
                weights[f"{layer}.{there}.linear_fc1.weight"] = np.concatenate(both)
        for e in range(4 if "moe.experts.gate" in layer_weights else 0):
            both = np.concatenate(
                [layer_weights["moe.experts.gate"][e].T, layer_weights["moe.experts.up"][e].T]
            )
            weights[f"{layer}.mlp.experts.linear_fc1.weight{e}"] = both
            weights[f"{layer}.mlp.experts.linear_fc2.weight{e}"] = layer_weights[
                "moe.experts.down"
            ][e].T
    return weights


def mindformers():
    return upstream_names.to_upstream(OURS, CONFIG)


def nameless():
    """Hugging Face's weights under names that say nothing, some transposed, in another order."""
    weights = sorted(hugging_face().items(), key=lambda item: item[0][::-1])
    known = [(n, v) for n, v in weights if "norm" not in n and "bias" not in n]
    turned = ("experts", "o_proj", "q_a")
    return {f"p{i}": v.T if any(t in n for t in turned) else v for i, (n, v) in enumerate(known)}


@pytest.mark.parametrize("other", [hugging_face, megatron, mindformers, nameless])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_weight_is_found_with_its_gradient(other, reverse, tmp_path):
    runs = [run(tmp_path, other(), "pytorch"), run(tmp_path, OURS, "mindspore")]
    reference, target = runs[::-1] if reverse else runs
    (tmp_path / "map.json").write_text(as_json(tensor_map(reference, target)))
    links = read_map(tmp_path / "map.json")
    mapped = {name.split()[1] for k in links for name in (k.reference if reverse else k.target)}
    nothing = {n for n in OURS if "norm" in n or "bias" in n} if other is nameless else {BIAS}
    assert mapped >= {n for n in OURS if n not in nothing}
    for name, point, two in linked(reference.at(0), target.at(0), links):
        assert point.values is not None, (name, point.problem)
        assert two.values is not None, (name, two.problem)
        assert point.values.shape == two.values.shape, name
        np.testing.assert_array_equal(point.values, two.values, name)


def test_names_win_so_that_a_wrong_order_is_found(tmp_path):
    wrong = hugging_face()
    a, b = (f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in (1, 2))
    wrong[a], wrong[b] = wrong[b], wrong[a]
    reference, target = run(tmp_path, wrong, "pytorch"), run(tmp_path, OURS, "mindspore")
    links = tensor_map(reference, target)
    differ = {
        name
        for name, point, other in linked(reference.at(0), target.at(0), links)
        if not np.array_equal(point.values, other.values)
    }
    assert differ == {f"{what} of layers.1.moe.experts.up{when}" for what, when in (
        ("gradient", ""), ("weight", " before"), ("weight", " after"))}  # fmt: skip


def with_modules(root, framework, outputs):
    """A dump of a run whose named modules made tensors."""
    dump = run(root, OURS if framework == "mindspore" else megatron(), framework)
    for key, values in outputs.items():
        records = [record(value) for value in values]
        name = key.removesuffix(".0").removesuffix(".forward")
        dump.ranks[0, 0].calls[key] = Call(key, "module", name, 0, Phase.FORWARD, [], {}, records)
    return dump


@pytest.mark.parametrize("reverse", [False, True])
def test_tokens_may_be_sequence_first_and_choices_a_mask(reverse, tmp_path):
    """Megatron-Core has [S, B, H] after its embedding, and of a router the weights and a mask over all experts."""
    draw = np.random.default_rng(1)
    embedded, layer = (draw.standard_normal((6, 32)).astype(np.float32) for _ in range(2))
    weights = draw.uniform(0.1, 1.0, (6, 2)).astype(np.float32)
    experts = np.array([draw.permutation(4)[:2] for _ in range(6)], np.int32)
    dense, mask = np.zeros((6, 4), np.float32), np.zeros((6, 4), np.bool_)
    np.put_along_axis(dense, experts, weights, 1)
    np.put_along_axis(mask, experts, True, 1)
    turned = [v.reshape(2, 3, -1).swapaxes(0, 1) for v in (layer, dense, mask)]
    theirs = {
        "Module.embedding.word_embeddings.Embedding.forward.0": [embedded.reshape(2, 3, 32)],
        "Module.decoder.layers.1.TransformerLayer.forward.0": [turned[0]],
        "Module.decoder.layers.1.mlp.router.TopKRouter.forward.0": [
            v.reshape(6, 4) for v in turned[1:]
        ],
    }
    ours = {
        "Cell.embedding.Embedding.forward.0": [embedded],
        "Cell.layers.1.Block.forward.0": [layer],
        "Cell.layers.1.moe.router.Router.forward.0": [experts, weights],
    }
    runs = [
        with_modules(tmp_path, "pytorch", theirs),
        with_modules(tmp_path, "mindspore", ours),
    ][:: -1 if reverse else 1]
    (tmp_path / "map.json").write_text(as_json(tensor_map(*runs)))
    links = read_map(tmp_path / "map.json")
    points = {name: (a, b) for name, a, b in linked(runs[0].at(0), runs[1].at(0), links)}
    names = {
        "module embedding",
        "layer 1",
        "experts chosen by the router of layer 1",
        "weights chosen by the router of layer 1",
    }
    assert names <= points.keys()
    for name in names:
        first, other = (p.values for p in points[name])
        np.testing.assert_array_equal(first.reshape(other.shape), other, name)


def test_weights_of_one_name_and_other_shapes_differ(tmp_path):
    few = {k: v[:2] if k == "layers.1.moe.router.weight" else v for k, v in OURS.items()}
    runs = run(tmp_path, few, "pytorch"), run(tmp_path, OURS, "mindspore")
    finding = across(*runs).findings[0]
    assert (finding.family, finding.evidence.split(";")[0]) == (
        "settings differ",
        "[4, 128], in the reference [2, 128]",
    )


def test_experts_without_tokens_are_no_difference(tmp_path):
    """In torch they have no gradient, so the optimizer makes no update of them, and the dump lacks their names."""
    some = {k: v for k, v in hugging_face().items() if ".experts.3." not in k}
    report = across(run(tmp_path, some, "pytorch"), run(tmp_path, OURS, "mindspore"))
    assert not [f for f in report.findings if f.family == "settings differ"]


def test_the_map_that_a_comparison_makes_is_written_and_read_again(tmp_path, capsys):
    arguments = []
    for name, values, framework in (("a", hugging_face(), "pytorch"), ("b", OURS, "mindspore")):
        msprobe_write.write(run(tmp_path, values, framework), tmp_path / name)
        arguments.append(str(tmp_path / name))
    file = str(tmp_path / "map.json")
    first = main(["align", *arguments, "--json", str(tmp_path / "1"), "--map-out", file])
    targets = {name for link in read_map(Path(file)) for name in link.target}
    assert {name.split()[1] for name in targets} >= OURS.keys() - {BIAS}
    assert main(["align", *arguments, "--json", str(tmp_path / "2"), "--map", file]) == first
    judged = [json.loads((tmp_path / n).read_text())["judged"] for n in "12"]
    assert judged[0] == judged[1]
    assert main(["align", *arguments, "--map", file, "--map-out", file]) == 2
    assert main(["align", arguments[0], "--map-out", file]) == 2
    assert "need two dumps" in capsys.readouterr().err


def test_values_are_found_if_nearly_equal(tmp_path):
    near = {
        k: v + 1e-4 * DRAW.standard_normal(v.shape).astype(np.float32)
        for k, v in nameless().items()
    }
    links = tensor_map(run(tmp_path, near, "pytorch"), run(tmp_path, OURS, "mindspore"))
    names = {name.split()[1] for k in links for name in k.target}
    assert names == {n for n in OURS if "norm" not in n and "bias" not in n}


def test_other_models_are_refused(tmp_path):
    other = {"a": np.ones((3, 5), np.float32)}
    with pytest.raises(BadInputError, match="no weight of one"):
        tensor_map(run(tmp_path, other, "pytorch"), run(tmp_path, OURS, "mindspore"))


def test_fused_query_key_and_value_in_groups(tmp_path):
    """Megatron-Core's linear_qkv: for each group its queries, its key, its value."""
    q, k, v = (DRAW.standard_normal((n * 3, 16)).astype(np.float32) for n in (4, 2, 2))
    q4, k2, v2 = (x.reshape(-1, 3, 16) for x in (q, k, v))
    parts = [[q4[2 * g], q4[2 * g + 1], k2[g], v2[g]] for g in (0, 1)]
    fused = {
        "decoder.layers.0.self_attention.linear_qkv.weight": np.concatenate([*parts[0], *parts[1]])
    }
    apart = {
        f"model.layers.0.self_attn.{n}_proj.weight": x
        for n, x in zip("qkv", (q, k, v), strict=True)
    }
    runs = [run(tmp_path, apart, "pytorch"), run(tmp_path, fused, "mindspore")]
    for reference, target in (runs, runs[::-1]):
        links = tensor_map(reference, target)
        assert len(links) == 3
        for name, point, other in linked(reference.at(0), target.at(0), links):
            np.testing.assert_array_equal(point.values, other.values, name)


def test_dumps_without_an_optimizer_have_the_weights_of_their_modules(tmp_path):
    """As msprobe's levels L0 and mix record them; what enters and leaves the calls that use them is found by values."""

    def modules(values, framework, word):
        calls = {}
        for i, (name, value) in enumerate(values.items()):
            path, _, kind = name.rpartition(".")
            key = f"{word}.{path}.Linear.forward.0"
            calls[key] = Call(
                key, "module", f"{word}.{path}.Linear", 0, Phase.FORWARD, [], {}, [], {kind: record(value)}
            )  # fmt: skip
            x = DRAW.standard_normal((5, value.shape[-1])).astype(np.float32)
            key = f"Functional.linear.{i}.forward"
            inputs = [record(x), record(value)]
            calls[key] = Call(
                key, "api", "Functional.linear", i, Phase.FORWARD, inputs, {}, [record(x @ value.T)]
            )  # fmt: skip
        return Dump(tmp_path, {(0, 0): RankDump(0, 0, framework, "tensor", "mix", calls)})

    names = {"model.layers.0.self_attn.o_proj.weight", "lm_head.weight"}
    theirs = {k: v for k, v in hugging_face().items() if k in names}
    ours = {k: OURS[k] for k in ("head.weight", "layers.0.attention.out.weight")}
    reference, target = modules(theirs, "pytorch", "Module"), modules(ours, "mindspore", "Cell")
    links = tensor_map(reference, target)
    assert {k.name for k in links} == {
        f"{what} of {name}{when}"
        for name in ours
        for what, when in (("input", ""), ("output", ""), ("weight", " before"))
    }
    points = {name: point for name, point, _ in linked(reference.at(0), target.at(0), links)}
    np.testing.assert_array_equal(
        points["weight of head.weight before"].values, OURS["head.weight"]
    )
    assert points["output of head.weight"].values.shape == (5, len(OURS["head.weight"]))

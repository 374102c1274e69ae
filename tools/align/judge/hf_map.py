"""Map tensors of our runs to those of Hugging Face's DeepseekV3ForCausalLM, for ``points.py``.

The map holds gradients, weights and moments before and after their update, by the names of the weights; the outputs of
each layer, its attention and its feed-forward; the chosen experts and their weights (in any order); logits and loss.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from telechat_moe.interop.names import pairs

if TYPE_CHECKING:
    from telechat_moe.recipe import ModelConfig

PLACES = {"gradient": "input.grad", "weight": "input.weight", "updated weight": "output.0",
          "first moment": "output.1", "second moment": "output.2"}  # fmt: skip


def hf_map(config: "ModelConfig") -> list[dict[str, Any]]:
    """Return the entries of the map of a model section; the reference is Hugging Face's run."""
    return [*_activations(config), *_weights(config)]


def _activations(config: "ModelConfig") -> Iterator[dict[str, Any]]:
    def entry(name: str, theirs: str, ours: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "reference": theirs, "target": ours, **more}

    ours = "Cell.*model.embedding.*.forward.0 output.0"
    yield entry("embedding", "Module.model.embed_tokens.*.forward.* output.0", ours)
    for i in range(config.num_hidden_layers):
        theirs, ours = f"Module.model.layers.{i}", f"model.layers.{i}"
        yield entry(
            f"attention of layer {i}",
            f"{theirs}.self_attn.DeepseekV3Attention.forward.* output.0",
            f"Cell.*{ours}.attention.out.Linear.forward.0 output.0",
        )
        if i >= config.first_k_dense_replace:
            # Two operators choose experts: the fused router and TopK.
            for what, at, place in (("experts", 0, 1), ("weights", 1, 2)):
                yield entry(
                    f"{what} chosen in layer {i}",
                    f"{theirs}.mlp.gate.DeepseekV3TopkRouter.forward.* output.{at}",
                    f"Primitive.*{ours}.moe.router.*TelechatRouting.0.forward output.{place}",
                    sorted=True,
                )
        yield entry(
            f"layer {i}",
            f"{theirs}.DeepseekV3DecoderLayer.forward.* output.0",
            f"Cell.*{ours}.Block.forward.0 output.0",
        )
    ours = "Cell.*model.head.*.forward.0 output.0"
    yield entry("logits", "Module.lm_head.Linear.forward.* output.0", ours)
    ours = "Primitive.*loss*.TelechatCrossEntropy.0.forward output.0"
    yield entry("loss", "Functional.cross_entropy.*.forward output.0", ours)


def _weights(config: "ModelConfig") -> Iterator[dict[str, Any]]:
    for pair in pairs(config):
        if pair.is_bias:  # no gradient
            continue
        for what, place in PLACES.items():
            yield {
                "name": f"{what} of {pair.ours}",
                "reference": [f"weight {name} {place}" for name in pair.hf],
                "target": f"weight {pair.ours} {place}",
                **({"transposed": True} if pair.stacked else {}),
            }

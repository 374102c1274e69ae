"""Train transformers' DeepseekV3 from the weights and on the batches of a recipe of ours, one process, AdamW.

    python hf_twin.py prepare mine.yaml twin --steps 2 --set ...      # needs MindSpore: weights, batches, rates
    telechat-moe align capture --torch hf_twin.py --modules --out hf --steps 0-1 -- train twin [--plant BUG]
    telechat-moe align capture mine.yaml --out ours --steps 0-1 --set ...
    telechat-moe align bisect hf ours

Switch off in the recipe what the other has not: clipping, balance losses, multi-token prediction.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def prepare(args: argparse.Namespace) -> None:
    """Write the recipe's first weights in Hugging Face's format, its batches and learning rates."""
    from safetensors.numpy import save_file

    from telechat_moe.checkpoint import checkpoint
    from telechat_moe.interop.hf import convert
    from telechat_moe.interop.names import pairs
    from telechat_moe.recipe import load
    from telechat_moe.train.trainer import Trainer

    recipe = load(args.recipe, args.overrides)
    trainer = Trainer(recipe, overwrite=True, plain=True)
    out = Path(args.folder)
    out.mkdir(parents=True)
    weights = {
        p.name: p.asnumpy().copy()
        for p in trainer.engine.model.get_parameters()
        if not p.name.endswith((".expert_load", ".dropped"))
    }
    if args.vary:  # norms are ones and biases zeros, which would hide bugs
        draw = np.random.default_rng(0)
        for name, values in weights.items():
            if values.ndim == 1:
                spread = 0.02 if name.endswith("bias") else 0.1
                weights[name] = (values + spread * draw.standard_normal(values.shape)).astype(
                    "float32"
                )
    checkpoint.save(out / "ours", 0, {"model": weights}, {})
    save_file(weights, out / "ours.safetensors")
    convert(out / "ours.safetensors", out / "hf", recipe.model_config, "hf")
    names = recipe.train_dataset.input_columns
    with trainer.loader:
        for step in range(args.steps):
            batch = [x.asnumpy() for x in trainer.engine.read(trainer.loader)[0]]
            np.savez(out / f"batch_{step}.npz", **dict(zip(names, batch, strict=False)))
    given = recipe.optimizer
    rates = [float(trainer.schedule(step)) for step in range(args.steps)]
    optimizer = trainer.engine.optimizer
    plain = {p.name for p, on in zip(optimizer.params, optimizer.decayed, strict=True)
             if not on}  # fmt: skip
    undecayed = [hf for pair in pairs(recipe.model_config) if pair.name in plain for hf in pair.hf]
    settings = {"rates": rates, "betas": given.betas, "eps": given.eps, "decay": given.weight_decay,
                "undecayed": undecayed}  # fmt: skip
    (out / "settings.json").write_text(json.dumps(settings))


def train(args: argparse.Namespace) -> None:
    """Train as many steps as there are batches."""
    import hf_bugs
    import torch
    from torch.nn import functional
    from transformers import DeepseekV3ForCausalLM

    torch.set_num_threads(1)
    folder = Path(args.folder)
    settings = json.loads((folder / "settings.json").read_text())
    model = DeepseekV3ForCausalLM.from_pretrained(
        folder / "hf", attn_implementation="eager"
    ).train()
    model.config.use_cache = False
    plain = set(settings["undecayed"])
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if (n in plain) == out],
            "weight_decay": d,
        }
        for out, d in ((False, settings["decay"]), (True, 0.0))
    ]
    for group in groups:
        group["betas"], group["eps"] = tuple(settings["betas"]), settings["eps"]
    run = hf_bugs.Run(model, groups)
    if args.plant:
        (hf_bugs.BUGS | hf_bugs.UNSEEN)[args.plant].plant(run)
    optimizer = torch.optim.AdamW(groups, 0.0)
    for step, rate in enumerate(settings["rates"]):
        batch = {n: torch.from_numpy(x) for n, x in np.load(folder / f"batch_{step}.npz").items()}
        for group in optimizer.param_groups:
            group["lr"] = rate
        for call in run.before:
            call(step)
        optimizer.zero_grad()
        out = model(input_ids=batch["input_ids"].long(), position_ids=batch["position_ids"].long())
        keep = batch["loss_mask"].reshape(-1) > 0
        labels = run.labels(torch.where(keep, batch["labels"].reshape(-1).long(), -100))
        loss = functional.cross_entropy(out.logits.reshape(len(labels), -1), labels)
        loss.backward()
        for call in run.graded:
            call(step)
        optimizer.step()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("prepare")
    one.add_argument("recipe")
    one.add_argument("folder")
    one.add_argument("--steps", type=int, default=1)
    one.add_argument("--vary", action="store_true", help="draw norms and biases")
    one.add_argument("--set", action="append", default=[], dest="overrides")
    other = verbs.add_parser("train")
    other.add_argument("folder")
    other.add_argument("--plant", help="a bug of hf_bugs.py")
    args = parser.parse_args()
    prepare(args) if args.verb == "prepare" else train(args)


if __name__ == "__main__":
    main()

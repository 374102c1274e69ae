"""Read what the runs of a sweep did, and compare the variants of each study.

Runs of one seed see the same samples in the same order, so variants are compared seed by seed: the verdict on a variant is
``lower`` or ``higher`` where the difference from the study's first variant has one sign with every seed, ``not told apart``
where it has not, and ``not judged`` with fewer than two seeds that both have finished.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from telechat_moe.tools.sweep.cost import PredictedCost
from telechat_moe.tools.sweep.file import ModelSize, Overrides, Sweep, SweepRun
from telechat_moe.tools.sweep.runs import is_finished
from telechat_moe.train import metrics

LAST = 20
"""Steps over whose training losses the mean is taken."""


@dataclass(frozen=True)
class RunResult:
    """A run, as far as it is done.

    Attributes:
        state: ``finished``, ``failed``, ``unfinished`` or ``not begun``.
        flops: Of all its steps done.
        train_loss: Mean next-token loss of the last 20 steps, nats; None: not finished, or not finite.
        validation_loss: Next-token loss of the last evaluation, nats; None: not finished, not finite, or none.
        tokens_per_second: Median over its steps.
        curve: FLOPs spent, and loss there: of each evaluation; without any, mean training losses.
    """

    run: SweepRun
    state: str
    why: str
    steps: int
    tokens: int
    flops: float
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    curve: list[tuple[float, float]]

    @property
    def loss(self) -> float | None:
        """The validation loss; the training loss where the recipe evaluates nothing."""
        return self.validation_loss if self.run.recipe.telechat_moe.evaluation.interval else self.train_loss  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """Return the run as plain data without its curve, for JSON."""
        data = {k: v for k, v in vars(self).items() if k not in ("run", "curve")}
        run = {"variant": self.run.variant, "seed": self.run.seed, "folder": str(self.run.folder)}
        return {**run, **data, "loss": self.loss}


def read_result(run: SweepRun, size: ModelSize, failed: Mapping[Path, str]) -> RunResult:
    """Read what a run did.

    Raises:
        BadInputError: Its metrics are broken.
    """
    file = run.folder / metrics.FILE
    records = metrics.read(file) if file.exists() else []
    steps = [r for r in records if r["event"] == "step"]
    finished = is_finished(run)
    state = "finished" if finished else "failed" if run.folder in failed else "unfinished" if steps else "not begun"  # fmt: skip
    tokens_each = run.recipe.global_batch * run.recipe.model_config.seq_length
    cost = size.flops * tokens_each
    losses = [(r["step"], r["lm_loss"]) for r in steps if r.get("lm_loss") is not None]
    evaluated = [r for r in records if r["event"] == "evaluation"]
    checks = [(r["step"], r["loss"]) for r in evaluated if r.get("loss") is not None]
    last: list[Any] = [r.get("lm_loss") for r in steps[-LAST:]]
    speeds = [r["tokens_per_second"] for r in steps if r.get("tokens_per_second")]
    return RunResult(
        run,
        state,
        "" if finished else failed.get(run.folder, ""),
        len(steps),
        len(steps) * tokens_each,
        len(steps) * cost,
        fmean(last) if finished and last and None not in last else None,
        evaluated[-1].get("loss") if finished and evaluated else None,
        median(speeds) if speeds else None,
        [(step * cost, loss) for step, loss in checks or _blocks(losses)],
    )


def _blocks(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the means of blocks of steps, each with its last step."""
    width = max(1, len(losses) // 25)
    blocks = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [(block[-1][0], fmean(loss for _, loss in block)) for block in blocks]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, lowest, highest and all of some values; None where there is none."""
    if not values:
        return {"mean": None, "low": None, "high": None, "each": []}
    return {"mean": fmean(values), "low": min(values), "high": max(values), "each": list(values)}


def difference(losses: Mapping[int, float], first: Mapping[int, float]) -> dict[str, Any]:
    """Return how much higher the losses are than the first variant's, seed by seed, and the verdict."""
    apart = [losses[seed] - first[seed] for seed in losses if seed in first]
    verdict = "not judged"
    if len(apart) > 1:
        signs = {math.copysign(1.0, d) if d else 0.0 for d in apart}
        verdict = {1.0: "higher", -1.0: "lower"}.get(signs.pop(), "not told apart") if len(signs) == 1 else "not told apart"  # fmt: skip
    return {**spread(apart), "verdict": verdict}


def report(
    sweep: Sweep, runs: Sequence[RunResult], larger: Mapping[str, Mapping[str, PredictedCost]]
) -> dict[str, Any]:
    """Return everything as plain data: ``sweep.json``, ``--json``."""
    variants: dict[str, dict[str, Any]] = {}
    by_seed: dict[str, dict[int, float]] = {}
    for name, overrides in sweep.keys.variants.items():
        results = [r for r in runs if r.run.variant == name]
        by_seed[name] = {r.run.seed: r.loss for r in results if r.loss is not None}
        speeds = [r.tokens_per_second for r in results if r.tokens_per_second is not None]
        recipe, size = results[0].run.recipe, sweep.sizes[name]
        tokens = recipe.train_steps * recipe.global_batch * recipe.model_config.seq_length
        variants[name] = {
            "settings": _settings(overrides),
            "parameters": size.parameters,
            "active": size.active,
            "flops_per_token": size.flops,
            "training_tokens": tokens,
            "training_flops": tokens * size.flops,
            "loss": spread(list(by_seed[name].values())),
            "tokens_per_second": median(speeds) if speeds else None,
        }
    evaluates = bool(runs[0].run.recipe.telechat_moe.evaluation.interval)
    return {
        "file": str(sweep.file),
        "recipe": sweep.keys.recipe,
        "output_dir": str(sweep.output),
        "seeds": list(dict.fromkeys(r.run.seed for r in runs)),
        "loss": "validation" if evaluates else f"training, mean of the last {LAST} steps",
        "runs": [r.plain() for r in runs],
        "variants": variants,
        "studies": {
            name: {
                "about": study.about,
                "equal": asdict(study.equal),
                "against_first": {
                    variant: difference(by_seed[variant], by_seed[study.variants[0]])
                    for variant in study.variants
                },
            }
            for name, study in sweep.studies.items()
        },
        "larger": {
            name: {
                "recipe": model.recipe,
                "device": model.device,
                "variants": {
                    variant: {"settings": _settings(model.variants[variant]), **asdict(cost)}
                    for variant, cost in larger.get(name, {}).items()
                },
            }
            for name, model in sweep.keys.larger.items()
        },
    }


def _settings(overrides: Overrides) -> dict[str, str]:
    return dict(override.split("=", 1) for override in overrides)

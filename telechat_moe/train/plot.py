"""The picture of a run, made from its metrics.jsonl alone.

    python -m telechat_moe.train.plot metrics.jsonl loss.png
    python -m telechat_moe.train.plot one/metrics.jsonl other/metrics.jsonl both.png

Above: next-token loss in training (thin: every step, thick: smoothed) and validation (dots). Below:
the busiest expert's load over the mean, its worst layer (line) and the spread over layers (band).
Of several runs: their curves over each other, and how far each is from the first.
The suffix of the last file chooses the format (png, svg, pdf).
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.train import metrics

StepSeries = NDArray[np.float64]

# Okabe and Ito's palette: told apart with any kind of colour vision
_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "svg.hashsalt": "telechat-moe",
}


def smooth(values: StepSeries) -> StepSeries:
    """Return the mean over a centred window of 4% of the values (at least 5); a line at both ends.

    NaN is replaced by what its neighbours suggest.
    """
    finite = np.flatnonzero(~np.isnan(values))
    width = max(5, len(values) // 25) | 1
    if len(finite) == 0 or len(values) < width:
        return values
    filled = np.interp(np.arange(len(values)), finite, values[finite])
    middle = np.convolve(filled, np.full(width, 1 / width), "valid")
    x, half = np.arange(width), width // 2
    head = np.polyval(np.polyfit(x, filled[:width], 1), x[:half])
    tail = np.polyval(np.polyfit(x, filled[-width:], 1), x[-half:])
    return np.concatenate([head, middle, tail])


def _column(records: list[dict[str, Any]], key: str) -> StepSeries:
    return np.array([np.nan if r.get(key) is None else r[key] for r in records], np.float64)


def plot(source: str | Path, target: str | Path) -> Path | None:
    """Draw the run recorded in a metrics.jsonl; return ``target``, None if there is no finished step to draw.

    Raises:
        BadInputError: If ``source`` is broken.
        TelechatMoeError: If ``target`` cannot be written.
    """
    records = metrics.read(source)
    steps = [r for r in records if r["event"] == "step"]
    evaluations = [r for r in records if r["event"] == "evaluation" and r.get("loss") is not None]
    if not steps:
        return None
    with _picture(target, 2.4) as (above, below):
        _draw_loss(above, steps, evaluations)
        _draw_load(below, steps)
        below.set_xlim(0, max(r["step"] for r in steps) * 1.015 + 0.5)
        title = _finding(steps, evaluations)
        above.set_title(title, loc="left", fontweight="bold", fontsize=15, pad=24)
        offset = {"xycoords": "axes fraction", "xytext": (0, 8), "textcoords": "offset points"}
        above.annotate(_summary(steps), (0, 1), color=_GREY, **offset)
    return Path(target)


@contextmanager
def _picture(target: str | Path, ratio: float) -> Iterator[tuple[Axes, Axes]]:
    """Make two axes above each other over the steps, and write the picture at the end."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 6.0), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[ratio, 1])
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        yield above, below
        # Without the date, so that the same numbers give the same file.
        date = {".svg": "Date", ".pdf": "CreationDate"}.get(Path(target).suffix)
        try:
            figure.savefig(target, metadata={date: None} if date else {})
        except (OSError, ValueError) as error:
            raise TelechatMoeError(f"cannot write the picture {target}: {error}") from error


def relative_errors(records: list[dict[str, Any]], first: list[dict[str, Any]]) -> StepSeries:
    """Return how far a run's total losses are from those of the first one, step by step.

    Raises:
        BadInputError: The runs did not do the same steps.
    """
    steps, first_steps = ([r for r in run if r["event"] == "step"] for run in (records, first))
    if not steps or [r["step"] for r in steps] != [r["step"] for r in first_steps]:
        raise BadInputError(f"runs of {len(first_steps)} and {len(steps)} steps cannot be compared")
    a, b = _column(steps, "loss"), _column(first_steps, "loss")
    return np.abs(a - b) / np.abs(b)


def compare(runs: Mapping[str, str | Path], target: str | Path) -> dict[str, StepSeries]:
    """Draw the losses of several runs over each other; return the relative errors of each but the first.

    Args:
        runs: Name and metrics.jsonl of each.

    Raises:
        BadInputError: A file is broken, or the runs did not do the same steps.
        TelechatMoeError: If ``target`` cannot be written.
    """
    records = {name: metrics.read(path) for name, path in runs.items()}
    first, *others = records
    errors = {name: relative_errors(records[name], records[first]) for name in others}
    worst = max(float(e.max()) for e in errors.values())
    steps = [r for r in records[first] if r["event"] == "step"]
    x = _column(steps, "step")
    colours, styles = (_GREY, _BLUE, _VERMILION, _GREEN), ("-", (0, (6, 4)), (0, (1, 2.5)), "-.")
    with _picture(target, 2.0) as (above, below):
        for i, (name, run) in enumerate(records.items()):
            loss = _column([r for r in run if r["event"] == "step"], "loss")
            width = 5.0 if i == 0 else 2.2  # the first one as a band, so that all are seen
            look = {"color": colours[i % 4], "linestyle": styles[i % 4], "linewidth": width}
            above.plot(x, loss, label=name, alpha=0.35 if i == 0 else 1.0, **look)
        for i, (name, error) in enumerate(errors.items(), start=1):
            # A logarithm cannot show two losses that are equal to the last bit.
            visible = np.maximum(error, 2e-8)
            below.plot(
                x, visible, "o-", markersize=3, linewidth=1.0, color=colours[i % 4], label=name
            )
        eps = float(np.finfo(np.float32).eps)
        below.axhline(eps, color=_GREY, linestyle="--", linewidth=1.0)
        position = {"xycoords": ("axes fraction", "data"), "xytext": (0, -4), "ha": "right"}
        position |= {"textcoords": "offset points", "va": "top", "color": _GREY, "fontsize": 9}
        below.annotate("float32 epsilon", (1, eps), **position)
        below.set_yscale("log")
        below.set_ylabel(f"relative distance\nfrom {first}")
        above.set_ylabel("training loss (nats)")
        above.legend(loc="upper right")
        title = f"{len(runs)} runs, one curve: losses within {worst:.0e} in {len(x)} steps"
        above.set_title(title, loc="left", fontweight="bold", fontsize=15)
    return errors


def _draw_loss(axes: Axes, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    x, loss = _column(steps, "step"), _column(steps, "lm_loss")
    axes.plot(x, loss, color=_BLUE, alpha=0.3, linewidth=0.8)
    axes.plot(x, smooth(loss), color=_BLUE, linewidth=2.2, label="training (thin: each step)")
    if evaluations:
        step, value = _column(evaluations, "step"), _column(evaluations, "loss")
        axes.plot(step, value, "o-", color=_VERMILION, linewidth=1.2, label="validation")
        look: dict[str, Any] = {"textcoords": "offset points", "color": _VERMILION}
        place = step[-1], value[-1]
        axes.annotate(
            f"{value[-1]:.2f}", place, xytext=(3, 9), ha="right", fontweight="bold", **look
        )
    bad = x[np.isnan(loss)]
    if len(bad):
        transform = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.02), "kx", transform=transform, label="NaN or Inf")
    axes.set_ylabel("next-token loss (nats)")
    axes.legend(loc="upper right")


def _draw_load(axes: Axes, steps: list[dict[str, Any]]) -> None:
    x, load = _column(steps, "step"), _column(steps, "expert_load_max_over_mean")
    layers = [r.get("expert_load_by_layer") for r in steps]
    if np.isnan(load).all():
        axes.text(0.5, 0.5, "no experts", transform=axes.transAxes, ha="center", color=_GREY)
        return
    if all(layers) and len({len(row) for row in layers if row}) == 1:
        table = np.array(layers, np.float64)
        if table.shape[1] > 1:
            low, high = smooth(table.min(axis=1)), smooth(table.max(axis=1))
            label = f"spread over {table.shape[1]} MoE layers"
            axes.fill_between(x, low, high, color=_GREEN, alpha=0.22, linewidth=0, label=label)
    axes.plot(x, load, color=_GREEN, alpha=0.3, linewidth=0.8)
    axes.plot(x, smooth(load), color=_GREEN, linewidth=2.0, label="worst layer")
    axes.axhline(1.0, color=_GREY, linestyle="--", linewidth=1.0, label="perfect balance")
    axes.set_ylabel("busiest expert\n/ mean (tokens)")
    axes.set_ylim(0, 1.35 * float(np.nanmax(load)))  # room for the legend
    axes.legend(loc="upper right", ncols=3)


def _finding(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    last = steps[-1]["step"]
    losses = [r["lm_loss"] for r in steps if r.get("lm_loss") is not None]
    if evaluations and evaluations[-1]["step"] > 0:
        first, end = evaluations[0], evaluations[-1]
        if first["step"] == 0:
            return f"Validation loss {first['loss']:.2f} → {end['loss']:.2f} in {end['step']} steps"
        start = f", from {losses[0]:.2f} (training) at the start" if losses else ""
        return f"Validation loss {end['loss']:.2f} after {end['step']} steps{start}"
    if not losses:
        return f"No finite loss in {last} steps"
    return f"Training loss {losses[0]:.2f} → {losses[-1]:.2f} in {last} steps"


def _summary(steps: list[dict[str, Any]]) -> str:
    tokens = float(np.nansum(_column(steps, "tokens")))
    speed = float(np.nanmedian(_column(steps, "tokens_per_second")))
    minutes = float(np.nansum(_column(steps, "seconds"))) / 60
    text = f"{tokens / 1e6:.2f} million tokens in {minutes:.1f} minutes of steps, median {speed:,.0f} tokens/s"
    skipped = sum(bool(r.get("skipped")) for r in steps)
    return f"{text}, {skipped} skipped" if skipped else text


def main(argv: list[str] | None = None) -> int:
    """Run as a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m telechat_moe.train.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("metrics", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    try:
        if len(args.metrics) > 1:
            compare({path.parent.name: path for path in args.metrics}, args.picture)
        elif plot(args.metrics[0], args.picture) is None:
            raise BadInputError(f"{args.metrics[0]} has no finished step, nothing to draw")
    except TelechatMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

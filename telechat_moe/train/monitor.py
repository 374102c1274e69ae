"""What the user sees of a run: a progress line, metrics.jsonl, TensorBoard events and loss.png.

On a terminal, one line that is redrawn; otherwise (a pipe, a log file, msrun) one line of
``key=value`` for every few steps, without escape codes, fit for grep. All of it goes to stderr.
"""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from telechat_moe.data import sample_log
from telechat_moe.data.sample_log import SampleLog
from telechat_moe.errors import TelechatMoeError
from telechat_moe.moe.loads import scalars
from telechat_moe.train import metrics

_RECENT_STEPS = 20  # speed and ETA come from the median of so many steps
_REDRAWS_PER_S = 10.0
LOG_EVERY = 10
"""Steps between two plain lines; the first and the last step are always printed."""
STEP_NUMBERS = ("loss", "lm_loss", "mtp_loss", "aux_loss", "grad_norm", "learning_rate")
"""What every step has: total loss, its three terms (nats), norm of the gradient before clipping, learning rate."""


class Monitor:
    """Show and record a run. Use it in a ``with`` statement, or call `close`.

    Args:
        output_dir: Folder for ``metrics.jsonl``, ``loss.png`` and ``tensorboard/``; made if missing.
        total_steps: Steps of the whole run, those before a resume included.
        tokens_per_step: Tokens that one optimizer step learns from (global batch x sequence length).
        resume_step: Finished steps of the checkpoint that the run resumes from; later lines are
            removed from metrics.jsonl, so that no step appears twice. 0 begins a new file.
        quiet: None: live line on a terminal, otherwise plain lines. True: plain lines always.
            False: live line always.
        tensorboard: Write TensorBoard events (if tensorboardX is installed).
        stream: Where to print; stderr by default.
    """

    def __init__(
        self,
        output_dir: str | Path,
        total_steps: int,
        tokens_per_step: int,
        resume_step: int = 0,
        quiet: bool | None = None,
        *,
        tensorboard: bool = True,
        stream: IO[str] | None = None,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.total_steps = total_steps
        self.tokens_per_step = tokens_per_step
        self._resume_step = resume_step
        self._stream = stream or sys.stderr
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._steps_seen = 0
        self._closed = False
        self._drawn_at = -math.inf
        self._last: dict[str, Any] = {}
        self._last_validation: float | None = None
        self._metrics = metrics.MetricsFile(self.output_dir / metrics.FILE, resume_step)
        self._skipped = self._metrics.skipped
        self._samples: SampleLog | None = None
        self._live = self._start_live(quiet)
        self._tensorboard = self._start_tensorboard() if tensorboard else None
        if self._metrics.damaged:
            self.message(f"removed {self._metrics.damaged} damaged line(s) of {metrics.FILE}")

    def _start_live(self, quiet: bool | None) -> Live | None:
        console = Console(file=self._stream, force_terminal=True if quiet is False else None)
        if quiet or not console.is_terminal or console.is_dumb_terminal:
            return None
        live = Live(console=console, auto_refresh=False, redirect_stdout=False)
        live.start()
        return live

    def _start_tensorboard(self) -> Any:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            self.message("no TensorBoard events: tensorboardX is not installed")
            return None
        # purge_step hides what a killed run wrote after the checkpoint
        folder = str(self.output_dir / "tensorboard")
        return SummaryWriter(folder, purge_step=self._resume_step + 1, flush_secs=10)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(
        self,
        step: int,
        *,
        seconds: float,
        skipped: bool = False,
        expert_load_by_layer: Sequence[float] | None = None,
        by_source: Mapping[str, tuple[float, int]] | None = None,
        **numbers: float | None,
    ) -> None:
        """Record a finished step.

        Args:
            skipped: Whether the weights were left as they are because of a NaN, an Inf or a spike.
            expert_load_by_layer: Tokens of the busiest expert over the mean, for each MoE layer.
            by_source: Next-token loss (nats) and tokens of each source of the step's samples, where there are several.
            **numbers: :data:`STEP_NUMBERS`, and others for metrics.jsonl and TensorBoard, such as ``data_seconds``
                (those of ``seconds`` spent waiting for data), ``expert_load_max_over_mean`` (of the worst layer) and
                ``drop_rate`` (share of token-expert pairs that exceeded the capacity); None is left out.
        """
        extra = {k: v for k, v in numbers.items() if k not in STEP_NUMBERS and v is not None}
        values: dict[str, Any] = {
            **{key: float(numbers[key] or 0.0) for key in STEP_NUMBERS},
            "seconds": float(seconds),
            "tokens": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_step / seconds if seconds > 0 else 0.0,
            "skipped": bool(skipped),
            **{key: float(value) for key, value in extra.items()},
        }
        if expert_load_by_layer is not None:
            values["expert_load_by_layer"] = [float(x) for x in expert_load_by_layer]
        if by_source:
            values["loss_by_source"] = {name: loss for name, (loss, _) in by_source.items()}
            values["tokens_by_source"] = {name: tokens for name, (_, tokens) in by_source.items()}
        self._skipped += bool(skipped)
        self._metrics.write("step", step, values)
        events = {
            f"train/{key}": value
            for key, value in values.items()
            if isinstance(value, (int, float)) and key != "tokens"
        }
        layers = enumerate(values.get("expert_load_by_layer", ()))
        events |= {f"expert_load/moe_layer_{layer}": value for layer, value in layers}
        losses = values.get("loss_by_source", {}).items()
        self._write_scalars(step, events | {f"train_loss/{name}": loss for name, loss in losses})
        self._steps_seen += 1
        if self._steps_seen == 2:
            self._recent.clear()  # the first step includes compiling the graph
        self._recent.append(float(seconds))
        self._last = {"step": step, **values}
        first, last = self._steps_seen == 1, step >= self.total_steps
        if self._live is not None:
            self._draw(force=first or last)
        elif first or last or step % LOG_EVERY == 0:
            self.message(self._plain_line())

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write TensorBoard events, where there are any."""
        if self._tensorboard is not None:
            for key, value in values.items():
                self._tensorboard.add_scalar(key, value, step)

    def evaluation(
        self, step: int, loss: float, by_source: Mapping[str, float] | None = None
    ) -> None:
        """Record the mean next-token loss on the validation set after a step, in nats, and that of each source."""
        loss, losses = float(loss), {name: float(x) for name, x in (by_source or {}).items()}
        self._last_validation = loss
        sources = {"loss_by_source": losses} if losses else {}
        self._metrics.write("evaluation", step, {"loss": loss, **sources})
        by_name = {f"validation_loss/{name}": value for name, value in losses.items()}
        self._write_scalars(step, {"validation/loss": loss, **by_name})
        if self._live is not None:
            self._draw(force=True)
        else:
            rows = "".join(f" {name}={value:.4f}" for name, value in losses.items())
            self.message(f"evaluation step={step} validation_loss={loss:.4f}{rows}")

    def expert_loads(self, step: int, record: Mapping[str, Any]) -> None:
        """Record the loads of all experts since the record before, as :class:`LoadRecorder` returned them."""
        self._metrics.write("expert_loads", step, record)
        self._write_scalars(step, scalars(record))

    def saved(self, step: int, stall_ms: float) -> None:
        """Record how long training was paused for the checkpoint of a step, milliseconds."""
        self._metrics.write("save", step, {"stall_ms": float(stall_ms)})

    def moved(self, step: int, record: Mapping[str, Any]) -> None:
        """Record which experts of a layer moved after a step, or why none did."""
        self._metrics.write("move", step, record)
        if "refused" in record:
            self.message(f"step {step}: {record['refused']}")

    def begin(self, values: Mapping[str, Any]) -> None:
        """Begin to record which samples a step sees; ``values`` are those of a ``start`` in samples.jsonl."""
        path = self.output_dir / sample_log.FILE
        self._samples = SampleLog(path, fresh=self._resume_step == 0)
        self._samples.write("start", values)

    def samples(
        self,
        step: int,
        first: int,
        count: int,
        input_ids: Iterable[np.ndarray],
        applied: bool,
        order: np.ndarray | None = None,
        sources: list[int] | None = None,
    ) -> None:
        """Record which samples a step saw.

        Args:
            first: First sample, counted through all epochs.
            input_ids: Their token ids, micro-batch by micro-batch.
            order: How they were dealt (``Loader.order``); None: in their own order.
            sources: How many are of each source (``Loader.counts``); None: there is one only.
        """
        if self._samples is not None:
            content = sample_log.content(input_ids)
            values = {"first": first, "count": count, "content": content, "applied": applied}
            if order is not None:
                values["order"] = order.tolist()
            if sources is not None:
                values["sources"] = sources
            self._samples.write("step", {"step": step, **values})

    def sync(self) -> None:
        """Bring the record of samples to the disk, before a checkpoint that refers to it."""
        if self._samples is not None:
            self._samples.sync()

    def skipped(self, step: int, numbers: Mapping[str, Any], text: str) -> None:
        """Record why the update of a step was left out."""
        self._metrics.write("guard", step, {"action": "skip", **numbers})
        self.message(f"step {step} skipped: {text}")

    def rolled_back(self, record: Mapping[str, Any], text: str) -> None:
        """Record that the run went back; lines of the steps that were undone are moved away."""
        step = int(record["to_step"])
        self._metrics.rewind(step)
        self._skipped = self._metrics.skipped
        self._metrics.write("rollback", step, {"action": "rollback", **record})
        if self._samples is not None:
            self._samples.write("rollback", record)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._resume_step = step
            self._tensorboard = self._start_tensorboard()
        self.message(text)

    def message(self, text: str) -> None:
        """Print a line of text (above the live line, if there is one)."""
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
            return
        # Ctrl-C ends `| tee log`, too, and the step is still to be saved.
        with suppress(BrokenPipeError):
            print(text, file=self._stream, flush=True)

    def _speed(self) -> tuple[float, float]:
        """Return tokens per second and seconds to go."""
        seconds = statistics.median(self._recent)
        left = max(0, self.total_steps - self._last["step"])
        return (self.tokens_per_step / seconds if seconds > 0 else 0.0), seconds * left

    def _plain_line(self) -> str:
        v = self._last
        tokens_per_s, eta_s = self._speed()
        balance = "".join(
            f"{k}={v[k]:.4g} " for k in ("expert_load_max_over_mean", "drop_rate") if k in v
        )
        return (
            f"step={v['step']} total_steps={self.total_steps} loss={v['loss']:.4f} "
            f"lm_loss={v['lm_loss']:.4f} mtp_loss={v['mtp_loss']:.4f} "
            f"aux_loss={v['aux_loss']:.5f} grad_norm={v['grad_norm']:.3f} "
            f"learning_rate={v['learning_rate']:.3e} "
            f"step_ms={v['seconds'] * 1e3:.0f} tokens_per_s={tokens_per_s:.0f} "
            f"{balance}skipped_steps={self._skipped} eta_s={eta_s:.0f}"
        )

    def _segments(self) -> list[tuple[int, str, str]]:
        """Return (rank, text, style) of the live line's segments; low ranks come first if it is short."""
        v = self._last
        tokens_per_s, eta_s = self._speed()
        progress = v["step"] / self.total_steps if self.total_steps else 1.0
        parts = f"(lm {v['lm_loss']:.3f} mtp {v['mtp_loss']:.3f} aux {v['aux_loss']:.4f})"
        segments = [
            (0, f"step {v['step']}/{self.total_steps}", "bold"),
            (9, _bar(progress, 12), "cyan"),
            (1, f"loss {v['loss']:.3f}", "bold green"),
            (8, parts, "dim"),
            (6, f"grad {v['grad_norm']:.2f}", ""),
            (7, f"lr {v['learning_rate']:.1e}", ""),
            (3, f"{_short(tokens_per_s)} tok/s", ""),
            (2, f"ETA {_clock(eta_s)}", "yellow"),
        ]
        if self._last_validation is not None:
            segments.insert(4, (4, f"val {self._last_validation:.3f}", "green"))
        if "expert_load_max_over_mean" in v:
            segments.insert(-1, (5, f"load {v['expert_load_max_over_mean']:.2f}x", "magenta"))
        if v.get("drop_rate"):
            segments.insert(-1, (8, f"drop {v['drop_rate']:.1%}", "magenta"))
        if self._skipped:
            segments.insert(3, (1, f"skipped {self._skipped}", "bold red"))
        return segments

    def _draw(self, *, force: bool) -> None:
        now = time.monotonic()
        if self._live is None or not self._last:
            return
        if not force and now - self._drawn_at < 1 / _REDRAWS_PER_S:
            return
        self._drawn_at = now
        room = self._live.console.width + 1  # a segment takes two columns more than its text
        segments = self._segments()
        shown = set[str]()
        for _, text, _ in sorted(segments):
            if len(text) + 2 <= room:
                shown.add(text)
                room -= len(text) + 2
        line = Text("  ", no_wrap=True, overflow="crop", end="").join(
            Text(text, style=style) for _, text, style in segments if text in shown
        )
        self._live.update(line, refresh=True)

    def close(self) -> Path | None:
        """Finish the line and the files and draw loss.png; return its path, None if there is none."""
        if self._closed:
            return None
        self._closed = True
        if self._live is not None:
            self._draw(force=True)
            self._live.stop()
            self._live = None
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        try:
            from telechat_moe.train.plot import plot

            return plot(self._metrics.path, self.output_dir / "loss.png")
        except ImportError:
            self.message("no loss.png: matplotlib is not installed")
        except TelechatMoeError as error:  # the run is over; do not hide how it ended
            self.message(f"no loss.png: {error}")
        return None


class SilentMonitor(Monitor):
    """A monitor that shows and records nothing."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        """Return a function that does nothing, whatever the name."""
        return lambda *args, **kwargs: None


def _bar(progress: float, width: int) -> str:
    full = round(min(1.0, max(0.0, progress)) * width)
    return "━" * full + "╌" * (width - full)


def _short(number: float) -> str:
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def _clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes:02d}:{remainder:02d}"

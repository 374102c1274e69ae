"""Draws docs/machine.png, the way of a program through the virtual machine.

python docs/draw_machine.py
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

STEPS = [
    ("Python function", "k.store(x * k.rsqrt(...) * w)", "once"),
    ("graph", "16 nodes, symbol T,\na list of integers", "once, 20 us"),
    ("stages", "fused where symbols\nare equal", "once, 30 us"),
    ("bytecode", "64-bit words\nfor T = 37", "each new shape, 0.1 us"),
    ("tiles", "rows in cache, one\ninstruction at a time", "each call"),
]


def main() -> None:
    """Draw and save."""
    figure, axes = plt.subplots(figsize=(11, 3.6), dpi=130)
    axes.set_xlim(0, 11)
    axes.set_ylim(0, 3.6)
    axes.axis("off")
    for i, (title, text, when) in enumerate(STEPS):
        x = 0.15 + 2.2 * i
        axes.add_patch(
            FancyBboxPatch((x, 1.95), 1.75, 1.25, "round,pad=0.05", fc="#e8f0fe", ec="#1f6feb")
        )
        axes.text(x + 0.87, 2.97, title, ha="center", va="center", weight="bold", size=10)
        axes.text(x + 0.87, 2.42, text, ha="center", va="center", size=7.5, linespacing=1.4)
        axes.text(x + 0.87, 1.72, when, ha="center", va="center", size=7.5, color="#68707a")
        if i < len(STEPS) - 1:
            axes.annotate("", (x + 2.13, 2.57), (x + 1.85, 2.57), arrowprops={"arrowstyle": "->"})
    for row in range(5):
        tile = row // 2
        axes.add_patch(
            Rectangle(
                (0.3, 1.3 - 0.22 * row),
                3.4,
                0.18,
                fc=("#9ec5fe", "#cfe2ff", "#e9f2ff")[tile],
                ec="white",
            )
        )
    axes.text(3.85, 1.28, "tile 0: rows 0 and 1 fit the first-level cache", va="center", size=8)
    axes.text(3.85, 0.84, "tile 1", va="center", size=8)
    axes.text(3.85, 0.42, "last tile, one row", va="center", size=8)
    axes.text(7.3, 1.28, "F0   a value for every element", family="monospace", va="center", size=8)
    axes.text(7.3, 1.02, "R0   one row for all rows (w)", family="monospace", va="center", size=8)
    axes.text(
        7.3, 0.76, "C0   one number a row (the mean)", family="monospace", va="center", size=8
    )
    axes.text(7.3, 0.50, "S0   one number (1e-6)", family="monospace", va="center", size=8)
    axes.text(
        7.3,
        0.24,
        "in0, out0   memory, read and written in place",
        family="monospace",
        va="center",
        size=8,
    )
    figure.savefig(Path(__file__).with_name("machine.png"), bbox_inches="tight")


if __name__ == "__main__":
    main()

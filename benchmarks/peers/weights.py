"""Make the file of weights and token ids that the reference starts from on every device: hf_deepseek.py --weights FILE."""

import argparse

import torch
from hf_deepseek import reference


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="weights.pt")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    model, rows = reference(args.steps)
    torch.save({"weights": model.state_dict(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()

"""Weights and training between this package, Hugging Face and MindFormers.

May import everything below `launch`. Weights (`hf.py`, `names.py`, `fp8.py`, `writing.py`) need neither mindspore nor torch;
`mindformers_*.py` need MindFormers 1.9.0. Begin with `hf.py`.
"""

"""Exchange weights with Hugging Face and MindFormers, and train through MindFormers.

May import everything below `launch`. The modules for weights (`hf.py`, `names.py`, `fp8.py`, `writing.py`) need neither
mindspore nor torch; `mindformers_*.py` need MindFormers 1.9.0. Begin with `hf.py`.
"""

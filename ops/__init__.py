"""Operators, one file each: a NumPy reference, and a cell of named primitives, so that each can get a layout.

May import recipe and what is below it. Begin with ``select.py``, which chooses backends, then ``swiglu.py``.

Shape suffixes, here and in ``telechat_moe.model``: B sequences of a micro-batch, S tokens of a sequence, T tokens
(``B * S``), H hidden size, N attention heads, D width of a head, V vocabulary, E routed experts, K experts of a token,
P pairs of token and expert, F width of an expert or MLP, C rows that an expert can take, G blocks of rows, R rows of a
block or rotary width, r half of it, L MoE layers; O and I outputs and inputs of a linear layer.
"""

"""Operators of the model: one file an operator, with its cell of named primitives and its reference.

Shape suffixes, used by every file here and in ``telechat_moe.model``:

==  =======================================  ==  =======================================
B   sequences in the (micro-)batch           E   routed experts
S   tokens in a sequence                     K   experts per token
T   tokens, ``B * S``                        F   width of an expert or MLP
H   hidden size                              C   rows an expert can take (capacity)
N   attention heads                          G   blocks of rows (static block padding)
D   width of a head                          R   rows in a block, or rotary width in rope.py
V   vocabulary                               L   MoE layers
==  =======================================  ==  =======================================

A cell holds every primitive that it runs as a named attribute, so that a layout can be put on each
after building. The reference beside a cell is NumPy and defines the operator.
"""

"""Structure exploration: train a grid of recipes, compare their losses at equal cost, and predict the cost at full size.

`file.py` reads a sweep file and checks all its recipes, `runs.py` trains them one after the other and goes on after a kill,
`results.py` reads what they wrote and compares, `cost.py` predicts the step of larger models, `page.py` draws. The format of a
sweep file is in docs/sweep.md. Imports without mindspore. Begin with `file.py`.
"""

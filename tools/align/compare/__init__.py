"""Two dumps or checkpoints compared by a published standard.

May import dump, operators and judge. Begin with `compare.py`.
"""

"""What is wrong about a tensor that diverged: the kind of fault, the arguments or the settings that explain it.

May import judge and what judge may. Begin with `kinds.py`.
"""

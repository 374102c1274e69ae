"""Benchmarks of the operators beside their peers: `python -m benchmarks.ops`.

All peers of a case run in one process, in turns, on the same inputs, with results compared; torch always with malloc
tuned (:data:`TUNED_MALLOC`): without it a third of its time is page faults, and we would look better than we are.
"""

TUNED_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}

"""The table of fault classes by area; importing it fills :data:`~benchmarks.align_faults.faults.CLASSES`."""

from benchmarks.align_faults.classes import arithmetic as arithmetic
from benchmarks.align_faults.classes import distributed as distributed
from benchmarks.align_faults.classes import training as training
from benchmarks.align_faults.faults import AREAS, CLASSES

# What is drawn from the table depends on its order.
_ROWS = sorted(CLASSES.items(), key=lambda row: AREAS.index(row[1].area))
CLASSES.clear()
CLASSES.update(_ROWS)

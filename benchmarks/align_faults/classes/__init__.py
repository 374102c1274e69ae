"""The table of fault classes by area; importing it fills :data:`~benchmarks.align_faults.faults.CLASSES`."""

# In this order: what is drawn from the table depends on it.
# isort: off
from benchmarks.align_faults.classes import forward as forward
from benchmarks.align_faults.classes import backward as backward
from benchmarks.align_faults.classes import reduction as reduction
from benchmarks.align_faults.classes import optimizer as optimizer
from benchmarks.align_faults.classes import routing as routing
from benchmarks.align_faults.classes import collectives as collectives
from benchmarks.align_faults.classes import sharding as sharding
from benchmarks.align_faults.classes import precision as precision
from benchmarks.align_faults.classes import data as data
from benchmarks.align_faults.classes import bits as bits
# isort: on

"""The table of fault classes by area; importing it fills :data:`~telechat_moe.tools.align.faultbench.faults.CLASSES`."""

# In this order: what is drawn from the table depends on it.
# isort: off
from telechat_moe.tools.align.faultbench.classes import forward as forward
from telechat_moe.tools.align.faultbench.classes import backward as backward
from telechat_moe.tools.align.faultbench.classes import reduction as reduction
from telechat_moe.tools.align.faultbench.classes import optimizer as optimizer
from telechat_moe.tools.align.faultbench.classes import routing as routing
from telechat_moe.tools.align.faultbench.classes import collectives as collectives
from telechat_moe.tools.align.faultbench.classes import sharding as sharding
from telechat_moe.tools.align.faultbench.classes import precision as precision
from telechat_moe.tools.align.faultbench.classes import data as data
from telechat_moe.tools.align.faultbench.classes import bits as bits
# isort: on

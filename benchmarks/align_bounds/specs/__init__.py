"""Every operator of ``operators/``: how arguments are drawn, and programs that compute it correctly."""

from benchmarks.align_bounds.specs import elementwise as elementwise
from benchmarks.align_bounds.specs import indices as indices
from benchmarks.align_bounds.specs import losses as losses
from benchmarks.align_bounds.specs import moves as moves
from benchmarks.align_bounds.specs import products as products
from benchmarks.align_bounds.specs import reductions as reductions
from benchmarks.align_bounds.specs import updates as updates
from benchmarks.align_bounds.specs.table import SPECS as SPECS

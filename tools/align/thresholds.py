"""Every threshold of a verdict, with what it rests on.

Derived: from the rounding of operators. Measured: on correct pairs, which stay below it by the factor that is named.
Chosen: a limit beyond which no pass would mean anything, or one that only leaves more unjudged.
"""

SIGMAS = 8.0
"""Standard deviations in the bound of an operator. Derived; for 10^8 normal errors 6 would suffice, but the sizes are estimates, too."""

FUNCTION_ULPS = 4.0
"""Units in the last place of exp, log, tanh. Derived: what vector libraries document for float32."""

ENOUGH = 0.95
"""Share of the calls and of the bytes of each phase that must be judged for a pass. Chosen."""

VAGUE = 0.35
"""Relative distance that may not be allowed. Chosen: exchanged rows differ by 1.4, so beyond it a pass would mean nothing."""

OMITTED = 0.05
"""Share of rows, as of tokens that were routed otherwise, that a pass may leave out. Chosen."""

BOTH_WRONG = 4.0
"""How many times the excess of the reference's own call a target's excess is no difference of the runs. Chosen."""

# ------------------------------------------------------------------ by the other run

BEYOND = 8.0
"""By how much outputs may exceed the expected answer to their inputs' distance. Measured."""

GAINS = 1.0, 8.0
"""The smallest and the largest gain that peers or rows can show. Chosen."""

CANCELS = 256.0
"""The largest gain of a row that an operator makes small. Chosen."""

PEAK = 40.0
"""Distance of one element over the root mean square of all. Measured; normal noise of 10^9 elements has 6."""

UNEVEN = 16.0
"""Largest distance of a row or column over the median, from which on some rows differ for another reason. Chosen: it leaves more unjudged."""

OTHER_VALUES = 1.2
"""Relative distance that shows other values, whatever the noise. Derived: independent values of one size differ by 1.41."""

CHOSEN_WITHIN = 0.25
"""Share of the rows of a module that choices within it, which a dump of modules lacks, may make differ. Chosen: it leaves more unjudged."""

FLIPS = 0.01
"""Expected number of choices that noise flips from which on some may be. Chosen: it leaves more unjudged."""

KERNEL_ROUNDINGS = 16.0
"""Roundings within a kernel, besides its sums, and within the scores of a choice. Derived: four functions of 4 units."""

# ------------------------------------------------------------------ edges of the data flow

EARLIER = 4.0
"""How much further than earlier outputs an input may be from the reference's, where the calls between are not in the dumps. Measured."""

CONVERTED = 1e-5
"""By how much the conversion of a checkpoint may move weights. Chosen; one update moves them more."""

# ------------------------------------------------------------------ layouts and frameworks

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 0.25, "float16": 6e-2}
"""The largest relative L2 distance between whole tensors of two correct runs, by type, where it cannot be derived (``propagate.py``).

Measured: in correct pairs of the fault benchmark (30 layouts) the gradients of the first step differ by 10 to 14
roundings of the narrower type (median over pairs of the worst gradient), by 49 at most in any type. Allowed are 335 in
float32, 128 or more in narrower types.
"""

AMPLIFIED = 8.0
"""How much further apart gradients may be than their weights. Measured: 5 in the median of such pairs."""

FIRST_ORDER = 0.04
"""Distances from which on a derivation to first order is not exact. Derived: its square is a rounding of bfloat16."""

NEAR = 0.1
"""Mean difference (``shards.py``) of tensors that differ by rounding, and of ranks that have one micro-batch. Chosen."""

WRONG_SHARE = 0.5
"""Of the tensors after a first wrong one, how many must be wrong, too. Chosen; weights do not follow it."""

"""What the model computes: multi-latent attention, router, experts, multi-token prediction, losses.

Cells hold named primitives and no parallel numbers; ``telechat_moe.sharding`` puts layouts on them.
"""

from telechat_moe.model.causal_lm import CausalLM, Logits
from telechat_moe.model.init import initialize

__all__ = ["CausalLM", "Logits", "initialize"]

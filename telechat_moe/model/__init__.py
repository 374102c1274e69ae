"""What the model computes: multi-latent attention, router, experts, multi-token prediction, losses.

Cells hold named primitives and know no rank, group or collective; ``telechat_moe.sharding`` puts layouts on them and
replaces those typed ``nn.Cell``. May import ops and recipe. Begin with ``causal_lm.py``.
"""

from telechat_moe.model.causal_lm import CausalLM, Logits
from telechat_moe.model.init import initialize

__all__ = ["CausalLM", "Logits", "initialize"]

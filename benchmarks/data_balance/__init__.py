"""How level `telechat_moe.balance_attention` makes the ranks' attention, and what a step gains by it."""

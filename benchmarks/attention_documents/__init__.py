"""Flash attention on CPU: its time for each visible pair of tokens, within documents against causal."""

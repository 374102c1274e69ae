"""How well `telechat-moe diagnose` names planted causes in simulated clusters, and how fast."""

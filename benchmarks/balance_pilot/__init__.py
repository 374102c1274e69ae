"""Pilot ablation of balance losses and capacities at the size of a laptop."""

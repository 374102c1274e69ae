"""What happens to the experts of a run: where each one is, which moves pay, and how evenly they are loaded.

It may import `errors` and `numerics`, NumPy and SciPy. Start with `placement.py` (the map from an expert to its slot),
then `forecast.py` (the loads that are expected), `assign.py` (experts to devices) and `planner.py` (which moves pay).
`loads.py` records the loads; what experts learn is in `telechat_moe.analysis`.
"""

"""What happens to the experts of a run: where each one is, and which moves pay.

It may import `errors`, `units` and `recipe`, NumPy and SciPy. Start with `placement.py` (the map from an expert to its slot),
then `forecast.py` (the loads that are expected), `assign.py` (experts to devices) and `planner.py` (which moves pay).
"""

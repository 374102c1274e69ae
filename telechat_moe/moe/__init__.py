"""What happens to the experts of a run: where each one is, which moves pay, and what experts learn.

It may import `errors`, `units`, `html` and `recipe`, NumPy and SciPy. Start with `placement.py` (the map from an expert to its slot),
then `forecast.py` (the loads that are expected), `assign.py` (experts to devices) and `planner.py` (which moves pay).
What experts learn: `loads.py` (recorded by a run), `analysis.py` (statistics), `report.py` and `page.py`.
"""

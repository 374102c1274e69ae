"""What the experts of a run learn: loads over time, and what routers do at checkpoints on a fixed text.

`experts.py` reads a run and puts the report together; `observe.py` watches the routers of a model; `statistics.py` has the
tests and measures; `report.py` holds the numbers, `page.py` draws them. May import train and what is below it; only the
command line imports this room. Begin with `experts.py`.
"""

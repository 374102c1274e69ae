"""Training: one step, the engines that compute it, the loop, the guard, the state of a run, what the user sees.

Each module knows only those before it: `step`, `optimizer`, `schedule`, `guard`, `ranks`; `programs/` (run a rank's graph); `engine` (one
process) and `rank_engine` (a rank's graph); `run_state`; `callbacks`, which MindFormers' trainer calls, too; `loop`; `trainer`, which
puts them together. May import checkpoint, graph, data, sharding, model and what is below them. Begin with `trainer.py`.
"""

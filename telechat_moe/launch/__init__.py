"""Processes of a run: the plan of hosts and ranks, supervision, affinity.

May import train, interop and what is below them. Begin with `job.py`.
"""

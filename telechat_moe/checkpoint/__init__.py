"""Checkpoints: write, read, shard, reshard, and save in the background.

May import data, graph, sharding and what is below them. Begin with `checkpoint.py`.
"""

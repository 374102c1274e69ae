"""Checkpoints: write, read, verify, reshard, and save in the background.

`checkpoint.py` writes and reads one; `manifest.py` says what it consists of; `folder.py` keeps the folder of a run's
checkpoints; `joint_save.py` and `rank_shards.py` write one from several ranks; `reshard.py` shards one for a layout;
`stored.py` opens one of any layout, `weights.py` reads weights tensor by tensor; `background.py` and `snapshot.py` save
while training continues.

May import data, graph, sharding and what is below them. Begin with `checkpoint.py`.
"""

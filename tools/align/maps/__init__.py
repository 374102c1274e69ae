"""Which tensors of a run are which of a run of another framework; begin with ``tensor_map.py``.

May import ``dump``, ``operators`` and of ``judge`` the data flow and points.
"""

"""Dumps of any writer: records, values, layouts, logical tensors.

May import errors, files and `numerics`. Begin with `records.py`.
"""

"""Cells with collectives that replace cells of the model when it runs on more than one device.

May import model and what is below it. Begin with `collective.py`.
"""

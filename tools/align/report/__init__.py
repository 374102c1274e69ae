"""Answers of the verbs as pages and as JUnit XML.

May import judge and loss. Begin with `combined.py`.
"""

"""The outcome of a bisection as a page, and answers as JUnit XML.

May import judge. Begin with `bisect_page.py`.
"""

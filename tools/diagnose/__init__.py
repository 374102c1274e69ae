"""Diagnosis: where the time of a run goes, and which rank, host or link is to blame.

`records.py` holds times of ranks x steps x parts, `read.py` reads them from a run's timings, `traces.py` and `chrome.py` from traces of profilers;
`excess.py` finds ranks that are later than their peers, `judge.py` names causes, `causes.py` is the table of what can be told
apart, `bound.py` says what bounds a stage, `report.py` and `page.py` say it. Imports without mindspore. Begin with `judge.py`.
"""

"""The results of a job, for programs (`report.json`) and for people (tables and pictures).

In: plain values and dicts of JSON types. Out: files, and text on a terminal.
"""

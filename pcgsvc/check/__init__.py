"""Captured entries against plain execution: are they right, and how fast are they.

In: a program, its workspace and its captured entries. Out: the entries that may serve, and rows for
the report. Knows nothing of calls, runners or tables for people.
"""

"""What a job found, for programs (`report.json`) and for people (tables and pictures).

In: plain values and dicts of JSON types. Out: files, and text on a terminal.
Knows nothing of how any of it was found out.
"""

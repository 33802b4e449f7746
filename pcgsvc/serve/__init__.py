"""What users hold and call.

In: a program, its memory and its captured entries. Out: a `Runner`: results of calls, counted.
Knows nothing of how any of it was built, and of no model in particular.
"""

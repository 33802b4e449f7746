"""Which capture sizes a given traffic wants.

In: a config with `capture.sizes=auto:FILE`, or a traffic file. Out: sizes and how they were
chosen. Knows nothing of models; builds nothing.
"""

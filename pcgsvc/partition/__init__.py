"""Where a graph is cut, and why.

In: a traced graph, or a forward that is not traced. Out: a `Partition` into regions and boundaries.
Knows nothing of compilers, of the disk, or of captured graphs.
"""

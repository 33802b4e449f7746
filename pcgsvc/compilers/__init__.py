"""What makes a region's kernels.

In: a piece. Out: a callable, and the bytes from which a later process makes it again.
Knows nothing of where those bytes lie, or of captured graphs.
"""

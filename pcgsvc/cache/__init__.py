"""The disk cache: programs and the pieces that they share, under keys made of facts.

In: facts, images, compiled pieces. Out: what was stored under the same facts, or why there is none.
Knows nothing of CUDA graphs, which are never written to disk.
"""

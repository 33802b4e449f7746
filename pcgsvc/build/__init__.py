"""A request -> a compiled model: loaded from the disk cache, or traced, split, compiled and stored.

In: a `Request`. Out: a `CompiledModel`, within an environment of locks, torch modes and folders.
Knows nothing of capture; the order in which the stages follow each other stands in `pipeline`.
"""

"""A model -> one canonical graph.

In: a module and how its inputs look. Out: a `TracedGraph`: nodes, bindings, what tracing assumed.
Knows nothing of splitting, compilers or captured graphs.
"""

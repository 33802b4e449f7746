"""The models that pcgsvc brings, or loads from checkpoints and users' modules.

In: a config's `model`. Out: a `ModelBundle`, and the `Request` of a configured model.
Knows nothing of tracing, compilers or graphs.
"""

"""A model's forward as callers see it: arguments, constants, results, batches, samples.

In: a module with example arguments. Out: a `Request`, and the static memory of a step.
Knows nothing of models by name, tracing, compilers or graphs.
"""

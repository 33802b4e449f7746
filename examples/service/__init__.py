"""A small service over pcgsvc runners: an example to copy, not a part of the library.

`app` has the HTTP side, `front` the batching, `load` a load generator. Guide: docs/service.md.
"""

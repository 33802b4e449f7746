"""The service of `examples/service` on Ray Serve: an example to copy, not a part of the library.

Guide: docs/ray-serve.md.
"""

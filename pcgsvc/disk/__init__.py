"""The parts of the disk store: envelopes, locks, rows, use and budget, reports.

In: bytes under hex keys. Out: the same bytes or a named miss. Knows nothing of graphs, torch or
models; callers use `pcgsvc.store.Store`.
"""

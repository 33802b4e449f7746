"""The parts of the disk store, each knowing only those above it.

`envelope` (bytes that prove themselves), `file_lock`, `quarantine`, `bytes_disk` (diskcache, cut
down to bytes), `faults` (what an error means), `reader` and `writer` (of the database), `table`
(entries, and what happens to damage), `usage` (who uses what, the budget), `lookup` (records),
`entries` (cache modes), `reports`, `scratch`. Callers use `pcgsvc.store`.
"""

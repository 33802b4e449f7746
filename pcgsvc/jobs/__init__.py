"""What the command line does: one module, or one folder, per job.

In: a command line, or a config. Out: an exit code, a report, and what a person reads.
Knows nothing of how a runner works inside.
"""

"""A program -> replay steps, per mode and size, in one graph pool.

In: a program, its workspace, and the entries wanted. Out: a `GraphTable`, in this process only.
Knows nothing of compilers, of the disk, or of how a call finds its entry.
"""

"""Splitting ops, the context of a step, attention and its kernels, and what each op supports.

In: tensors of a step and its metadata. Out: ops that are boundaries of a program.
Knows nothing of how a program is cut, compiled or captured around them.
"""

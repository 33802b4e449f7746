"""What runs for one step, as data: pieces, the program over them, and what identifies it.

In: a traced graph and its partition. Out: a `Program`, its `ProgramImage`, guards, facts and keys.
Knows nothing of how a graph is cut, compiled, stored or captured.
"""

"""Where a traced graph is cut, and why."""

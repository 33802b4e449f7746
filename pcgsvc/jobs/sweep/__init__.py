"""The jobs of a sweep, run apart from each other, and how they ended."""

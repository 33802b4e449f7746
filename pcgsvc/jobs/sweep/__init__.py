"""The jobs of a sweep, run apart from each other, and what became of them."""

"""Running the jobs of a sweep apart from each other, and gathering what became of them."""

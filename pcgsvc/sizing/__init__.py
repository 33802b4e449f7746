"""Which capture sizes a given traffic wants, and whether they were used."""

"""Models that pcgsvc brings or loads, behind one type: `ModelBundle`."""

"""What makes a region's kernels: piece -> callable <-> bytes."""

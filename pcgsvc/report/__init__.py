"""What a job found, for programs and for people."""

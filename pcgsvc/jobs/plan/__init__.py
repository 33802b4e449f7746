"""`job=plan`: what a build would cut, capture and hold, found out without building it."""

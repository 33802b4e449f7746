"""`job=sizes`, and `job=run` with `traffic`: which capture sizes a traffic wants and uses."""

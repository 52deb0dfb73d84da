"""One file for each kind of task: what it reads, learns and measures."""

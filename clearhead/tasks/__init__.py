"""The kinds of task, one folder each, over a few shared bases."""

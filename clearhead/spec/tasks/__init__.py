"""Facts of tasks: the record of a model's task, the kinds of task by name, and their recipes and words."""

"""Run directories: layout, lock, checkpoints and metrics, and the files of the model in a run."""

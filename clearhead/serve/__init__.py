"""One application that serves a model on this machine: the explorer, computed on demand."""

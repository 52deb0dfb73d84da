"""Training: run files, checks before the first step, the loop, optimizers, and several processes."""

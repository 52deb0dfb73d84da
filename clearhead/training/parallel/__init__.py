"""Training with several processes and machines, started by torchrun."""

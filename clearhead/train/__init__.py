"""From data to weights: loss, optimizer, schedule, loop, checkpoints and the run directory."""

"""What every other folder builds on: errors, files, printing, progress, the machine, argument checks, hook points."""

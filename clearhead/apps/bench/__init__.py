"""The speed of a model on this machine, with the machine's limits beside it."""

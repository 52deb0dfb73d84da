"""Parts of a model that are trained by faster functions on a CPU, forward and backward."""

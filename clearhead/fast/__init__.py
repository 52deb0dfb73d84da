"""Fast execution of models: replicas of the plain core over the same weights, and the kernels that they call."""

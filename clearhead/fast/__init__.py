"""Whatever makes a model faster beside the plain core: other trees over its weights, and the kernels they run by."""

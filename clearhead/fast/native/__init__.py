"""C++ kernels for a CPU, compiled for the current processor at their first use."""

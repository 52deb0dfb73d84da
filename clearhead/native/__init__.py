"""Kernels in C++ for inference on a CPU, compiled for the processor at hand when they are first needed."""

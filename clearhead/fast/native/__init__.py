"""Kernels in C++ for a CPU, compiled for the processor at hand when they are first needed."""

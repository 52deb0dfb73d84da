"""Inference beside the plain core: the same modules with faster linear layers, and with weights in 8 bits."""

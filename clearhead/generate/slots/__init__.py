"""Decoding in slots of fixed size on a GPU: the running batch, and the choice of tokens on the device."""

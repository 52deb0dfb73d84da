"""Decoding in slots of fixed size: buffers on the device, steps that a GPU replays, tokens read one step late."""

"""The stages of a training before its first step, in the order opening, data, model, trainer."""

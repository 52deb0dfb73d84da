"""Recipes of `clearhead new`: survey the data, and write a run file that fits it."""

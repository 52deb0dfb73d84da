"""Descriptions of tasks, their registry by name, and the task record of a model."""

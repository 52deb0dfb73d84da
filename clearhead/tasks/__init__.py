"""Tasks, such as translate and classify: one folder per task, and shared base classes."""

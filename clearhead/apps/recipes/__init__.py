"""What `clearhead new` writes: a look at the data and a run file that fits it."""

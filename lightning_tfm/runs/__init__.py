"""The folder of a run: its lock, and runs in child processes."""

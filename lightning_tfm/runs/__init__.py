"""Folder of a run: its files, its lock, and runs in child processes."""

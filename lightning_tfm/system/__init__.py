"""What touches the machine: files, memory, progress bars and the terminal."""

"""Interface to the operating system: files, memory, the terminal, progress bars and installed versions."""

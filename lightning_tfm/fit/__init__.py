"""The commands fit, validate and test: the command line, defaults, resuming, the folder of the run, the console."""

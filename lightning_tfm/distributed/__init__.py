"""Several processes: strategies, sharded tensors and launchers."""

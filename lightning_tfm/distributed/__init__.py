"""Several processes: strategies, sharded tensors, launchers and heartbeats."""

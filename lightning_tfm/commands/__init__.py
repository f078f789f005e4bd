"""What a user types beyond Lightning's own commands, a file each."""

"""What measures the framework against its peers, side by side."""

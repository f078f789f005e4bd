"""Benchmarks that compare the framework with its peers."""

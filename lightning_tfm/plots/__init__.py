"""Figures and their style."""

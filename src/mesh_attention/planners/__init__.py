"""Choices, and the pure functions that turn them into plans."""

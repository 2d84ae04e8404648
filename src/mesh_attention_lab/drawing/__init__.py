"""Traces for Perfetto and the explorer page. Values come in, files go out; nothing is simulated here."""

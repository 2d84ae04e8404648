"""Traces for Perfetto, charts and the explorer page. Values come in, files go out; nothing is simulated here."""

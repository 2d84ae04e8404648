"""A plan as data: its parts, its text, and what follows from it. No torch, no clock, no files."""

"""Bindings to other stacks, one file each. Nothing happens at import."""

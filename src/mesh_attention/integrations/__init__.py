"""Bindings to other stacks. Nothing here is imported by the rest of the library, and nothing happens at import."""

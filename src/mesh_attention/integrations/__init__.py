"""The library in the stacks people use. Nothing here is imported unless asked for, and nothing happens at import."""

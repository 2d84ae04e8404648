"""The command line: one file a command, and each parses, calls the library and prints. It decides nothing.

Reading order: main, options, sizes, plan, comparison, matrix, tables, verify, files, progress.
"""

"""The command line: one file a command, and each parses, calls the library and prints. It decides nothing.

Reading order: main, options, sizes, words, plan, comparison, matrix, tables, verify, files, progress; tune,
tune_report, usage, tune_chart; simulate, planned, passes, simulate_report, lanes; draw, scenes, pictures; calibrate;
demo, demo_worker, demo_report.
"""

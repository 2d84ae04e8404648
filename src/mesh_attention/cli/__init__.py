"""The command line: each command parses its options, calls the library and prints.

Reading order: main, command (groups of options), options (those that commands share), plan, tables, words, matrix,
files, progress, verify; simulate, lanes; tune, tune_report, usage; draw; replay, replay_report; calibrate,
calibrate_report; demo, demo_worker, demo_report.
"""

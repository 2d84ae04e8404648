"""The command line: each command parses its options, calls the library and prints.

Reading order: main, command (groups of options), options (those that commands share), plan (and verify), tables,
terminal (pictures in text), files; simulate; tune, tune_report; draw; replay, replay_report; calibrate,
calibrate_report; demo, demo_worker, demo_report.
"""

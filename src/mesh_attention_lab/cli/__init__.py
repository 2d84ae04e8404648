"""The command line: each command parses its options, calls the library and prints.

Reading order: main, options (those that commands share), plan (and verify), terminal (what they print), files;
simulate; tune; draw; replay; calibrate; demo, demo_worker.
"""

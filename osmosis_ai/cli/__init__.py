"""The command line: one small file per command, no logic beyond options and printing."""

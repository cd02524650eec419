"""The command line: `serve-app --help`. One file per command that needs more than a few lines."""

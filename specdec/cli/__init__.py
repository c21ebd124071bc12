"""Layer 8: the command line, one command a file."""

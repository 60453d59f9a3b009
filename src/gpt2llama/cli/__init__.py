"""The command line: one file per command, each parse -> call -> print. Nothing imports it."""

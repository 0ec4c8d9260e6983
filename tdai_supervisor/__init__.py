"""One owner for the memory Gateway: a supervisor daemon and the command that runs it."""

__version__ = "0.1.0"

"""Everything that decides: pure functions and tables over facts. No clock, no files, no sockets, no processes."""

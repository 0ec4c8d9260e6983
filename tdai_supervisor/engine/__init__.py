"""The running supervisor: observe, ask the table, act."""

"""The command memory-tencentdb-ctl: verbs return data, one renderer prints it."""

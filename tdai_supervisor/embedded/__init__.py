"""The embedded Gateway: the HTTP contract of the memory Gateway over SQLite, in a process of its own.

Nothing outside this package imports it: it is started as `python -m tdai_supervisor.embedded`.
"""

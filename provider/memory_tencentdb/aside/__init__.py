"""What a session does not need at its start: delivery, checkpoints, remote Gateways, status, doctor, setup.

The host executes every module beside the package's __init__ at every session start; modules in here are imported where
they are used.
"""

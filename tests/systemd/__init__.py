"""Tests on a systemd that runs."""

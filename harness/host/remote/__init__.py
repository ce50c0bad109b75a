"""Engines in other processes: what is sent to them and back."""

"""The same model on several engines under Ray Serve, as one: see ``open.py``."""

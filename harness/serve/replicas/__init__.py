"""One model on several engines under Ray Serve, behind one driver: see ``open.py``."""

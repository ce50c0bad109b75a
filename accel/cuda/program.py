"""Kernels compiled by NVRTC, and cubins kept on disk.

A tuned kernel registers in ``accel/cuda/tuned.py``: its docstring says how, with what parameters it
is called, and how it gets a weight layout of its own.
"""

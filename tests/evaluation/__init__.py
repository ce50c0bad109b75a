"""Evaluation harnesses against this runtime, with tasks made from local data."""

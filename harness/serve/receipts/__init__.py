"""Receipts: signed records of answers, from which anyone can recompute the answers."""

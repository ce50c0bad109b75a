"""Receipts: signed records of answers, from which a third party derives the answers again."""

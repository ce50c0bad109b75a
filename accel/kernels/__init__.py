"""Kernel bodies that every GPU tier shares: one op a file, in a dialect of four languages."""

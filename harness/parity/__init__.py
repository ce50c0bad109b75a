"""Parity tests: cases generated from the opcode table, compared with the numpy definitions."""

"""Rounding to binary32 done on exact rationals, independent of any floating-point unit."""

from fractions import Fraction


def round32(value: Fraction) -> Fraction:
    """Nearest binary32 to an exact value, ties to even; subnormals are kept."""
    if not value:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - 23, -149)
    return round(value / quantum) * quantum

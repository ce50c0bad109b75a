// Packed tokens as binary16, by blocks of tokens that a block of threads multiplies, the last with
// as many groups of eight tokens as are left. For every unit of columns there are four quarters, in
// each one eight after the other with QUARTER_BYTES: of 16 columns 16 bytes a token, the columns
// 4 t and 4 t + 2 for t = 0..3, then as much with the columns 4 t + 1 and 4 t + 3. The sums of the
// unit's sub-blocks are SUM_BASE a + b, with a and b of one sign: of every eight 16 bytes a token
// with eight a, then as much with eight b. A word a token is the unit's scale, a power of two, whose
// fraction is the sum of all its integers plus SUM_ZERO.

#ifndef HALF_PLANES_H
#define HALF_PLANES_H

#define HALF_STEP_BYTES 256  // of eight tokens and 16 columns
#define QUARTER_BYTES 1024   // of eight tokens and a quarter of a unit
#define HALF_EIGHT_SUMS 256
#define SUM_BASE 1024
#define SUM_ZERO (1 << 19)
#define SCALE_BITS 0xFF800000u
#define SUM_BITS 0x007FFFFFu

// A scale that is NaN becomes infinite, and its products NaN, since all integers are 0 then.
DEVICE unsigned scale_and_sum(float scale, int sum) {
    return (__float_as_uint(scale) & SCALE_BITS) | (unsigned)(sum + SUM_ZERO);
}
// The sum of a word, which fills the fraction of a number from 2^23 on.
DEVICE float sum_of_word(unsigned word) {
    return __uint_as_float((word & SUM_BITS) | 0x4B000000u) - (8388608.0f + (float)SUM_ZERO);
}
DEVICE float scale_of_word(unsigned word) { return __uint_as_float(word & SCALE_BITS); }

#endif

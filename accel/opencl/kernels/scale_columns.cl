// SCALE_COLUMNS: y = x * factors, one factor a column or one for all.
DEFINE_ELEMENTWISE(scale_columns, const bool single = op.factor_count == 1,
                   A(x) * (single ? (float16)(op.factors[0]) : V(factors)))

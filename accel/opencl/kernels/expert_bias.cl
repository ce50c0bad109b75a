// Each row plus the bias of its expert: y[p] = x[p] + bias[ids[p]], p a pair of a token and an expert.
//
// x is [tokens * used, width], ids [tokens, used], bias [experts, width].

DEFINE_BY_COLUMNS(expert_bias,
                  const int expert = op.ids[(ulong)(token / op.used) * op.ids_stride + token % op.used];
                  const GLOBAL float *bias = op.bias + (ulong)expert * op.bias_stride,
                  A(x) + load_padded(bias + k, count))

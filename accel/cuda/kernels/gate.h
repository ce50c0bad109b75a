// The gated activations of SWIGLU (rule R2).

#ifndef GATE_H
#define GATE_H

static __device__ __forceinline__ float gated(uint activation, float gate, float up) {
    return (activation == 2   ? sigmoid_of(gate)
            : activation == 1 ? gelu_of(gate)
                              : silu_of(gate)) *
           up;
}

#endif

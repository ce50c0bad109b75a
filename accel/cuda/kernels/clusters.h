// Kernels that are compiled for clusters of CLUSTER blocks, or for no clusters if that is 1.

#ifndef CLUSTERS_H
#define CLUSTERS_H

#include "warp.h"

#if CLUSTER == 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

// All threads of the cluster begin a meeting, and none ends it before all have begun it.
DEVICE void begin_meeting() {
#if CLUSTER > 1
    arrive_at_cluster();
#endif
}
DEVICE void end_meeting() {
#if CLUSTER > 1
    await_cluster();
#else
    __syncthreads();
#endif
}

// Between two meetings: every block of the cluster gets a warp's data at the same address.
DEVICE void tell_cluster(float *address, float value, int lane) {
#if CLUSTER > 1
    if (lane < CLUSTER) store_at_peer(address, value, lane);
#else
    if (lane == 0) *address = value;
#endif
}

#endif

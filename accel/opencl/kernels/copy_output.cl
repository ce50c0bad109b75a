#if SHARED_ADDRESSES

// What a step left at `source`, before the next one overwrites it.
__kernel void copy_output(ulong source, ulong target, ulong words) {
    for (ulong i = get_global_id(0); i < words; i += get_global_size(0))
        ((GLOBAL uint *)target)[i] = ((const GLOBAL uint *)source)[i];
}

#endif

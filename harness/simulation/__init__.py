"""A deterministic simulator of the engine: one seed, one schedule, in virtual time."""

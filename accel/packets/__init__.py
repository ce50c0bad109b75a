"""Parts that all device tiers share, without any device's API: lowering to ops, schedules,
packets."""

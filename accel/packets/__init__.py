"""What packet devices share, without any device's API: a graph becomes ops, levels and packets."""

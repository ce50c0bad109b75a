"""Reports on model graphs side by side: their parts, bytes and FLOPs."""

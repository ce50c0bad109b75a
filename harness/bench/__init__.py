"""Speed and memory, measured side by side with a peer on the same file."""

"""Routes of llama.cpp's server that its clients use."""

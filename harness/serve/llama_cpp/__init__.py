"""The routes of llama.cpp's own that its clients use."""

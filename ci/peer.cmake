# Included by the build of llama-cpp-python: its package loads neither the library of llama.cpp's
# command-line programs nor, for text, that of images, and they are half of the time to build.
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)

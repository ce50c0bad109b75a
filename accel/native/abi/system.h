// What differs between systems: reading and mapping files, loading a library, clock and process.

#ifndef SYSTEM_H
#define SYSTEM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <process.h>
#include <windows.h>
#define SEPARATORS "/\\"
#else
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#define SEPARATORS "/"
#endif

#if defined(__x86_64__)
#define MACHINE "x86_64"
#elif defined(__aarch64__)
#define MACHINE "aarch64"
#else
#define MACHINE "unknown"
#endif

// A file that is open for reading. `reason` says why it could not be.
typedef struct {
    uint64_t bytes;
    const char *reason;
#if defined(_WIN32)
    HANDLE handle;
#else
    int handle;
#endif
} INPUT_FILE;

#if defined(_WIN32)
static inline uint64_t nanoseconds(void) {
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (uint64_t)((double)now.QuadPart * 1e9 / (double)frequency.QuadPart);
}

static inline long process_id(void) { return (long)_getpid(); }

static inline uint32_t processors(void) {
    SYSTEM_INFO information;
    GetSystemInfo(&information);
    return information.dwNumberOfProcessors;
}

static inline bool open_input(INPUT_FILE *file, const char *path) {
    LARGE_INTEGER size;
    file->reason = "it cannot be opened";
    file->handle = CreateFileA(path, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, 0,
                               OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, 0);
    if (file->handle == INVALID_HANDLE_VALUE) return false;
    if (GetFileSizeEx(file->handle, &size)) {
        file->bytes = (uint64_t)size.QuadPart;
        return true;
    }
    CloseHandle(file->handle);
    return false;
}

static inline void close_input(INPUT_FILE *file) { CloseHandle(file->handle); }

// The number of bytes that were read into `target`.
static inline uint64_t read_input(INPUT_FILE *file, void *target, uint64_t bytes) {
    uint64_t done = 0;
    for (DWORD count; done < bytes; done += count) {
        const DWORD part = (DWORD)(bytes - done < 1u << 30 ? bytes - done : 1u << 30);
        if (!ReadFile(file->handle, (char *)target + done, part, &count, 0) || !count) break;
    }
    return done;
}

static inline void *map_input(INPUT_FILE *file) {
    HANDLE mapping = CreateFileMappingA(file->handle, 0, PAGE_READONLY, 0, 0, 0);
    if (!mapping) return 0;
    void *mapped = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    CloseHandle(mapping);
    return mapped;
}

static inline void unmap(void *mapped, uint64_t bytes) {
    (void)bytes;
    UnmapViewOfFile(mapped);
}

static inline void *load_library(const char *path) { return LoadLibraryA(path); }
static inline void *symbol_of(void *library, const char *name) {
    return (void *)GetProcAddress(library, name);
}
static inline void unload_library(void *library) { FreeLibrary(library); }

// The path of the file that contains `function`.
static inline bool path_of(void *function, char *path, size_t bytes) {
    HMODULE module;
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS |
                        GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (!GetModuleHandleExA(flags, function, &module)) return false;
    const DWORD length = GetModuleFileNameA(module, path, (DWORD)bytes);
    return length > 0 && length < bytes;
}
#else
static inline uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline long process_id(void) { return (long)getpid(); }

static inline uint32_t processors(void) {
    const long found = sysconf(_SC_NPROCESSORS_ONLN);
    return found > 0 ? (uint32_t)found : 1;
}

static inline bool open_input(INPUT_FILE *file, const char *path) {
    struct stat status;
    file->handle = open(path, O_RDONLY | O_CLOEXEC);
    if (file->handle < 0) {
        file->reason = strerror(errno);
        return false;
    }
    if (!fstat(file->handle, &status) && S_ISREG(status.st_mode)) {
        file->bytes = (uint64_t)status.st_size;
        return true;
    }
    file->reason = "it is no regular file";
    close(file->handle);
    return false;
}

static inline void close_input(INPUT_FILE *file) { close(file->handle); }

// The number of bytes that were read into `target`.
static inline uint64_t read_input(INPUT_FILE *file, void *target, uint64_t bytes) {
    uint64_t done = 0;
    while (done < bytes) {
        const size_t part = bytes - done < 1u << 30 ? (size_t)(bytes - done) : (size_t)1 << 30;
        const ssize_t count = read(file->handle, (char *)target + done, part);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) break;
        done += (uint64_t)count;
    }
    return done;
}

static inline void *map_input(INPUT_FILE *file) {
    void *mapped = mmap(0, (size_t)file->bytes, PROT_READ, MAP_SHARED, file->handle, 0);
    return mapped == MAP_FAILED ? 0 : mapped;
}

static inline void unmap(void *mapped, uint64_t bytes) { munmap(mapped, (size_t)bytes); }

static inline void *load_library(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static inline void *symbol_of(void *library, const char *name) { return dlsym(library, name); }
static inline void unload_library(void *library) { dlclose(library); }

// The path of the file that contains `function`.
static inline bool path_of(void *function, char *path, size_t bytes) {
    Dl_info information;
    if (!dladdr(function, &information) || !information.dli_fname) return false;
    return (size_t)snprintf(path, bytes, "%s", information.dli_fname) < bytes;
}
#endif

// Bytes of a path up to its last separator, which is included; 0 where it has none.
static inline size_t folder_length(const char *path) {
    size_t length = 0;
    for (size_t i = 0; path[i]; i++)
        if (strchr(SEPARATORS, path[i])) length = i + 1;
    return length;
}

#endif
